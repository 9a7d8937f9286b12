"""Diffusion as mathematics on tensors: processes that turn data into noise, and samplers that go the other way."""

from vitrail.diffusion.process import Denoised, Prediction, Process, Steps, Straight
from vitrail.diffusion.samplers import Predict, SamplingConfig, guided, sample

__all__ = ["Denoised", "Predict", "Prediction", "Process", "SamplingConfig", "Steps", "Straight", "guided", "sample"]
