"""Small agreements between ranks, over gloo: JSON in, JSON out; no pickle.

An error of one rank becomes an error of all, so that nobody waits. While rank 0 works for longer than any clock, the
others hear that it gets on, and so does the watchdog.
"""

import json
import time
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from vitrail.errors import UserError

T = TypeVar("T")
Group: TypeAlias = dist.ProcessGroup | None  # None: all ranks


def _bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def gather_json(value: Any, group: Group) -> list[Any]:
    """Return every rank's value, in the order of ranks, on every rank."""
    world = dist.get_world_size(group)
    if world == 1:
        return [json.loads(json.dumps(value))]
    mine = _bytes(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([mine.numel()]), group=group)
    longest = int(max(int(s) for s in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: mine.numel()] = mine
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world)]
    dist.all_gather(rows, padded, group=group)
    return [json.loads(bytes(row[: int(size)].numpy())) for row, size in zip(rows, sizes, strict=True)]


def broadcast_json(value: Any, group: Group) -> Any:
    """Return rank 0's value on every rank, in as much memory as it takes; rank 0 need not wait for the others."""
    first = dist.get_rank(group) == 0
    mine = _bytes(value if first else None)
    size = torch.tensor([mine.numel()])
    dist.broadcast(size, group=group, group_src=0)
    text = mine if first else torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(text, group=group, group_src=0)
    return json.loads(bytes(text.numpy()))


def share_json(value: Any, group: Group) -> Any:
    """Return rank 0's value on every rank."""
    return gather_json(value if dist.get_rank(group) == 0 else None, group)[0]


def on_chief(action: Callable[[], T], group: Group) -> T:
    """Run on rank 0 and give every rank its (JSON) result, or its error, so that nobody waits."""
    outcome: dict[str, Any] = {}
    if dist.get_rank(group) == 0:
        try:
            outcome = {"value": action()}
        except UserError as error:
            outcome = {"error": str(error)}
        except Exception as error:
            share_json({"error": f"rank 0: {type(error).__name__}: {error}"}, group)
            raise
    outcome = share_json(outcome, group)
    if "error" in outcome:
        raise UserError(outcome["error"])
    return outcome["value"]


def together(action: Callable[[], T], group: Group) -> T:
    """Run on every rank; if it fails on one, fail on all with the first rank's reason, so that nobody waits."""
    error: str | None = None
    result: Any = None
    try:
        result = action()
    except (UserError, ValueError) as caught:
        error = str(caught) or repr(caught)
    _raise_first(gather_json(error, group))
    return result


def _raise_first(told: list[str | None]) -> None:
    """Raise the first of the errors that ranks have told, if there is any."""
    errors = [(rank, error) for rank, error in enumerate(told) if error]
    if errors:
        rank, message = errors[0]
        raise UserError(message if len(errors) == len(told) else f"rank {rank}: {message}")


EVERY = 10.0  # seconds between two signs of life


def together_for_long(action: Callable[[Callable[[], None]], T], group: Group, beat: Callable[[], None]) -> T:
    """Run on every rank, as `together`, an action that calls what it is given, in its own thread, when it gets on.

    Ranks that are done hear of those that are not, and `beat` sets back their clocks.
    """
    told, error = time.monotonic(), None
    result: Any = None

    def tick() -> None:
        nonlocal told
        beat()
        if time.monotonic() - told >= EVERY:
            gather_json({"busy": True}, group)
            told = time.monotonic()

    try:
        result = action(tick)
    except (UserError, ValueError) as caught:
        error = str(caught) or repr(caught)
    outcomes = gather_json({"error": error}, group)
    while any("busy" in outcome for outcome in outcomes):
        beat()
        outcomes = gather_json({"error": error}, group)
    _raise_first([outcome["error"] for outcome in outcomes])
    return result


def on_chief_for_long(action: Callable[[Callable[[], None]], T], group: Group, beat: Callable[[], None]) -> T:
    """Run on rank 0, as `on_chief`, an action that calls what it is given, in its own thread, whenever it gets on.

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
