"""Weights from elsewhere: other libraries' files and this library's runs, into any model here."""

from vitrail.weights.load import load_initial, load_weights
from vitrail.weights.pieces import Entry, Report

__all__ = ["Entry", "Report", "load_initial", "load_weights"]
