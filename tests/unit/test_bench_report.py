"""What a sweep's report finds in made-up results whose effects are known, and in folders that are broken."""

import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from vitrail.errors import UserError
from vitrail.report.bench_cells import read_bench, split_studies
from vitrail.report.bench_page import bench_summary

H200 = {"device": "NVIDIA H200", "torch": "2.11.0", "python": "3.11.9", "vitrail": "0.1", "commit": "abc"}


def result(keys: dict[str, Any], seconds: float = 0.1, *, noise: float = 0.01, status: str = "ok", **more: Any) -> dict:
    """A line of results.jsonl; windows scatter by `noise`."""
    name = ",".join(f"{key.rsplit('.', 1)[-1]}={json.dumps(value).strip(chr(34))}" for key, value in keys.items())
    line: dict[str, Any] = {"schema": 1, "name": name, "keys": keys, "status": status, "error": None, "mode": "real"}
    line |= {"recipe": "toy", "model": "dit", "parameters": 1000, "tokens_all": 64, "tokens_visible": 64, "gpus": 1}
    line |= {"nodes": 1, "strategy": "FULL_SHARD", "group": None, "batch": 32, "batch_per_rank": 32, "retries": 0}
    line |= {"precision": "bf16", "recompute": "none", "compile": False, "date": "2026-01-02T03:04:05+00:00"} | more
    if status != "ok":
        return line | {"error": more.get("error", f"it was {status}")}
    scatter = random.Random(name)
    windows = sorted(seconds * (1 + noise * scatter.uniform(-1, 1)) for _ in range(5))
    step = windows[2]
    parts = {"data": 0.1 * step, "forward": 0.3 * step, "backward": 0.5 * step, "optimizer": 0.05 * step}
    return (
        line
        | {
            "windows": windows,
            "step_seconds": {"median": step, "low": windows[1], "high": windows[3]},
            "samples_per_s": line["batch"] / step,
            "split": parts | {"communication": None},
            "mfu": 0.4,
            "hfu": 0.45,
            "memory": {"allocated_gib": 10.0, "reserved_gib": 12.0, "per_rank": [10.0]},
            "environment": H200,
        }
        | more
    )


def write_bench(folder: Path, results: list[dict], *, tail: str = "", **sweep: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps({"recipe": "toy.yaml", "mode": "real", "ranks": 1} | sweep))
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in results) + tail)
    return folder


def ablation() -> list[dict]:
    """Patch x recompute x compile x batch, with a known effect each.

    Compiling takes 30 % off the step, 40 % with patch 8. Recomputing adds a third and halves the memory, so it alone
    fits the largest batch with patch 2. One cell, patch 8 and batch 64 with neither, is slow for no reason.
    """
    lines = []
    grid = itertools.product((2, 8), ("none", "full"), (False, True), (16, 32, 64))
    for patch, recompute, compiled, batch in grid:
        keys = {
            "model.patch": patch,
            "parallel.recompute": recompute,
            "parallel.compile": compiled,
            "data.batch": batch,
        }
        tokens = (64 // patch) ** 2
        seconds = (0.01 + 1e-5 * batch * tokens) * (4 / 3 if recompute == "full" else 1)
        seconds *= (0.6 if patch == 8 else 0.7) if compiled else 1.0
        seconds *= 2.5 if (patch, recompute, compiled, batch) == (8, "none", False, 64) else 1
        memory = 2 + 1e-3 * batch * tokens * (0.5 if recompute == "full" else 1)
        more: dict[str, Any] = {"batch": batch, "batch_per_rank": batch, "tokens_all": tokens, "tokens_visible": tokens}
        more |= {"recompute": recompute, "compile": compiled}
        if memory > 60:
            lines.append(result(keys, status="oom", **more))
        else:
            memory_told = {"allocated_gib": memory, "reserved_gib": 1.1 * memory, "per_rank": [memory]}
            mfu = 0.5 * batch * tokens * 1e-6 / seconds
            lines.append(result(keys, seconds, memory=memory_told, mfu=mfu, **more))
    return lines


def scaling() -> list[dict]:
    """Strategies over ranks, a batch of 32 a rank: DDP loses 2 % a doubling and does not fit in 64, FULL_SHARD 10 %."""
    lines = []
    for (strategy, loss), doubling in itertools.product((("DDP", 0.02), ("FULL_SHARD", 0.1)), range(0, 7, 2)):
        gpus = 2**doubling
        keys = {"parallel.strategy": strategy, "ranks": gpus}
        more = {"strategy": strategy, "gpus": gpus, "batch": 32 * gpus}
        if strategy == "DDP" and gpus == 64:
            lines.append(result(keys, status="failed", **more))
            continue
        memory = 20.0 if strategy == "DDP" else 4 + 16 / gpus
        told = {"allocated_gib": memory, "reserved_gib": memory, "per_rank": [memory]}
        split = {"data": 0.0, "forward": 0.03, "backward": 0.06, "optimizer": 0.01, "communication": 0.01 * doubling}
        lines.append(result(keys, 0.1 / (1 - loss) ** doubling, noise=0.002, memory=told, split=split, **more))
    return lines


def only(found: list[dict], **wanted: Any) -> dict:
    matches = [one for one in found if all(one[key] == value for key, value in wanted.items())]
    assert len(matches) == 1, matches
    return matches[0]


# ---------------------------------------------------------------- reading


def test_torn_lines_repeats_and_unknown_fields(tmp_path: Path) -> None:
    first = result({"a.b": 1}, status="failed")
    again = result({"a.b": 1}, 0.2, surprise={"deep": [1]})
    whole = result({"a.b": 2}, 0.1)
    torn = json.dumps(whole)[:40]
    text = "\x00\n[1, 2]\n" + torn + json.dumps(whole) + "\n" + torn
    sweep, cells, notes = read_bench(write_bench(tmp_path / "b", [first, again], tail=text))
    assert sweep["recipe"] == "toy.yaml"
    assert [(cell.name, cell.status) for cell in cells] == [("b=1", "ok"), ("b=2", "ok")]
    assert cells[0].rate == pytest.approx(160, rel=0.02)
    assert notes == ["results.jsonl holds 3 lines that cannot be read; the rest was."]


def test_newest_by_date_not_by_place(tmp_path: Path) -> None:
    new = result({"a.b": 1}, 0.1, date="2026-02-01T00:00:00+00:00")
    old = result({"a.b": 1}, 0.2, date="2026-01-01T00:00:00+00:00")
    assert read_bench(write_bench(tmp_path / "b", [new, old]))[1][0].rate > 300


def test_statuses_stay_apart(tmp_path: Path) -> None:
    lines = [result({"a.b": n}, status=status) for n, status in enumerate(("ok", "oom", "failed", "skipped"))]
    lines.append(result({"a.b": 4}) | {"samples_per_s": None})
    lines.append(result({"a.b": 5}) | {"status": "strange"})
    facts = bench_summary(write_bench(tmp_path / "b", lines, cells=["b=0", "b=9"]))
    assert facts["counts"] == {"ok": 1, "oom": 1, "failed": 3, "skipped": 1}
    assert facts["open"] == ["b=9"]
    assert "tells no speed" in facts["cells"][4]["error"]
    assert "'strange'" in facts["cells"][5]["error"]
    words = " ".join(facts["conclusions"])
    assert "Out of memory: 1 of 6" in words
    assert "Failed: 3 of 6" in words
    assert "Skipped: 1 of 6" in words


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("")])
def test_not_a_bench_folder(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "b")
    with pytest.raises(UserError, match="vitrail bench"):
        bench_summary(tmp_path / "b")


def test_empty_and_broken_folders(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "sweep.json").write_text("{broken")
    facts = bench_summary(empty)
    assert facts["cells"] == []
    assert any("sweep.json cannot be read" in note for note in facts["warnings"])
    assert len(facts["needed"]) == 5
    bare = bench_summary(write_bench(tmp_path / "bare", [{"name": "x", "status": "ok"}, {"name": "y"}]))
    assert bare["counts"]["failed"] == 2


def test_rubbish_in_any_field_is_survived(tmp_path: Path) -> None:
    base = [result({"parallel.compile": on, "data.batch": b}, 0.1, batch=b) for on in (False, True) for b in (1, 2)]
    for field in base[0]:
        for junk in (None, "x", -1, 0, [], {}, [None], {"x": "y"}, 1e400, True):
            if field == "name" and not isinstance(junk, str):
                continue
            facts = bench_summary(write_bench(tmp_path / "b", [base[0] | {field: junk}, *base[1:]]))
            json.dumps(facts, allow_nan=False)
            assert sum(facts["counts"].values()) in (3, 4), (field, junk)


# ---------------------------------------------------------------- effects


def test_effects_are_those_put_in(tmp_path: Path) -> None:
    facts = bench_summary(write_bench(tmp_path / "b", ablation()))
    compiled = only(facts["effects"], factor="compile")
    # Ratios of the four settings: 1/0.7 twice, 1/0.6 once, and 2.5/0.6 where the uncompiled cell is slow.
    expected = (math.prod([1 / 0.7, 1 / 0.7, 1 / 0.6, 2.5 / 0.6]) ** 0.25 - 1) * 100
    assert compiled["percent"] == pytest.approx(expected, abs=3)
    assert compiled["low"] < compiled["percent"] < compiled["high"]
    assert compiled["high"] - compiled["low"] < 5
    assert compiled["pairs"] == 4
    assert compiled["pair_percent"] == pytest.approx([43, 317], abs=8)
    assert compiled["batches"] == [32, 64]  # 64 does not fit with patch 2 and nothing recomputed
    assert compiled["sure"]
    again = only(facts["effects"], factor="recompute")
    assert (again["from"], again["to"]) == ("none", "full")
    assert again["memory_percent"] < -30
    assert only(facts["effects"], factor="patch")["changes_work"]
    assert not compiled["changes_work"]
    assert any(s.startswith("compile=true against false: +9") for s in facts["conclusions"])


def test_an_effect_inside_the_noise_is_not_sure(tmp_path: Path) -> None:
    lines = [result({"parallel.compile": on}, 0.1 * (0.999 if on else 1), noise=0.05) for on in (False, True)]
    effect = only(bench_summary(write_bench(tmp_path / "b", lines))["effects"])
    assert not effect["sure"]
    assert effect["low"] < 0 < effect["high"]
    few = [line | {"windows": line["windows"][:1]} for line in lines]
    facts = bench_summary(write_bench(tmp_path / "few", few))
    assert only(facts["effects"])["low"] is None
    assert any("fewer than 5 windows" in note for note in facts["warnings"])


def test_own_best_batch_is_told_beside_the_common_one(tmp_path: Path) -> None:
    lines = []
    for mode, batch in itertools.product(("none", "full"), (16, 64)):
        keys = {"parallel.recompute": mode, "data.batch": f"{batch}/rank"}
        more = {"batch": batch, "batch_per_rank": batch, "recompute": mode}
        lines.append(
            result(keys, status="oom", **more)
            if (mode, batch) == ("none", 64)
            else result(keys, (0.1 + batch / 1000) * (1.2 if mode == "full" else 1), noise=0.001, **more)
        )
    effect = only(bench_summary(write_bench(tmp_path / "b", lines))["effects"])
    assert effect["percent"] == pytest.approx(100 / 1.2 - 100, abs=0.5)
    assert effect["own_percent"] == pytest.approx(100 * (64 / 0.1968) / (16 / 0.116) - 100, abs=2)
    assert effect["batches"] == [16]


def test_keys_that_change_together_are_one_factor(tmp_path: Path) -> None:
    tied = [result({"a.x": n, "b.y": 2 * n}, 0.1 / n) for n in (1, 2)]
    effect = only(bench_summary(write_bench(tmp_path / "tied", tied))["effects"])
    assert effect["factor"] == "x + y"
    layouts = [("DDP", None), ("HYBRID_SHARD", 2), ("HYBRID_SHARD", 4)]
    lines = [
        result({"parallel.strategy": name, "parallel.group": group}, 0.1, strategy=name, group=group, gpus=8, batch=256)
        for name, group in layouts
    ]
    facts = bench_summary(write_bench(tmp_path / "layouts", lines))
    assert [f["levels"] for f in facts["factors"]] == [["DDP", "HYBRID_SHARD 2", "HYBRID_SHARD 4"]]
    assert len(facts["effects"]) == 2


def test_keys_swept_later_take_the_recipe_before(tmp_path: Path) -> None:
    lines = [result({"data.workers": 2}, 0.1), result({"parallel.compile": True}, 0.05, compile=True)]
    lines.append(result({"parallel.compile": False}, 0.1))
    tree = {"data": {"workers": 2}, "parallel": {"compile": "auto"}}
    facts = bench_summary(write_bench(tmp_path / "b", lines, tree=tree))
    assert [factor["factor"] for factor in facts["factors"]] == ["compile"]  # workers are 2 everywhere
    assert only(facts["effects"])["percent"] == pytest.approx(100, abs=4)


def test_interactions(tmp_path: Path) -> None:
    facts = bench_summary(write_bench(tmp_path / "b", ablation()))
    by_patch = only(facts["interactions"], factor="compile", by="patch")
    low, high = by_patch["points"]
    assert (low["level"], high["level"]) == ("2", "8")
    assert low["percent"] == pytest.approx(43, abs=3)
    assert by_patch["sure"]
    assert high["percent"] > low["percent"]
    assert not only(facts["interactions"], factor="recompute", by="patch")["sure"]  # a third, whatever the patch
    by_batch = only(facts["interactions"], factor="compile", by="batch")
    assert [point["level"] for point in by_batch["points"]] == ["batch 16", "batch 32", "batch 64"]
    assert not [one for one in facts["interactions"] if one["factor"] == "patch"]


# ---------------------------------------------------------------- curves


def test_a_fall_outside_the_spread_is_told(tmp_path: Path) -> None:
    facts = bench_summary(write_bench(tmp_path / "b", ablation()))
    assert len(facts["flags"]) == 1
    assert facts["flags"][0].startswith("patch=8, recompute=none, compile=false: throughput falls from 1.05k to")
    line = only(facts["batches"], label="patch=2, recompute=none, compile=true")
    assert [point["batch"] for point in line["points"]] == [16, 32]
    assert line["broken"] == [{"batch": 64, "status": "oom"}]
    slow = only(facts["batches"], label="patch=8, recompute=none, compile=false")
    assert [point["falls"] for point in slow["points"]] == [False, False, True]


def test_a_fall_inside_the_spread_is_not(tmp_path: Path) -> None:
    lines = [
        result({"data.batch": b}, b * (1.001 if b > 1 else 1), noise=0.1, batch=b, batch_per_rank=b) for b in (1, 2)
    ]
    assert bench_summary(write_bench(tmp_path / "b", lines))["flags"] == []


def test_scaling(tmp_path: Path) -> None:
    facts = bench_summary(write_bench(tmp_path / "b", scaling()))
    full = only(facts["scaling"], strategy="FULL_SHARD")
    assert full["kind"] == "weak"
    assert [p["efficiency"] for p in full["points"]] == pytest.approx([1, 0.9**2, 0.9**4, 0.9**6], rel=0.01)
    ddp = only(facts["scaling"], strategy="DDP")
    assert ddp["broken"] == [{"gpus": 64.0, "status": "failed"}]
    strong = [
        result({"nodes": n}, 0.1 / n**0.9, gpus=4 * n, nodes=n, batch=64, batch_per_rank=16 // n) for n in (1, 2, 4)
    ]
    line = only(bench_summary(write_bench(tmp_path / "s", strong))["scaling"])
    assert (line["kind"], line["batch"]) == ("strong", 64)
    assert line["points"][-1]["efficiency"] == pytest.approx(4**-0.1, rel=0.03)


def test_ladder_climbs_one_key_a_rung(tmp_path: Path) -> None:
    rungs = [("DDP", "fp32", False), ("FULL_SHARD", "fp32", False), ("FULL_SHARD", "bf16", False)]
    rungs += [("FULL_SHARD", "bf16", True)]
    lines = []
    for place, (strategy, precision, compiled) in reversed(list(enumerate(rungs))):
        keys = {"parallel.strategy": strategy, "precision.compute": precision, "parallel.compile": compiled}
        more = {"strategy": strategy, "precision": precision, "compile": compiled}
        status = "ok" if place else "oom"
        lines.append(result(keys, 0.4 / max(place, 1), status=status, noise=0.001, **more))
    ladder = only(bench_summary(write_bench(tmp_path / "b", lines))["ladders"])
    assert [rung["status"] for rung in ladder["rungs"]] == ["oom", "ok", "ok", "ok"]
    assert [rung["added"] for rung in ladder["rungs"][1:]] == ["strategy=FULL_SHARD", "compute=bf16", "compile=true"]
    assert [rung["relative"] for rung in ladder["rungs"][1:]] == pytest.approx([1, 2, 3], rel=0.01)
    assert bench_summary(write_bench(tmp_path / "short", lines[:2]))["ladders"] == []


# ---------------------------------------------------------------- apart


def test_hardware_and_modes_never_mix(tmp_path: Path) -> None:
    a100 = H200 | {"device": "NVIDIA A100", "torch": "2.13.0"}
    lines = [result({"parallel.compile": False}, 0.1), result({"parallel.compile": True}, 0.01, environment=a100)]
    facts = bench_summary(write_bench(tmp_path / "b", lines))
    assert facts["effects"] == []
    assert any("2 kinds of hardware" in note for note in facts["warnings"])
    both = [result({"parallel.compile": True}, 0.05), *lines]
    assert only(bench_summary(write_bench(tmp_path / "c", both))["effects"])["device"] == "NVIDIA H200"
    versions = [lines[0], result({"parallel.compile": True}, environment=H200 | {"torch": "2.13.0"})]
    assert any("versions of torch" in note for note in bench_summary(write_bench(tmp_path / "d", versions))["warnings"])


def test_modes_are_compared_in_a_sentence(tmp_path: Path) -> None:
    lines = [result({"mode": mode}, s, mode=mode, noise=0.0) for mode, s in (("real", 0.1), ("syn", 0.042))]
    facts = bench_summary(write_bench(tmp_path / "b", lines))
    (told,) = facts["modes"]
    assert told["modes"] == ["real", "syn"]
    assert "10 % of the step waits for data; a step takes 0.1 s with real data" in told["sentence"]
    assert told["sentence"] in facts["conclusions"]
    assert facts["effects"] == []
    # On one rank there is nothing to communicate, and windows that overlap prove nothing.
    for gpus in (1, 4):
        lines = [
            result({"mode": "syn"}, 0.1, mode="syn", gpus=gpus),
            result({"mode": "compute"}, 0.1, mode="compute"),
        ]
        sentence = bench_summary(write_bench(tmp_path / f"on{gpus}", lines))["modes"][0]["sentence"]
        assert ("communication" in sentence) == (gpus > 1)
        assert "this may be chance" in sentence


def test_a_batch_of_all_ranks_is_not_one_of_a_rank(tmp_path: Path) -> None:
    lines = [
        result({"data.batch": text}, 0.1, gpus=4, batch=batch, batch_per_rank=batch // 4)
        for text, batch in (("8", 8), ("8/rank", 32))
    ]
    lines.append(result({"data.batch": 12}, status="oom", gpus=4, batch=None, batch_per_rank=None))
    (study,) = split_studies(read_bench(write_bench(tmp_path / "b", lines))[1])
    assert (study.unit, [cell.size for cell in study.cells]) == (" a rank", [2.0, 8.0, 3.0])


def test_cells_without_a_device_join_the_only_one(tmp_path: Path) -> None:
    lines = [result({"a.b": 1}), result({"a.b": 2}, status="oom")]
    cells = read_bench(write_bench(tmp_path / "b", lines))[1]
    (study,) = split_studies(cells)
    assert (study.device, len(study.cells)) == ("NVIDIA H200", 2)
