"""Augmentation on the device: every change is a pure function of (seed, counter), alike on every device and rank."""

from vitrail.data.augment.augmenter import Augmentation, Augmenter, Crops, Raw
from vitrail.data.augment.geometry import orient, orientations, window

__all__ = ["Augmentation", "Augmenter", "Crops", "Raw", "orient", "orientations", "window"]
