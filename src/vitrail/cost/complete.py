"""What the data would tell a recipe, without reading any: channels, shape and classes.

They come from the recipe itself, else from what the first entry of data.train says of itself, which opens files but
reads no voxels. Where neither knows, the error names the key to give: a plan needs no data.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vitrail.errors import UserError
from vitrail.layers.patches import per_axis
from vitrail.models.inputs import encoder_of
from vitrail.objectives.objective import labels_of
from vitrail.recipe import Recipe


def complete(recipe: Recipe) -> Recipe:
    """The recipe with the model and the objective as training would complete them."""
    model, objective = recipe.model, recipe.objective
    try:
        crop = per_axis(recipe.data.crop, model.ndim)
    except ValueError as error:
        raise UserError(f"data.crop: {error}; model.ndim is {model.ndim}") from None
    entry = _Entry(recipe.data.train[0])
    condition = tuple(getattr(objective, "condition", ()))
    known = getattr(encoder_of(model), "variables", None)
    if known is not None:
        channels = len(known.known)
    else:
        channels = model.channels or _needed("model.channels", entry.channels(), entry) - len(condition)
    if hasattr(objective, "fit"):  # of the variables their number alone matters here
        names = (*condition, *(f"variable{number}" for number in range(channels)))
        objective, model = dataclasses.replace(objective, variables=None).fit(model, names, recipe.data)
    update: dict[str, Any] = {"channels": channels, "shape": crop}
    labels = labels_of(objective, model)
    if labels is not None and hasattr(model, "classes"):
        names = objective.names or ()
        classes = model.classes or len(names) or _needed("model.classes", entry.classes(labels), entry)
        update["classes"] = classes
        objective = dataclasses.replace(objective, names=names or tuple(f"class {n}" for n in range(classes)))
    try:
        model = dataclasses.replace(model, **update)
        if hasattr(model, "check"):
            model.check()
    except ValueError as error:
        raise UserError(f"data.crop and model: {error}") from None
    return recipe.model_copy(update={"model": model, "objective": objective})


def _needed(key: str, found: int | None, entry: _Entry) -> int:
    if found:
        return found
    reason = f"cannot be asked ({entry.trouble.partition(';')[0]})" if entry.trouble else "does not either"
    raise UserError(f"{key}: the recipe does not tell it and data.train.0 {reason}; give it, such as {key}=3")


class _Entry:
    """What an entry of data.train says of itself; opened only when it is asked for more than its config knows."""

    def __init__(self, config: Any) -> None:
        self.config, self.trouble, self._source = config, "", None
        self.path = getattr(config, "path", config.kind)

    def channels(self) -> int | None:
        c = self.config
        variables = getattr(c, "variables", None)
        if variables or (c.kind == "dummy"):
            return len(variables) if variables else c.channels
        return len(self.source.variables) if self.source is not None else None

    def classes(self, labels: str) -> int | None:
        if self.config.kind == "dummy":
            return self.config.classes
        if self.source is None:
            return None
        if labels == "item":
            return len(getattr(self.source, "class_names", ())) or None
        return max(getattr(self.source, "label_names", {}), default=-1) + 1 or None

    @property
    def source(self) -> Any:
        if self._source is None and not self.trouble:
            try:
                self._source = self.config.open()
            except (UserError, OSError) as error:
                self.trouble = str(error).rstrip(".")
        return self._source
