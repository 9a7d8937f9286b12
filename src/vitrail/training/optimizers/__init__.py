"""Optimizers, one file each: a config that a recipe names, and the updates that it makes.

A new one is a file like `lion.py` and a line in recipe/kinds.py; a plugin needs no line.
"""
