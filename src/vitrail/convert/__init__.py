"""Recipes from the configurations of other systems: one engine, and a table of lines for each system."""

from vitrail.convert.engine import Converted
from vitrail.convert.files import SYSTEMS, TASKS, convert

__all__ = ["SYSTEMS", "TASKS", "Converted", "convert"]
