"""Samples and latents of trained models, and how good samples are."""
