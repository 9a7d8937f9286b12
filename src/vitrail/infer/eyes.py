"""A trained network with all that it takes to look at raw data: statistics, names of variables, and its objective.

What it says of samples is on their voxels, on their grid of patches (features), or one for the whole (a class):

- classes and probabilities of a segmentation come from logits, of which tiles and flips are averaged
- affinities come from logits in the same way; instances are made of them (mutex.py)
- reconstructions of a masked autoencoder hide tokens of each tile by a draw of its place; a voxel is what those tiles
  say in which it was hidden, and as it was where none hides it
- features are the last tokens of the encoder; leaves of adaptive tokens are spread over their voxels and averaged over
  patches
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitrail.data import statistics
from vitrail.data.batch import Batch
from vitrail.data.dataset import Dataset
from vitrail.data.normalize import Values
from vitrail.data.source import Source
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.infer.features import encode, pooled
from vitrail.infer.folder import as_stored, read_facts
from vitrail.infer.mutex import NUMBERS
from vitrail.layers.patches import num_voxels, per_axis
from vitrail.layers.tokens import Tokens
from vitrail.models.model import Model, encoder_of, known_variables, make_inputs
from vitrail.objectives.objective import Objective, VoxelObjective, normalise
from vitrail.parallel.replay import WARM_FORWARD, Replay, is_ours, suits
from vitrail.parallel.shard import Solo
from vitrail.recipe import Recipe
from vitrail.recipe.sections import Augment
from vitrail.weights.runs import read_model, stored_recipe, with_checkpoint

Write = Literal["classes", "probabilities", "embeddings", "reconstructions", "affinities", "instances"]
On = Literal["voxels", "patches", "item"]
FEW = 16  # features of adaptive tokens that are spread over voxels at once


@dataclass(frozen=True)
class Form:
    """What is written of each cell."""

    write: Write
    on: On
    channels: tuple[str, ...] | None  # names; None: one value, without an axis of channels
    dtype: np.dtype
    values: int  # numbers that are blended


class Eyes:
    """A trained network that looks at raw data."""

    def __init__(self, run: str | Path, manifest: dict[str, Any], recipe: Recipe):
        self.run, self.recipe, self.manifest = str(run), recipe, manifest
        self.config = recipe.model
        self.statistics = statistics.stored(manifest["statistics"])
        self.crop = per_axis(recipe.model.shape, recipe.model.ndim)

    # What may be refused is made when it is asked for: a model can be called without.

    @cached_property
    def objective(self) -> Objective:
        return self.recipe.objective.build(self.recipe.model, self.statistics)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        return tuple(getattr(self.objective, "names", None) or ())

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Return what the training data said of themselves."""
        return read_facts(Path(self.run))

    @cached_property
    def variables(self) -> tuple[str, ...]:
        """Return the variables that statistics are of, in their order."""
        number = len(self.statistics.mean)
        entries = [getattr(entry, "variables", None) for entry in self.recipe.data.train]
        # The first source has all of them, or each entry says which it has: the order of the data's own list.
        every = list(dict.fromkeys(name for names in entries for name in names)) if all(entries) else None  # type: ignore[union-attr]
        for names in (self.facts.get("variables"), every):
            if names and len(names) == number:
                return tuple(names)
        if number > 1 and known_variables(self.config) is not None:
            raise UserError(
                f"{self.run}: its entries have variables of their own, and data.json does not tell the order of all of "
                "them; name `variables` in each entry of data.train"
            )
        return tuple(f"channel{place}" for place in range(number))

    # ------------------------------------------------------------ what can be asked for

    @property
    def offers(self) -> tuple[Write, ...]:
        """Return what can be written; the first is what it was trained for."""
        has_tokens = bool(self.objective.predicts) and hasattr(encoder_of(self.config), "patch_on")
        return (*self.objective.predicts, *(("embeddings",) if has_tokens else ()))

    def check_encoder(self) -> None:
        """Refuse a run that has no features to tell."""
        if "embeddings" not in self.offers:
            raise UserError(
                f"{self.run}: model {self.config.kind!r} with objective {self.recipe.objective.kind!r} has no encoder "
                "of features; give the run of a vit, mae, unetr or sap"
            )

    def form(self, write: str | None, dtype: str | None, stored: np.dtype, given: Sequence[str] = ()) -> Form:
        """Return the form of what is asked for; refused where this network cannot give it.

        `given` are the variables of the data, where they may be fewer than those of the run, or in another order.
        """
        offers, kind = self.offers, self.recipe.objective.kind
        if not offers:
            more = (
                f"; make samples with vitrail sample {self.run}" if hasattr(self.recipe.objective, "sampling") else ""
            )
            raise UserError(f"{self.run}: objective {kind!r} predicts nothing of new data{more}")
        chosen: Any = write or offers[0]
        if chosen not in offers:
            raise UserError(f"write: {chosen!r} is nothing that objective {kind!r} gives; choose {' or '.join(offers)}")
        if chosen in ("classes", "reconstructions", "instances") and dtype is not None:
            raise UserError(
                f"dtype: {dtype!r} is of probabilities, affinities and embeddings; leave it out of {chosen}"
            )
        if chosen == "embeddings" and dtype == "uint8":
            raise UserError("dtype: 'uint8' holds no features; choose float32 or float16")
        if dtype not in (None, "float32", "float16", "uint8"):
            raise UserError(f"dtype: {dtype!r} is not known; choose float32, float16 or uint8")
        wanted = np.dtype(dtype or "float32")
        number = len(self.names)
        if chosen == "embeddings":
            width = encoder_of(self.config).width
            return Form(chosen, "patches", tuple(f"feature {n}" for n in range(width)), wanted, width)
        if chosen == "reconstructions":
            names = tuple(given or self.variables)
            channels = names if len(self.variables) > 1 else None
            return Form(chosen, "voxels", channels, stored, 2 * len(names))
        if chosen == "instances":
            return Form(chosen, "voxels", None, NUMBERS, number)
        if chosen == "affinities":
            return Form(chosen, "voxels", self.names, wanted, number)
        if not isinstance(self.objective, VoxelObjective):
            return Form(chosen, "item", self.names, np.dtype(np.float32), number)
        if chosen == "probabilities":
            return Form(chosen, "voxels", self.names, wanted, number)
        return Form(chosen, "voxels", None, np.dtype(np.uint8 if number <= 256 else np.uint16), number)

    # ------------------------------------------------------------ what it sees

    def settings(self) -> Any:
        """Return the section data of the recipe, for data that are seen whole and as they are."""
        plain = {"augment": Augment(), "mix": "size", "balance": None, "filter": None, "tiles": None, "bad": "error"}
        return self.recipe.data.model_copy(update=plain)

    def values_of(self, sources: Sequence[Source]) -> Values:
        """Return what changes values before the network sees them."""
        known = Values(self.recipe.data.normalize, self.variables, self.statistics, [s.dtype for s in sources])
        score = getattr(getattr(encoder_of(self.config), "tokens", None), "score", None)
        known.scored = getattr(score, "scale", None) == "data"
        return known

    def statistics_of(self, dataset: Dataset) -> list[Any] | None:
        """Return statistics of each source where they are not those of the run: given, or measured as in training."""
        names, seed = self.variables, self.recipe.run.seed
        if self.recipe.data.statistics == "volume":  # of what there is, whatever it was padded with (padded.py)
            dataset = copy.copy(dataset)
            dataset.sources = [getattr(source, "plain", source) for source in dataset.sources]
        return statistics.of_entries(dataset, self.statistics, names=names, seed=seed)

    def on(self, model: Model, device: torch.device, compute: str | None) -> "Looking":
        """Return the network on a device, computing in a type: that of the recipe, or fp32."""
        wanted = compute or self.recipe.precision.compute
        if wanted in ("auto", "float8"):
            wanted = "bf16" if device.type == "cuda" else "fp32"
        model = model.to(device)
        solo = Solo(model, model.blocks(), torch.bfloat16) if wanted == "bf16" else None
        choice = self.recipe.parallel.replay if is_ours(self.config, self.recipe.objective) else False
        replay = Replay(model, device, warm=WARM_FORWARD, anew=True) if suits(choice, device) else None
        return Looking(self, model, solo, replay)

    def predict(self, model: Model, values: Any, **options: Any) -> Any:
        """Predict from raw values in memory."""
        from vitrail.infer.memory import predict_values

        return predict_values(self, model, values, **options)


@dataclass(frozen=True)
class Looking:
    """A network on a device, ready to look."""

    eyes: Eyes
    model: Model
    solo: Solo | None  # its weights in the type that it computes in; None: fp32
    replay: Replay | None = None  # what launches the kernels of a batch by one call

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @torch.no_grad()
    def __call__(self, batch: Batch, form: Form, places: Sequence[int], flips: Sequence[int] = ()) -> Tensor:
        """Look at a batch, and at it flipped along each set of axes; return [B, values, *cells], float32."""
        draws = Draws(self.eyes.recipe.run.seed, places)
        sets = [axes for number in range(len(flips) + 1) for axes in itertools.combinations(flips, number)]
        total: Tensor | None = None
        for axes in sets:
            dims = [axis + 2 for axis in axes]
            seen = replace(batch, values=batch.values.flip(dims)) if dims else batch
            found = self._see(seen, form, draws)
            found = found.flip(dims) if dims and form.on != "item" else found
            total = found if total is None else total + found
        assert total is not None
        return total / len(sets) if len(sets) > 1 else total

    def _see(self, batch: Batch, form: Form, draws: Draws) -> Tensor:
        objective = self.eyes.objective
        if form.write == "embeddings":
            return self._features(batch, form)
        number, size = len(batch), tuple(batch.values.shape[2:])
        blank = (number,) if form.on == "item" else (number, *size)  # prepare() wants labels, which nobody reads
        batch = replace(batch, labels=torch.zeros((), dtype=torch.int64, device=batch.values.device).expand(blank))
        inputs, targets = objective.prepare(batch, draws, evaluating=True)
        output = self._run(inputs)
        if form.write == "reconstructions":
            return self._reconstructed(batch, output, targets)
        if form.on == "item":
            return output.float()[(..., *[None] * len(size))]
        told: Any = objective
        return told.logits(output, targets).float()

    def _run(self, inputs: dict[str, Any]) -> Tensor:
        def run(inputs: dict[str, Any], _: Any) -> Tensor:
            with self._computing():
                return self.model(**inputs)

        return run(inputs, None) if self.replay is None else self.replay(run, inputs, None)

    def _reconstructed(self, batch: Batch, output: Tensor, targets: Any) -> Tensor:
        """Return [B, 2C, *S]: what is said of hidden voxels, else 0; and which are hidden."""
        objective: Any = self.eyes.objective
        values, hidden = objective.reconstruct(batch, output, targets)
        values = values.float()
        told = torch.ones_like(values) if hidden is None else (hidden > 0.5).float().expand_as(values)
        return torch.cat([values * told, told], dim=1)

    @torch.no_grad()
    def encode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the encoder's last tokens on the grid of patches [B, D, *grid], and pooled [B, D], float32."""
        x, side, tokens = self._encode(batch)
        return self._on_grid(x, tokens), self._pooled(x, side)

    def _features(self, batch: Batch, form: Form) -> Tensor:
        """Return features [B, D, *cells] of patches, or of the sample as a whole."""
        x, side, tokens = self._encode(batch)
        if form.on == "patches":
            return self._on_grid(x, tokens)
        return self._pooled(x, side)[(..., *[None] * len(tokens.size))]

    def _pooled(self, x: Tensor, side: dict[str, Any]) -> Tensor:
        with self._computing():
            return pooled(self.model, x, side).float()

    def _computing(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.solo is None else self.solo.computing()

    def _encode(self, batch: Batch) -> tuple[Tensor, dict[str, Any], Tokens]:
        """Return the encoder's last tokens, the side inputs, and what the tokens are of the samples."""
        eyes = self.eyes
        model: Any = self.model
        images = normalise(batch.values, batch.statistics or eyes.statistics)
        inputs, tokens = make_inputs(
            model.config, images, variables=batch.variables or None, scored=batch.values, span=batch.span
        )
        with self._computing():
            x, side = encode(model, inputs)
            return x, side, tokens

    def _on_grid(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Return the tokens [B, prefix + N, D] on the grid of patches, [B, D, *grid]."""
        encoder: Any = self.model.encoder
        x = x[:, encoder.prefix :].float()
        grid = tuple(n // p for n, p in zip(tokens.size, tokens.patch, strict=True))
        if tokens.tree is None:
            return x.unflatten(1, (tokens.separate, *grid)).mean(dim=1).movedim(-1, 1)
        found = []
        for some in x.split(FEW, dim=2):  # every voxel of every leaf has each of them for a while
            spread = some[:, :, None].expand(-1, -1, num_voxels(tokens.patch), -1).flatten(2)
            painted = tokens.paint(spread, merge=True)  # B few *S
            for axis, (size, patch) in enumerate(zip(grid, tokens.patch, strict=True), start=2):
                painted = painted.narrow(axis, 0, size * patch).unflatten(axis, (size, patch)).mean(dim=axis + 1)
            found.append(painted)
        return torch.cat(found, dim=1)


def load(run: str | Path, *, checkpoint: str | int | None = None, weights: str | None = None) -> Model:
    """Return the trained model of a run, on the CPU and ready to be called; averaged weights where the run has them.

    `checkpoint` is a step, "best" or "last". Besides normalised tokens it takes raw data: model.predict(array) and
    model.embed(array).
    """

    def read(path: Path, manifest: dict[str, Any]) -> Model:
        model = read_model(path, manifest, weights)
        recipe = stored_recipe(manifest)
        if recipe.model.shape is not None:
            model.eyes = Eyes(run, manifest, recipe)
        return model

    return with_checkpoint(run, checkpoint, read)


def finish(
    form: Form, eyes: Eyes, values: Tensor, restore: Values, given: Callable[[], np.ndarray] | None = None
) -> np.ndarray:
    """Turn blended values [K, *cells] into what is written: [*cells], or [channels, *cells].

    `given` are the voxels as they were read, which is asked where none hides them.
    """
    if form.write == "classes" and form.on != "item":
        kind = torch.uint8 if form.dtype == np.uint8 else torch.int32  # small before it leaves the device
        return values.argmax(dim=0).to(kind).cpu().numpy().astype(form.dtype, copy=False)
    if form.write == "reconstructions":
        told, hidden = values.chunk(2)
        made = restore.restore((told / hidden.clamp(min=1e-12)).unsqueeze(0), form.channels or eyes.variables)[0]
        found = as_stored(made.cpu().numpy(), form.dtype)
        seen = (hidden == 0).cpu().numpy()
        if given is not None and seen.any():
            found = np.where(seen, as_stored(given(), form.dtype), found)
        return found if form.channels is not None else found[0]
    if form.write == "embeddings":
        return values.cpu().numpy().astype(form.dtype, copy=False)
    objective: Any = eyes.objective
    shares = objective.likelihood(values.unsqueeze(0))[0] if hasattr(objective, "likelihood") else values.softmax(dim=0)
    if form.dtype == np.uint8:
        shares = (shares * 255).round().to(torch.uint8)
    elif form.dtype == np.float16:
        shares = shares.half()
    return shares.cpu().numpy().astype(form.dtype, copy=False)
