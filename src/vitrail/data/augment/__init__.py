"""Augmentation on the device: every change is a pure function of (seed, counter), alike on every device and rank."""

from vitrail.data.augment.augmenter import Augmenter
from vitrail.data.augment.orientations import orient, orientations, window
from vitrail.data.augment.raw import Raw

__all__ = ["Augmenter", "Raw", "orient", "orientations", "window"]
