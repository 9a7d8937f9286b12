"""What to say when memory runs out in a training: which memory, at what, and the keys that make room."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from vitrail.errors import RunFailed, UserError, chain_of, is_out_of_memory
from vitrail.recipe import Recipe
from vitrail.training.failures import Watchdog

DOING = {  # by the phase of the watchdog
    "start": "while the model was built",
    "training": "in a training step",
    "validation": "while held-out samples were measured",
    "drawing": "while a picture was made",
    "saving": "while a checkpoint was saved",
}


def short_of_memory(error: BaseException, recipe: Recipe, watchdog: Watchdog) -> BaseException:
    """Return the sentence for an error that says that memory ran out; another error as it is."""
    if isinstance(error, UserError) or not is_out_of_memory(error):
        return error
    told = next((e for e in chain_of(error) if is_out_of_memory(e)), error)
    on_device = isinstance(told, torch.OutOfMemoryError) or "cuda" in str(told).lower()
    return RunFailed(
        f"the {'device' if on_device else 'host'} ran out of memory {describe(recipe, watchdog)}"
        f" ({' '.join(str(told).split())[:200] or type(told).__name__}); set {list_remedies(recipe, on_device)}, "
        "or let `vitrail tune RECIPE` find the largest batch that fits; docs/memory.md says what each saves"
    )


@contextmanager
def in_words(recipe: Recipe, watchdog: Watchdog) -> Iterator[None]:
    """Turn what is raised inside into such a sentence."""
    try:
        yield
    except Exception as error:
        told = short_of_memory(error, recipe, watchdog)
        if told is error:
            raise
        raise told from error


def describe(recipe: Recipe, watchdog: Watchdog) -> str:
    """Say what was being done."""
    doing = DOING.get(watchdog.phase, f"in {watchdog.phase}")
    if watchdog.phase == "training":
        micro = recipe.data.micro_batch
        return f"{doing} (step {watchdog.step + 1}, {f'{micro} samples' if micro else 'all samples of a rank'} at once)"
    return f"{doing} (after step {watchdog.step})" if watchdog.step else doing


def list_remedies(recipe: Recipe, on_device: bool) -> str:
    """List the keys that would make room, of those that are not at their end."""
    micro, keys = recipe.data.micro_batch, []
    if micro != 1:
        smaller = f"data.micro_batch={micro // 2}" if micro else "a data.micro_batch below the batch of a rank"
        keys.append(f"{smaller} (the same result in more passes)")
    if recipe.parallel.recompute != "full":
        keys.append("parallel.recompute=full")
    if not on_device:
        keys.append("fewer data.workers")
    return ", ".join([*keys, "a smaller data.crop or model"])
