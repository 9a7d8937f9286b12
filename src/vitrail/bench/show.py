"""Results in words: one in full, or a row of a table for each."""

from __future__ import annotations

from typing import Any

from vitrail.report.units import count, percent, plain


def tree(result: dict[str, Any]) -> dict[str, Any]:
    """What a person wants to know of one result; --json has it all."""
    if result["status"] != "ok":
        return {"status": result["status"], "error": result["error"]}
    step, tokens, memory = result["step_seconds"], result["tokens_per_s"], result["memory"]
    shown: dict[str, Any] = {
        "mode": result["mode"],
        "model": f"{result['model']}, {count(result['parameters'])} parameters, {result['precision']}, recompute "
        f"{result['recompute']}, {'compiled' if result['compile'] else 'not compiled'}",
        "ranks": f"{result['gpus']} ({result['strategy'] or 'own layout'}), batch {result['batch']}",
        "step": f"{plain(step['median'], 4)} s ({plain(step['low'], 4)} to {plain(step['high'], 4)} in "
        f"{len(result['windows'])} windows of {result['steps']} steps, after {result['warm_up']} that do not count)",
        "samples/s": plain(result["samples_per_s"], 4),
        "images/s": result["images_per_s"] and plain(result["images_per_s"], 4),
        "tokens/s": f"{plain(tokens['visible'], 4)} visible, {plain(tokens['all'], 4)} in all",
        "parts": ", ".join(f"{part} {plain(s, 3)} s" for part, s in result["split"].items() if s is not None),
        "TFLOP/s": result["tflops"] and plain(result["tflops"], 4),
        "MFU": result["mfu"] and f"{percent(result['mfu'])} (hardware: {percent(result['hfu'])})",
        "memory": f"{memory['allocated_gib']:.4g} GiB allocated, {memory['reserved_gib']:.4g} GiB reserved",
        "energy": result["energy_j"] and f"{plain(result['energy_j'], 3)} J a sample",
        "notes": "; ".join(result["notes"]) or None,
    }
    return {name: value for name, value in shown.items() if value is not None}


def row(result: dict[str, Any]) -> dict[str, str]:
    ok = result["status"] == "ok"
    step = result.get("step_seconds", {})
    return {
        "cell": result["name"],
        "status": result["status"],
        "step s": plain(step["median"], 4) if ok else "",
        "spread": f"{plain(step['low'], 3)}..{plain(step['high'], 3)}" if ok else "",
        "samples/s": plain(result["samples_per_s"], 4) if ok else "",
        "MFU": percent(result["mfu"]) if ok and result["mfu"] else "",
        "GiB": f"{result['memory']['allocated_gib']:.3g}" if ok else "",
        "why": "" if ok else " ".join(str(result["error"]).split())[:80],
    }
