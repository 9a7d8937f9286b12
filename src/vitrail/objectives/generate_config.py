"""Keys of objectives that learn to make samples, and what the model takes from them."""

from dataclasses import replace
from typing import Any, Literal

from vitrail.diffusion import SamplingConfig
from vitrail.errors import UserError
from vitrail.objectives.objective import check_names
from vitrail.recipe import config

LONGEST = 1000  # what a model's time input reaches, by diffusion/process.py


@config
class GenerateConfig:
    """Keys that both kinds have."""

    kind: str
    classes: bool | None = None  # whether the labels of items condition the model; null: if model.classes is given
    names: tuple[str, ...] | None = None  # of the classes, label 0 first; null: those of the data
    variables: tuple[str, ...] | None = None  # of the data, in their order; null: as the data tell
    condition: tuple[str, ...] = ()  # those of them that are given, not made
    coarse: int | None = None  # give the image itself, averaged over blocks of so many voxels
    sampling: SamplingConfig = SamplingConfig()  # of the pictures of a run, and the default of `vitrail sample`

    def __post_init__(self) -> None:
        check_names(self.names)
        if self.coarse is not None and self.coarse < 2:
            raise ValueError(f"coarse {self.coarse} must be at least 2 voxels; leave it out to give no coarse image")
        if len(set(self.condition)) < len(self.condition):
            raise ValueError(f"condition {list(self.condition)} names a variable twice; name each once")

    @property
    def longest(self) -> int:
        """The largest number that a model's time input may be."""
        return LONGEST

    def labels_with(self, model: Any) -> Literal["item"] | None:
        known = getattr(model, "classes", None)
        return "item" if (known is not None if self.classes is None else self.classes) else None

    def check_model(self, model: Any) -> None:
        """Refuse a model that cannot learn this."""
        if getattr(model, "output", None) != "denoised":
            raise UserError(
                f"objective.kind: {self.kind!r} trains models that take noisy images and a time, such as 'dit' and "
                f"'diffusion_vit', not {model.kind!r}"
            )
        if model.ndim not in (2, 3):
            raise UserError(
                f"model.ndim: {model.ndim}, but objective {self.kind!r} makes images and volumes; set it to 2 or 3"
            )
        if getattr(model, "learn_sigma", False):
            raise UserError(
                f"model.learn_sigma: objective {self.kind!r} learns no variances, and would leave half of the output "
                "untrained; leave learn_sigma out"
            )
        if self.classes and not hasattr(model, "classes"):
            raise UserError(
                f"objective.classes: model {model.kind!r} takes no classes; leave it out, or use model 'dit'"
            )
        if self.classes is False and getattr(model, "classes", None) is not None:
            raise UserError(f"objective.classes: false, but model.classes is {model.classes}; leave one of them out")

    def check_statistics(self, data: Any) -> None:
        """Refuse entries of the data that are normalised in ways of their own, where samples belong to none of them."""
        own = [number for number, entry in enumerate(data.train) if getattr(entry, "statistics", None) is not None]
        if self.condition or self.coarse or (data.statistics != "each" and not own):
            return
        key = "data.statistics: each" if data.statistics == "each" else f"data.train.{own[0]}.statistics"
        raise UserError(
            f"{key} gives entries means and stds of their own, but objective {self.kind!r} makes samples that belong "
            "to no entry, and would not know their units; use data.statistics: shared"
            f"{' and leave those of the entry out' if own else ''}"
        )

    def fit(self, model: Any, variables: tuple[str, ...], data: Any) -> tuple[Any, Any]:
        """This config and the model's, with what follows from each other and from the data and their variables."""
        self.check_model(model)
        self.check_statistics(data)
        if data.augment.mixup or data.augment.cutmix:
            raise UserError(
                "data.augment: mixup and cutmix make images of two classes, and a model that makes images would learn "
                "to make such; set them to 0"
            )
        if self.names and self.labels_with(model) is None:
            raise UserError(
                f"objective.names: {list(self.names)} are given, but classes do not condition the model; set "
                "objective.classes: true, or leave them out"
            )
        if self.variables not in (None, variables):
            raise UserError(
                f"objective.variables: {list(self.variables or ())}, but the data have {list(variables)}; leave it out"
            )
        unknown = [name for name in self.condition if name not in variables]
        if unknown:
            raise UserError(
                f"objective.condition: {unknown[0]!r} is not a variable of the data, which have "
                f"{', '.join(variables)}; name some of these"
            )
        made = len(variables) - len(self.condition)
        if made < 1:
            raise UserError("objective.condition: all variables of the data are given, and none is left to be made")
        given = len(self.condition) + (made if self.coarse else 0)
        if model.condition_channels not in (0, given):
            raise UserError(
                f"model.condition_channels: {model.condition_channels}, but objective.condition and objective.coarse "
                f"give {given}; leave it out"
            )
        changes: dict[str, Any] = {"condition_channels": given}
        if hasattr(model, "time_steps") and model.time_steps < self.longest * model.time_scale:
            changes["time_steps"] = round(self.longest * model.time_scale)
        try:
            return replace(self, variables=variables), replace(model, **changes)
        except ValueError as error:
            raise UserError(f"objective.condition and model: {error}") from None
