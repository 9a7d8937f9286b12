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


def is_free(settings: SamplingConfig) -> bool:
    """Whether classes have no say anywhere on the way."""
    return not settings.guidance and tuple(settings.interval) == (0.0, 1.0)


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

    def refuse_idle(self, settings: SamplingConfig, *, codec: bool) -> None:
        """Refuse what would change nothing; `codec` tells whether the run has one."""
        if self.latents and not codec:
            raise UserError("latents: this run has no codec, so samples are written as they are; leave it out")
        if self.classes is not None and is_free(settings):
            raise UserError("classes: with guidance 0 samples have no class; leave one of the two out")
        if self.interval is not None and settings.guidance == 1:
            raise UserError("interval: guidance is 1, so there is nothing to guide; give a guidance, or leave it out")

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
