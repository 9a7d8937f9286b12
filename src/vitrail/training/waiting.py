"""Work of rank 0 that may take longer than any clock: the others hear that it gets on, and so does the watchdog."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from vitrail.errors import UserError
from vitrail.training.collective import on_chief, share_json

T = TypeVar("T")

EVERY = 10.0  # seconds between two signs of life
OPENING = 6 * 3600.0  # seconds without one in which data may be opened: large folders are scanned, locks are waited for


def on_chief_for_long(action: Callable[[Callable[[], None]], T], group: Any, beat: Callable[[], None]) -> T:
    """As `on_chief`, for an action that calls what it is given, in its own thread, whenever it has got on.

    `beat` sets back the clock of each rank that hears of it, and no collective waits for longer than such a while.
    """
    if dist.get_rank(group) == 0:
        told = time.monotonic()

        def tick() -> None:
            nonlocal told
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                beat()
                share_json({"busy": True}, group)

        return on_chief(lambda: action(tick), group)
    while "busy" in (outcome := share_json(None, group)):
        beat()
    if "error" in outcome:
        raise UserError(outcome["error"])
    return outcome["value"]
