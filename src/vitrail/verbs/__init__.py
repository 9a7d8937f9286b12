"""Verbs of the command line in files of their own; cli.py puts them together."""
