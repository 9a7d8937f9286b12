"""`vitrail data inspect`, `preview` and `bench` as a person calls them."""

import json
import shutil
import time

import pytest
from PIL import Image
from support import tiny_recipe, write_recipe, write_volume

from vitrail import cli
from vitrail.data.generate import write_digits
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.training.diagnose import bench, summarise


def call(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code or 0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_volume(folder / "em.zarr", size=40)
    write_digits(folder / "digits")
    return folder


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_inspect_tells_facts_notes_and_a_recipe(place, capsys, tmp_path):
    assert (
        call("data", "inspect", place / "em.zarr", "--set", "region={x: [0, 0.5]}", "--picture", tmp_path / "a.png")
        == 0
    )
    out = capsys.readouterr().out
    assert "kind: ome_zarr\n" in out
    assert "mean: " in out
    assert "in a recipe:\nmodel: {ndim: 3}" in out
    assert "region: {x: [0, 0.5]}" in out
    assert (tmp_path / "a.png").is_file()
    assert call("data", "inspect", place / "digits" / "train", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["items"], len(facts["class_counts"])) == ("image_folder", 1437, 10)
    assert call("data", "inspect", place / "em.zarr", "--kind", "image_folder") == 2
    assert call("data", "inspect", place / "em.zarr", "--kind", "ome_zar") == 2
    assert "did you mean 'ome_zarr'" in capsys.readouterr().err


def test_inspect_goes_on_where_some_chunks_are_missing(place, capsys, tmp_path):
    broken = tmp_path / "broken.zarr"
    shutil.copytree(place / "em.zarr", broken)
    chunks = sorted(path for path in (broken / "s0").rglob("*") if path.is_file() and path.name.isdecimal())
    chunks[-1].unlink()
    found = call("data", "inspect", broken)
    shown = capsys.readouterr()
    # Crops of so small a volume touch all of its chunks.
    assert "missing" in shown.out + shown.err
    assert found == (0 if "note: " in shown.out else 2)


def recipe_of(place, tmp_path, kind: str) -> str:
    tree = tiny_recipe(place / "em.zarr", tmp_path / "run")
    if kind == "adaptive":
        tree["model"]["encoder"] |= {"tokens": {"kind": "adaptive", "length": 50}}
    if kind == "segment":
        width = {"width": 24, "depth": 4, "heads": 2, "patch": 4, "positions": "sincos"}
        tree["model"] = {"kind": "unetr", "ndim": 3, "encoder": width, "features": 4}
        tree["objective"] = {"kind": "segment"}
        for group in ("train", "valid"):
            tree["data"][group][0]["labels"] = "structures"
    if kind == "classify":
        tree["model"] = {"kind": "vit", "ndim": 2, "width": 24, "depth": 1, "heads": 2, "patch": 2}
        tree["objective"] = {"kind": "classify"}
        tree["data"] |= {group: [{"path": str(place / "digits" / group)}] for group in ("train", "valid")}
        tree["data"]["crop"] = 8
    return str(write_recipe(tmp_path / "recipe.yaml", tree))


@pytest.mark.parametrize(("kind", "tokens"), [("mae", 64), ("adaptive", 50), ("segment", 64), ("classify", 16)])
def test_preview_shows_the_samples_of_a_training(kind, tokens, place, tmp_path, capsys):
    out = tmp_path / "seen.png"
    assert call("data", "preview", recipe_of(place, tmp_path, kind), "--samples", 3, "--out", out, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["picture"] == str(out)
    assert facts["normalised"].endswith("become 0 and 1")
    with Image.open(out) as drawn:
        assert min(drawn.size) > 300
    assert [sample["counter"] for sample in facts["samples"]] == [0, 1, 10]  # of steps with 8 samples, in turn
    first = facts["samples"][0]
    assert first["tokens"] == tokens
    assert (first["visible"] is not None) == (kind in ("mae", "adaptive"))
    if kind == "mae":
        assert first["visible"] == 16
    assert (first["label"] is not None) == (kind == "classify")
    assert not (tmp_path / "run").exists()


def test_preview_shows_what_stands_for_bad_samples(place, tmp_path, capsys):
    """With bad: skip a training goes on, and so does its preview, with the samples that it takes instead."""
    images = tmp_path / "digits"
    shutil.copytree(place / "digits", images)
    for number, path in enumerate(sorted((images / "train").rglob("*.png"))):
        if number % 2:
            path.write_bytes(path.read_bytes()[:60])  # the header is whole
    recipe = recipe_of(tmp_path, tmp_path, "classify")
    more = ["data.bad=skip", "data.most_bad=100000", "--samples", 8, "--out", tmp_path / "a.png", "--json"]
    assert call("data", "preview", recipe, *more) == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(facts["samples"]) == 8
    assert all((images / "train" / sample["item"]).stat().st_size > 60 for sample in facts["samples"])


def test_a_picture_that_cannot_be_written_is_refused(place, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out, why in [
        (tmp_path, "is a folder; name a file in it"),
        (tmp_path / "a.xyz", "written as PNG"),
        (tmp_path / "file" / "a.png", "cannot be written"),
        ("/proc/a.png", "cannot be written"),
    ]:
        assert call("data", "inspect", place / "em.zarr", "--picture", out) == 2
        assert why in capsys.readouterr().err
    recipe = recipe_of(place, tmp_path, "mae")
    assert call("data", "preview", recipe, "--out", tmp_path / "file" / "a.png") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_bench_measures_a_recipe_three_ways(place, tmp_path, capsys):
    recipe = recipe_of(place, tmp_path, "mae")
    assert call("data", "bench", recipe, "--seconds", 0.2, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    real, syn, io = found["results"]
    assert [real["mode"], syn["mode"], io["mode"]] == ["real", "syn", "io"]
    assert 0 <= syn["wait_percent"] <= 100
    assert 0 <= real["wait_percent"] <= 100
    assert all(r["fastest_round"] <= r["step_seconds"] <= r["slowest_round"] for r in (real, syn))
    assert real["steps"] == syn["steps"] >= 6
    assert io["gb_per_s"] > 0
    assert sum(io["where_percent"].values()) == pytest.approx(100)
    assert io["peak_rss_gib"] > 0.05
    assert "waits for data" in found["summary"] or "no verdict" in found["summary"]  # a busy machine has none
    assert not (tmp_path / "run").exists()


def test_bench_finds_a_slow_disk(place, tmp_path, monkeypatch):
    """20 ms for each of 8 images, one after the other, beside steps of a few milliseconds."""
    opened = ImageFolderConfig.open

    def open_slow(self):
        source = opened(self)
        read = source.read

        def slow(*arguments):
            time.sleep(0.02)
            return read(*arguments)

        source.read = slow
        return source

    monkeypatch.setattr(ImageFolderConfig, "open", open_slow)
    found = bench(recipe_of(place, tmp_path, "classify"), seconds=0.2, workers=[1], overrides=["data.normalize=none"])
    real, syn, io = found["results"]
    # A busy machine makes everything slower, and never faster: steps, too, so that less of them is waiting.
    assert real["wait_percent"] > syn["wait_percent"]
    assert real["step_seconds"] > 0.15
    assert real["steps"] == syn["steps"] >= 6  # as many as the slower of the two has time for, at least 2 a round
    assert io["samples_per_s"] < 60
    assert io["where_percent"]["read and decode"] > 50


def trained(mode: str, step: float, *, fastest: float | None = None, slowest: float | None = None, wait: float = 0.0):
    rounds = {"fastest_round": fastest or step, "slowest_round": slowest or step}
    return {"mode": mode, "step_seconds": step, "wait_percent": wait, **rounds}


def loaded(samples: float) -> dict:
    return {"mode": "io", "samples_per_s": samples, "gb_per_s": 1.0, "where_percent": {"read and decode": 100.0}}


def test_bench_says_what_limits_a_training():
    waits = summarise([trained("real", 0.24, wait=58.0), trained("syn", 0.1), loaded(70)], 16)
    assert waits.startswith("58 % of the step waits for data; a step takes 0.24 s with real data and 0.1 s")
    assert "the model can take 160 samples/s: raise data.workers" in waits
    assert "reading is fast enough" in summarise([trained("real", 0.1), trained("syn", 0.1), loaded(900)], 16)


@pytest.mark.parametrize(
    "steps",
    [
        (trained("real", 0.38), trained("syn", 4.95)),  # less work cannot take longer
        (trained("real", 0.3, fastest=0.2, slowest=2.1), trained("syn", 0.2)),
        (trained("syn", 0.3, fastest=0.2, slowest=2.1),),
    ],
)
def test_bench_gives_no_verdict_on_a_busy_machine(steps):
    told = summarise([*steps, loaded(900)], 16)
    assert told.startswith("no verdict: ")
    assert "fast enough" not in told
    assert "measure again" in told


def test_bench_of_data_alone_loads(place, capsys):
    images = place / "digits" / "train"
    assert call("data", "bench", images, "--seconds", 0.2, "--workers", 1, "--workers", 2, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(r["mode"], r["workers"]) for r in found["results"]] == [("io", 1), ("io", 2)]
    assert found["results"][0]["decoded_per_voxel"] == pytest.approx(1, rel=0.5)  # an image is decoded for each sample
    assert call("data", "bench", place / "em.zarr", "--seconds", 0.1) == 0
    assert "loading alone gives" in capsys.readouterr().out
    assert call("data", "bench", images, "--mode", "real") == 2
    assert "needs a recipe" in capsys.readouterr().err
    assert call("data", "bench", place / "nowhere") == 2
    assert call("data", "preview", place / "nowhere.yaml") == 2
