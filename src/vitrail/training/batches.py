"""The batches that a training would see, for a loop of one's own: `vitrail.data.batches(recipe)`."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from vitrail.data.batch import Batch
from vitrail.errors import UserError
from vitrail.foreign import trusted
from vitrail.launch.world import find_world
from vitrail.parallel.mesh import layout_of
from vitrail.parallel.split import Alone
from vitrail.recipe import Recipe, steps_of
from vitrail.recipe.load import Given, find_recipe
from vitrail.training.diagnose import open_before_model
from vitrail.training.setup import Place, find_place


def batches(
    recipe: Given, *, overrides: Sequence[str] = (), first: int = 0, last: int | None = None, trust: bool = False
) -> Iterator[Batch]:
    """Yield this rank's batches of the steps `first` to `last` (by default to the run's end), as training has them.

    They come in the same order and with the same values, augmented, on the recipe's device, read ahead by threads.
    Ranks that share samples get them whole. A process group that is there is used; otherwise the ranks of the launcher
    meet as for a training, until the batches end. `trust` is that of train().
    """
    recipe = find_recipe(recipe, overrides)
    with trusted(trust), _met(recipe) as place:
        parts = open_before_model(recipe, place)
        total = steps_of(parts.recipe.run.steps, batch=parts.data.batch, epoch=parts.sampler.epoch)
        end = total if last is None else last
        if not 0 <= first <= end <= total:
            raise UserError(f"first, last: {first} to {end} are no steps of this run, which has {total}")
        layout = layout_of(recipe.parallel, place.world.size)
        which = place.world.rank // (layout.context * layout.tensor) % layout.data  # of the ranks with other samples
        with closing(parts.loader(Alone(layout, which)).batches(first, end)) as found:
            yield from found


@contextmanager
def _met(recipe: Recipe) -> Iterator[Place]:
    """Meet the other ranks, in their process group if they have one."""
    if not dist.is_initialized():
        place = find_place(recipe)
        try:
            yield place
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        return
    world = replace(find_world(), rank=dist.get_rank(), size=dist.get_world_size())
    cuda = torch.cuda.is_available() and recipe.run.device != "cpu"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    store, group = dist.HashStore(), dist.new_group(backend="gloo")
    try:
        yield Place(world, device, torch.get_num_threads(), store, store, group, group)
    finally:
        dist.destroy_process_group(group)
