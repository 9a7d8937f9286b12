"""Modes of measuring, and what they say together in a sentence: waiting for data, communication, or chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitrail.report.units import plain

MODES = ("real", "syn", "io", "compute")
UNSTEADY = 1.3  # times as long for the same work, from which on a machine is too busy to be measured
FAST_ENOUGH = 1.1  # loading alone must be so many times as fast as the model


def explain(results: Sequence[dict[str, Any]]) -> str:
    """Say what results of one recipe in one or more modes tell together; nothing where none came to an end."""
    found = {result["mode"]: result for result in results if result["status"] == "ok"}
    trained = [_rounds(found[mode]) for mode in ("real", "syn") if mode in found]
    if len(found) > 1 and (reason := unsteady(trained)):
        return f"no verdict: {reason}; other work keeps this machine busy, so measure again when it is quiet"
    real, syn, io, compute = (found.get(mode) for mode in ("real", "syn", "io", "compute"))
    parts = []
    if real is not None:
        share = (real["split"]["data"] or 0.0) / _seconds(real)
        parts.append(f"{100 * min(share, 1.0):.0f} % of the step waits for data")
        if syn is not None:
            parts.append(_compare(real, syn, "with real data", "with one batch again and again"))
    step = syn or real
    if step is not None and compute is not None:
        if step["gpus"] > 1:
            share = 1 - _seconds(compute) / _seconds(step)
            parts.append(f"{100 * max(share, 0.0):.0f} % of a step is communication and waiting for other ranks")
        parts.append(_compare(step, compute, f"on {step['gpus']} ranks", "on one rank alone"))
    if io is not None:
        parts.append(f"loading alone gives {plain(io['samples_per_s'], 3)} samples/s")
        if syn is not None:
            slow = io["samples_per_s"] < FAST_ENOUGH * syn["samples_per_s"]
            advice = "raise data.workers or data.reuse, or set data.stage" if slow else "reading is fast enough"
            parts.append(f"the model can take {plain(syn['samples_per_s'], 3)} samples/s: {advice}")
    if not parts and step is not None:
        parts.append(_largest(step))
    return "; ".join(parts)


def _rounds(result: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a result that `unsteady` takes."""
    rounds = {"fastest_round": min(result["windows"]), "slowest_round": max(result["windows"])}
    return {"mode": result["mode"], "step_seconds": _seconds(result), **rounds}


def _seconds(result: dict[str, Any]) -> float:
    return result["step_seconds"]["median"]


def _compare(one: dict[str, Any], other: dict[str, Any], first: str, second: str) -> str:
    more = 100 * (_seconds(one) / _seconds(other) - 1)
    words = f"a step takes {_seconds(one):.3g} s {first} and {_seconds(other):.3g} s {second} ({more:+.0f} %)"
    a, b = one["windows"], other["windows"]
    overlap = min(a) <= max(b) and min(b) <= max(a)
    return words + ("; the slowest and the fastest windows overlap, so this may be chance" if overlap else "")


def _largest(result: dict[str, Any]) -> str:
    """Say which part of a step takes longest."""
    split = {part: seconds for part, seconds in result["split"].items() if seconds and part != "communication"}
    if not split:
        return ""
    part = max(split, key=split.__getitem__)
    return f"{part} takes {100 * split[part] / sum(split.values()):.0f} % of a step"


def unsteady(results: Sequence[dict[str, Any]]) -> str | None:
    """Say why steps cannot be compared (the same ones differ too much, or less work took longer); None if they can."""
    trained = {r["mode"]: r for r in results if r["mode"] != "io"}
    for mode, r in trained.items():
        if r["slowest_round"] > UNSTEADY * r["fastest_round"]:
            return (
                f"{mode} steps took {r['fastest_round']:.3g} s in one round and {r['slowest_round']:.3g} s in another"
            )
    if len(trained) == 2 and trained["syn"]["step_seconds"] > UNSTEADY * trained["real"]["step_seconds"]:
        times = [trained[mode]["step_seconds"] for mode in ("syn", "real")]
        return f"steps without reading took {times[0]:.3g} s, longer than the {times[1]:.3g} s with it"
    return None
