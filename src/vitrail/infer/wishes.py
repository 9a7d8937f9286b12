"""What a call of `vitrail sample` asks for, and what of it the recipe decides."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from vitrail.diffusion import SamplingConfig
from vitrail.diffusion.samplers import AUTO
from vitrail.errors import UserError
from vitrail.recipe.kinds import nearest

SAMPLERS = get_args(get_type_hints(SamplingConfig)["sampler"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a call asks for; None leaves it to the recipe."""

    number: int = 64
    classes: str | Sequence[str | int] | None = None  # names or numbers, or "all", which take turns
    steps: int | None = None
    sampler: str | None = None
    guidance: float | None = None
    interval: Sequence[float] | None = None
    seed: int | None = None
    batch: int | None = None  # samples computed at once
    weights: str | None = None
    format: str = "auto"
    latents: bool = False  # keep them as they are, undecoded

    def settings(self, recipe: SamplingConfig) -> SamplingConfig:
        given: dict[str, Any] = {name: getattr(self, name) for name in ("steps", "sampler", "guidance", "interval")}
        given = {name: value for name, value in given.items() if value is not None}
        if "sampler" in given and given["sampler"] not in SAMPLERS:
            near = nearest(str(given["sampler"]), list(SAMPLERS))
            hint = f"; did you mean {near!r}?" if near else ""
            raise UserError(f"sampler: {given['sampler']!r} is unknown{hint} (known: {', '.join(SAMPLERS)})")
        if given.get("sampler", recipe.sampler) == "auto":  # what that stands for may change; what is stored may not
            given["sampler"] = AUTO
        if "interval" in given:
            if len(given["interval"]) != 2:
                raise UserError(f"interval: {list(given['interval'])} must be two numbers, such as 0.2,0.8")
            given["interval"] = tuple(map(float, given["interval"]))
        try:
            return dataclasses.replace(recipe, **given)
        except ValueError as error:
            raise UserError(str(error)) from None

    def folder(self, step: int) -> str:
        """A name that tells calls apart; number may grow in the same folder."""
        words = [f"step-{step:08d}"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "number" or value == field.default:
                continue
            value = value if isinstance(value, str) or not isinstance(value, Sequence) else ",".join(map(str, value))
            words.append(field.name if value is True else f"{field.name}-{value:g}" if isinstance(value, float) else
                         f"{field.name}-{value}")  # fmt: skip
        return re.sub(r"[^\w.,=-]+", "_", "-".join(words))[:150]
