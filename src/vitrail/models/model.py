"""The base of every model: stages in order, through which one tensor flows.

A model knows nothing of ranks. It lists its stages with the side inputs that each needs (pipelines cut there), its
repeated blocks (what is checkpointed, compiled and sharded one by one), its drop-path rates and the parameters that
weight decay spares. parallelize() and the trainer obey these lists.

From images to a model's inputs: tokens, and what else its config asks for. No parameters take part.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.layers.attention import WHOLE, TokenSequence
from vitrail.layers.flops import Flops
from vitrail.layers.patches import Slab, per_axis
from vitrail.layers.scores import Span
from vitrail.layers.tokens import Tokens, tokenize
from vitrail.recipe.kinds import nearest


def encoder_of(config: Any) -> Any:
    """The encoder's config: a part of the model's, or (for plain ViTs) the model's own."""
    return getattr(config, "encoder", config)


def known_variables(config: Any) -> Any:
    """Return the variables that a model knows by name (EncoderConfig.variables); None where it knows none."""
    return getattr(encoder_of(config), "variables", None)


def filled(config: Any, facts: dict[str, Any]) -> Any:
    """Return a model's config with what the data tell of it; refused where it cannot work so."""
    try:
        config = replace(config, **facts)
        if hasattr(config, "check"):
            config.check()
    except ValueError as error:
        raise UserError(f"data.crop and model: {error}") from None
    return config


def sizes_of(recipe: Any, name: str) -> tuple[int, ...]:
    """Return data.crop or data.block, one number for each axis of the model."""
    try:
        return per_axis(getattr(recipe.data, name), recipe.model.ndim)
    except ValueError as error:
        raise UserError(f"data.{name}: {error}; model.ndim is {recipe.model.ndim}") from None


def variable_ids(config: Any, names: Sequence[str] | None, channels: int) -> tuple[int, ...] | None:
    """Return the places of a batch's variables among those that the model knows; None where it knows no names."""
    known = known_variables(config)
    if known is None:
        expected = getattr(config, "channels_in", config.channels)
        if expected is not None and channels != expected:
            raise ValueError(
                f"images have {channels} channels, the model {expected}; give it as many, or a model that "
                f"knows variables by name ({'variables' if encoder_of(config) is config else 'encoder.variables'})"
            )
        return None
    if names is None:
        if channels != len(known.known):
            raise ValueError(f"images have {channels} channels: say which of {list(known.known)} these are (variables)")
        names = known.known
    if len(names) != channels:
        raise ValueError(f"images have {channels} channels, but {len(names)} variables are named: {list(names)}")
    return known.ids(names)


def make_inputs(
    config: Any,
    images: Tensor,
    *,
    variables: Sequence[str] | None = None,
    scored: Tensor | None = None,
    span: Span | None = None,
    draws: Draws | None = None,
    slab: Slab | None = None,
) -> tuple[dict[str, Any], Tokens]:
    """Keyword inputs of a model for normalised images [B, C, *S], and their tokens (the way back to voxels).

    `variables` names the channels in order; adaptive trees grow on `scored` (the data, not normalised,
    in which the values in `span` are black and white) and vary with `draws`.
    Where the images are a `slab` of larger ones, the inputs are of the larger ones, with Rows in the place of values.
    """
    if images.ndim != config.ndim + 2:
        axes = "zyx"[-config.ndim :] if config.ndim <= 3 else [f"axis {i}" for i in range(config.ndim)]
        expected = f"[batch, channels, {', '.join(axes)}]"
        raise ValueError(f"images have shape {list(images.shape)}; a model of {config.ndim} axes takes {expected}")
    encoder = encoder_of(config)
    size = tuple(images.shape[2:]) if slab is None else slab.size
    placed = encoder.tokens.told != "number"
    if (
        placed
        and encoder.positions == "learned"
        and config.shape is not None
        and size != per_axis(config.shape, config.ndim)
    ):
        raise ValueError(
            f"images of {list(size)} do not fit learned positions for {list(per_axis(config.shape, config.ndim))}; "
            "resize the images, or use positions sincos or rope"
        )
    ids = variable_ids(config, variables, images.shape[1])
    separate = ids is not None and encoder.variables.aggregate == "none"
    patch = per_axis(encoder.patch, config.ndim)
    grown: dict[str, Any] = {"scored": scored, "span": span, "draws": draws}
    tokens = tokenize(images, encoder.tokens, patch, separate=separate, slab=slab, **grown)
    inputs: dict[str, Any] = {"x": tokens.take(), "coordinates": tokens.told(encoder.tokens.told)}
    if tokens.tree is not None:
        inputs |= {"sizes": tokens.sizes, "valid": tokens.valid}
    if ids is not None:
        inputs["variables"] = ids
    if getattr(config, "output", None) == "pixels":
        inputs["size"] = size
    if getattr(config, "wants_tree", False) and tokens.tree is not None:
        inputs["tree"] = tokens.tree
    if getattr(config, "wants_image", False):
        inputs["image"] = images
    return inputs, tokens


Side = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """One step of the flow: `run(x, side)`.

    `needs` names the side inputs that it reads, itself or through derive(); `uses` are the modules and bare parameters
    whose weights it reads (None for those that a model lacks), so that a pipeline knows what belongs to a stage.
    """

    name: str
    run: Callable[[Tensor, Side], Tensor]
    needs: tuple[str, ...] = ()
    uses: tuple[nn.Module | nn.Parameter | None, ...] = ()

    def more(
        self, run: Callable[[Tensor, Side], Tensor], needs: Sequence[str], *uses: nn.Module | nn.Parameter | None
    ) -> "Stage":
        """A step in the place of this one that needs and uses more."""
        return replace(self, run=run, needs=(*self.needs, *needs), uses=(*self.uses, *uses))

    def within(self, part: str) -> "Stage":
        """The same step as one of a part of a model."""
        return replace(self, name=f"{part}.{self.name}")


class Model(nn.Module, ABC):
    """Base of all models: forward is the stages one after another."""

    config: Any  # the frozen config that the model was built from
    sequence: TokenSequence = WHOLE  # where the other tokens of a sample are
    watching: dict[str, Tensor] | None = None  # a dict put here is filled with the size of activations by stage
    eyes: Any = None  # what normalises raw data for it and cuts them into samples: vitrail.load() puts it here

    @abstractmethod
    def stages(self) -> list[Stage]:
        """List the steps of the model, in order."""

    def derive(self, side: Side) -> Side:
        """Side inputs computed once from the given ones (rotation tables, say), the same on every rank."""
        return side

    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The repeated parts, which are checkpointed, compiled and sharded one by one."""

    def drop_path_rates(self) -> list[float]:
        """One rate a block, in the order of the drop-path table [B, depth, 2]."""
        return [0.0] * len(self.blocks())

    def spared_from_decay(self) -> list[str]:
        """Names (last parts) of parameters with two or more dimensions that are not weight matrices."""
        return []

    @abstractmethod
    def flops(self) -> Flops:
        """Forward of one training sample."""

    def inputs(self, images: Tensor, variables: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the inputs of forward() for normalised images [B, C, *S]: model(**model.inputs(images))."""
        return make_inputs(self.config, images, variables=variables)[0]

    def predict(self, values: Any, **options: Any) -> Any:
        """Predict from raw values [*S], [C, *S] or [N, C, *S] of any size, normalised as the run's data were.

        It gives what the run was trained for, on the grid of the values; docs/predict.md lists the options.
        """
        return self._seen().predict(self, values, **options)

    def embed(self, values: Any, **options: Any) -> Any:
        """Return features [D, *grid] of raw values, one for each patch; options are those of predict()."""
        return self._seen().predict(self, values, write="embeddings", **options)

    def _seen(self) -> Any:
        if self.eyes is None:
            raise UserError(
                "this model was not loaded from a run, so how raw data are normalised is not known; load it with "
                "vitrail.load(run), or call model(**model.inputs(images)) with normalised images"
            )
        return self.eyes

    def forward(self, x: Tensor, **side: Any) -> Tensor:
        """Run all stages; when watched, also note the root mean square of the activations after each."""
        stages = self.stages()
        self._refuse_unknown(side, {name for stage in stages for name in stage.needs})
        side = self.derive(side)
        for stage in stages:
            x = stage.run(x, side)
            if self.watching is not None:
                self.watching[stage.name] = x.detach().float().square().mean().sqrt()
        return x

    def _refuse_unknown(self, side: Side, known: set[str]) -> None:
        if "coordinates" not in side:
            raise ValueError("coordinates are missing: models take tokens; call model(**model.inputs(images))")
        for name in side.keys() - known:
            near = nearest(name, sorted(known))
            hint = f"; did you mean {near!r}?" if near else f" (it takes {', '.join(sorted(known))})"
            raise ValueError(f"{name!r} is no input of {type(self).__name__}{hint}")


def block_stages(
    blocks: Iterable[nn.Module],
    run: Callable[[nn.Module, Tensor, Side, Tensor | None], Tensor],
    needs: tuple[str, ...],
    first: int = 0,
) -> list[Stage]:
    """A stage for each block: run(block, x, side, drop path).

    Drop path is the block's own [B, 2] out of the whole table [B, depth, 2], whose row `first` is that of the first
    block here; None without drop path.
    """

    def stage(index: int, block: nn.Module) -> Stage:
        def run_one(x: Tensor, side: Side) -> Tensor:
            table = side.get("drop_path")
            return run(block, x, side, None if table is None else table[:, first + index])

        return Stage(f"blocks.{index}", run_one, (*needs, "drop_path"), (block,))

    return [stage(index, block) for index, block in enumerate(blocks)]


def spread_drop_path(rate: float, depth: int) -> list[float]:
    """Return rates that rise from 0 at the first block to `rate` at the last."""
    return [rate * i / max(depth - 1, 1) for i in range(depth)]
