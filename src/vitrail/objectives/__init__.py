"""Objectives: one file for each thing that models are trained for."""
