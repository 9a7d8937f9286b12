"""Where the time of some steps went, read from a trace that PyTorch's profiler wrote (Chrome's format).

- a trace has marks: ranges whose names begin with "vitrail: " and end with the part of a step that begins there. A part
  lasts until the next mark, so the parts of a step add up to it
- on a GPU a mark is where its stream is then: at the host's time, or at the end of what was launched before it if that
  is later. So a part is what the device did, not what the host asked for
- communication is the time in which nothing but collectives is at work; it is taken off the part in which it falls. On
  a CPU, what else is at work are PyTorch's operations
- the heaviest operations: kernels and copies of a GPU; on a CPU operations, each without those inside it
"""

import gzip
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "vitrail: "
PARTS = ("data", "forward", "backward", "optimizer", "other")
BETWEEN = "between"  # what lies between two steps, as an evaluation, is no part of either
HEAVIEST = 20  # operations that are listed
COMPUTING = ("aten::", "## Call CompiledFxGraph")  # how a CPU's operations, and compiled blocks of them, begin
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Span = tuple[float, float]
Event = dict[str, Any]


class Work(NamedTuple):
    """Something that a GPU did: its time there, and when the host launched it."""

    name: str
    begin: float
    end: float
    launched: float


def read_trace(path: Path) -> list[Event]:
    """Read the events of a trace, packed or not."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
        return list(json.load(file)["traceEvents"])


def is_collective(name: str, on_gpu: bool) -> bool:
    """Return whether this is the kernel of a collective (RCCL's have the same names), or its work on a CPU."""
    return name.startswith(("ncclDevKernel", "ncclKernel")) if on_gpu else name.startswith("gloo:")


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, as spans that do not touch, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def covered(spans: Iterable[Span]) -> float:
    """Return the length of the union of spans."""
    return sum(end - begin for begin, end in merged(spans))


def shared(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return where two unions (as `merged` gives them) are both."""
    found, place = [], 0
    for begin, end in some:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        here = place
        while here < len(others) and others[here][0] < end:
            found.append((max(begin, others[here][0]), min(end, others[here][1])))
            here += 1
    return found


def left(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return where the first of two unions (as `merged` gives them) is and the other is not."""
    edges = [(float("-inf"), float("-inf")), *others, (float("inf"), float("inf"))]
    return shared(some, [(end, begin) for (_, end), (begin, _) in pairwise(edges)])


def break_down(events: Sequence[Event], *, whole: bool = False) -> dict[str, Any]:
    """Return where the time of the marked steps went, in seconds of one step; `whole`: forward and backward are one.

    `collectives` is all their time, also what others hide; `idle` the time in which a GPU had nothing to do.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    works = device_works(timed)
    on_gpu = bool(works)
    marks = list_marks(timed)
    parts = spans_of_parts(marks, works)
    steps = sum(part == BETWEEN for _, part in marks)
    if not steps or not parts:
        raise ValueError("the trace has no step from its beginning to its end")
    inside = merged(span for spans in parts.values() for span in spans)
    if on_gpu:
        alike = [(is_collective(w.name, True), (w.begin, w.end)) for w in works]
    else:
        host = [e for e in timed if e["name"].startswith(COMPUTING) or is_collective(e["name"], False)]
        alike = [(is_collective(e["name"], False), (e["ts"], e["ts"] + e["dur"])) for e in host]
    talking = merged(span for talks, span in alike if talks)
    working = merged(span for talks, span in alike if not talks)
    alone = shared(left(talking, working), inside)
    unit = 1e-6 / steps

    def seconds(spans: Iterable[Span]) -> float:
        return unit * sum(end - begin for begin, end in spans)

    found: dict[str, float | None] = {part: seconds(left(merged(parts.get(part, ())), alone)) for part in PARTS}
    if whole:  # one cannot be told from the other
        found["passes"] = (found["forward"] or 0.0) + (found["backward"] or 0.0)
        found["forward"] = found["backward"] = None
    total = seconds(inside)
    own = own_times(works, timed, inside)
    rows = sorted(own.items(), key=lambda row: (-row[1][1], row[0]))[:HEAVIEST]
    return {
        "steps": steps,
        "step_seconds": total,
        "parts": found | {"communication": seconds(alone)},
        "collectives": seconds(shared(talking, inside)),
        "idle": seconds(left(inside, merged(span for _, span in alike))) if on_gpu else None,
        "operations": [
            {"name": name, "calls": calls / steps, "seconds": unit * spent, "share": unit * spent / total}
            for name, (calls, spent) in rows
        ],
    }


def device_works(events: Sequence[Event]) -> list[Work]:
    """Return what the GPU did, in the order of launches; a replayed graph has one launch for all of it."""
    launches: dict[Any, float] = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") not in DEVICE and "correlation" in event.get("args", {})
    }
    works = []
    for event in events:
        if event.get("cat") in DEVICE:
            begin: float = event["ts"]
            launched: float = launches.get(event.get("args", {}).get("correlation", ""), begin)
            works.append(Work(event["name"], begin, begin + event["dur"], launched))
    return sorted(works, key=lambda work: work.launched)


def list_marks(events: Sequence[Event]) -> list[tuple[float, str]]:
    """Return the host's times of marks and the parts that begin there; of a GPU a trace has each once more."""
    named = (e for e in events if e["name"].startswith(PREFIX) and e.get("cat") != "gpu_user_annotation")
    return sorted((e["ts"], e["name"].removeprefix(PREFIX)) for e in named)


def spans_of_parts(marks: Sequence[tuple[float, str]], works: Sequence[Work]) -> dict[str, list[Span]]:
    """Return when each part was, on the device where there is one; what lies between steps is left out."""
    points: list[tuple[str, float]] = []
    reached, place = float("-inf"), 0
    for time, part in marks:
        while place < len(works) and works[place].launched <= time:
            reached = max(reached, works[place].end)
            place += 1
        points.append((part, max(time, reached, points[-1][1] if points else time)))
    found: dict[str, list[Span]] = {}
    for (part, begin), (_, end) in pairwise(points):
        if part != BETWEEN:
            found.setdefault(part, []).append((begin, end))
    return found


def own_times(works: Sequence[Work], events: Sequence[Event], inside: list[Span]) -> dict[str, tuple[int, float]]:
    """Return calls and microseconds of each operation that began inside, without the operations that it called."""
    begins = [begin for begin, _ in inside]

    def counts(time: float) -> bool:
        place = bisect_right(begins, time) - 1
        return place >= 0 and time < inside[place][1]

    calls: Counter[str] = Counter()
    spent: defaultdict[str, float] = defaultdict(float)
    for work in works:
        if counts(work.begin):
            calls[work.name] += 1
            spent[work.name] += work.end - work.begin
    if works:
        return {name: (calls[name], spent[name]) for name in calls}
    threads: dict[Any, list[Event]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and counts(event["ts"]):
            threads.setdefault(event.get("tid"), []).append(event)
    for thread in threads.values():
        around: list[Event] = []  # what has begun and not ended, the innermost last
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            if around:
                spent[around[-1]["name"]] -= event["dur"]
            calls[event["name"]] += 1
            spent[event["name"]] += event["dur"]
            around.append(event)
    return {name: (calls[name], max(0.0, spent[name])) for name in calls}
