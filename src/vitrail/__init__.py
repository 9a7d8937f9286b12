"""vitrail trains vision transformers on scientific images and volumes, from a laptop to a supercomputer.

    import vitrail
    vitrail.train("configs/demo/mae3d.yaml")
    model = vitrail.load("runs/demo-mae3d")

Importing the package is cheap: PyTorch comes in with the first call.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "embed",
    "evaluate",
    "export",
    "load",
    "load_recipe",
    "load_weights",
    "predict",
    "probe",
    "sample",
    "train",
]

if TYPE_CHECKING:
    from vitrail.exports.export import export
    from vitrail.infer.embed import embed
    from vitrail.infer.eyes import load
    from vitrail.infer.predict import predict
    from vitrail.infer.probe import probe
    from vitrail.infer.sample import sample_run as sample
    from vitrail.recipe import load_recipe
    from vitrail.training.run import evaluate, train
    from vitrail.weights import load_weights

_HOMES = {
    "embed": "infer.embed:embed",
    "evaluate": "training.run:evaluate",
    "export": "exports.export:export",
    "load": "infer.eyes:load",
    "load_recipe": "recipe:load_recipe",
    "load_weights": "weights:load_weights",
    "predict": "infer.predict:predict",
    "probe": "infer.probe:probe",
    "sample": "infer.sample:sample_run",
    "train": "training.run:train",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'vitrail' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(f"vitrail.{module}"), attribute)
