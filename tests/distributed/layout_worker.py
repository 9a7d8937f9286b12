"""Takes a few steps under each of several layouts in one launch: `layout_worker.py CASES.json`.

Every rank writes what it holds of the losses, gradients and parameters: `<out>/<rank>.npz`, with where each piece
begins in the whole, so that a reader can put the whole together and see that nothing is missing.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail.cli.words import end
from vitrail.layers.init import local_shard
from vitrail.objectives.generate import Generate
from vitrail.recipe import Recipe, load_recipe
from vitrail.training import trainer as training
from vitrail.training.run import joined
from vitrail.training.setup import (
    DataParts,
    Parts,
    Place,
    build_model,
    complete,
    make_evaluator,
    make_loader,
    make_sampler,
    open_data,
)
from vitrail.training.trainer import Trainer


def pieces(kind: str, name: str, tensor: Tensor, place: Tensor) -> dict[str, np.ndarray]:
    """A rank's piece of a tensor; where it begins is told by the parameter."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    _, offset = local_shard(place)
    return {f"{kind}|{name}|{','.join(map(str, offset))}": local.detach().clone().numpy()}


@torch.no_grad()
def shake(model: torch.nn.Module) -> None:
    """Add noise to every parameter, the same in every layout: what starts at 0 would hide mistakes."""
    for name, parameter in model.named_parameters():
        noise = np.random.default_rng(sum(name.encode())).standard_normal(tuple(parameter.shape), np.float32)
        local, offset = local_shard(parameter)
        window = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
        local += 0.02 * torch.from_numpy(noise[window])


def run_case(tree: dict[str, Any], outs: dict[str, dict[str, Any]]) -> None:
    """The steps of one layout by each of some optimizers, from the same parameters; what is built is built once."""
    recipe = load_recipe(tree)
    with joined(recipe) as (place, _):
        data = open_data(recipe, place, None)
        recipe = complete(recipe, data)
        objective = recipe.objective.build(recipe.model, data.statistics)
        parts = build_model(recipe, place, data, objective)
        shake(parts.model)
        locals_ = [local_shard(parameter)[0] for parameter in parts.model.parameters()]
        start = [local.detach().clone() for local in locals_]
        for out, optimizer in outs.items():
            with torch.no_grad():
                for local, values in zip(locals_, start, strict=True):
                    local.copy_(values)
            chosen = complete(load_recipe(tree | {"optimizer": optimizer}), data)
            found = take_steps(chosen, place, data, objective, parts)
            Path(out).mkdir(parents=True, exist_ok=True)
            np.savez(Path(out) / f"{place.world.rank}.npz", **found)


def take_steps(recipe: Recipe, place: Place, data: DataParts, objective: Any, parts: Parts) -> dict[str, np.ndarray]:
    """Losses, this rank's pieces of gradients and parameters, and samples where the objective makes some."""
    found: dict[str, np.ndarray] = {}
    sampler = make_sampler(recipe, data)
    trainer = Trainer(recipe, place, data, parts, objective, sampler.epoch)
    loader = make_loader(recipe, place, data, sampler, objective, parts.flow, step=0, samples=0)
    names = {id(p): n for n, p in parts.model.named_parameters()}
    update = training.step

    def step(optimizer: Any, rate: float, skip: Tensor) -> None:
        for group in optimizer.param_groups:
            for source in group.sources:
                gradient = torch.zeros_like(source) if source.grad is None else source.grad
                found.update(pieces(f"gradient{trainer.done}", names[id(source)], gradient, source))
        update(optimizer, rate, skip)

    training.step = step
    try:
        losses, kept = [], []
        for batch in loader.batches(0, trainer.total):
            with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
                told = trainer.step(batch, stop_wish=None, watch=False)
            if not losses:
                storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
                found["kept"] = np.array(sum(storages.values()))  # bytes for the backward of the first step
            kept.clear()
            losses.append([told.loss, told.grad_norm])
    finally:
        training.step = update
    for name, parameter in parts.model.named_parameters():
        found.update(pieces("parameter", name, parameter, parameter))
    found["losses"] = np.array(losses)
    if isinstance(objective, Generate):  # samples are made by all ranks together
        evaluator = make_evaluator(recipe, place, data, objective, parts.flow)
        metrics = evaluator.metrics(parts.flow)
        found["metrics"] = np.array([metrics[name] for name in objective.metrics])
        found["example"] = np.stack([row["made"] for row in evaluator.example(parts.flow)])
    return found


def main() -> None:
    for tree, outs in json.loads(Path(sys.argv[1]).read_text()):
        run_case(tree, outs)


if __name__ == "__main__":
    main()
    end(0)
