"""Trained models as files for others: by themselves, under other projects' names, or as programs."""
