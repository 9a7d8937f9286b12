"""vitrail trains vision transformers on scientific images and volumes, from a laptop to a supercomputer.

    import vitrail
    vitrail.train("configs/demo/mae3d.yaml")
    model = vitrail.load("runs/demo-mae3d")

Importing the package is cheap: PyTorch comes in with the first call.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["evaluate", "load", "load_recipe", "load_weights", "sample", "train"]

if TYPE_CHECKING:
    from vitrail.infer.sample import sample_run as sample
    from vitrail.recipe import load_recipe
    from vitrail.training.run import evaluate, load, train
    from vitrail.weights import load_weights


def __getattr__(name: str) -> Any:
    import importlib

    if name in ("evaluate", "load", "train"):
        return getattr(importlib.import_module("vitrail.training.run"), name)
    if name == "load_recipe":
        return getattr(importlib.import_module("vitrail.recipe"), name)
    if name == "load_weights":
        return getattr(importlib.import_module("vitrail.weights"), name)
    if name == "sample":
        return importlib.import_module("vitrail.infer.sample").sample_run
    raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
