"""Mistakes through the command line: one sentence that says what to do, the right exit code, nothing half-made."""

import fcntl
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support import events, losses, run, tiny_recipe, torchrun, vitrail, write_recipe

from vitrail import cli
from vitrail.data.generate import Volume, write_ome_zarr
from vitrail.data.order.sampler import Sampler
from vitrail.recipe import load_recipe


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


class Refused:
    """A call of the command line in this process, whose one sentence and exit code are checked."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def __call__(self, *words: str | Path, code: int = 2) -> str:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(word) for word in words])
        out, err = self.capsys.readouterr()
        assert end.value.code == code, err
        assert out == ""
        return one_sentence(err)


def one_sentence(text: str) -> str:
    """The only error in what was written to standard error."""
    assert "Traceback" not in text, text
    found = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(found) == 1, text
    sentence = found[0].removeprefix("error: ")
    assert len(sentence) < 600
    return sentence


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    return Refused(capsys)


@pytest.fixture
def recipe(volume: Path, tmp_path: Path) -> Any:
    """Writes a short recipe with changes, and gives its path."""

    def make(**changes: Any) -> Path:
        short: dict[str, Any] = {"run__steps": 3, "eval__samples": 2, "log__pictures": 3}
        return write_recipe(tmp_path / "recipe.yaml", tiny_recipe(volume, tmp_path / "run", **(short | changes)))

    return make


def write_array(path: Path, image: np.ndarray, chunk: int = 16) -> Path:
    return write_ome_zarr(path, Volume(image, np.zeros(image.shape, np.uint8)), levels=1, chunk=chunk)


# ---------------------------------------------------------------- wrong recipes

WRONG = {
    # misspelt, mistyped, missing
    "misspelt key": (
        {"optimizer.lr_scalling": "sqrt"},
        r"^optimizer\.lr_scalling: unknown key; did you mean 'lr_scaling'\?",
    ),
    "misspelt section": ({"optimiser": {"kind": "adamw"}}, r"^optimiser: unknown key; did you mean 'optimizer'\?"),
    "wrong type": ({"run.steps": "many"}, r"^run\.steps: expected .*steps.*, got 'many'"),
    "text for a number": ({"optimizer.lr": "1e-3"}, r"^optimizer\.lr: expected a number, got '1e-3'"),
    "a list for a mapping": ({"optimizer": [1]}, r"^optimizer: expected a mapping such as \{kind: adamw\}"),
    "unknown model": ({"model.kind": "mea"}, r"^model\.kind: 'mea' is not a known model; did you mean 'mae'\?"),
    "unknown optimizer": (
        {"optimizer": {"kind": "tiger"}},
        r"^optimizer\.kind: 'tiger' is not a known optimizer.*adamw, lion, muon, sgd",
    ),
    "unknown objective": ({"objective": {"kind": "reconstrct"}}, r"^objective\.kind: .*did you mean 'reconstruct'\?"),
    "unknown source": (
        {"data.train": [{"path": "x", "kind": "dicom"}]},
        r"^data\.train\.0\.kind: 'dicom' is not a known source",
    ),
    "no steps": ({"run.steps": 0}, r"^run\.steps: expected more than 0 steps"),
    "an unfit name": ({"run.name": "a/b"}, r"^run\.name: expected letters, digits"),
    # sizes that do not fit
    "patch does not divide the crop": (
        {"model.encoder.patch": 5},
        r"size \[16, 16, 16\] is not a multiple of patch \[5, 5, 5\]",
    ),
    "patch larger than the crop": ({"model.encoder.patch": 32}, r"size \[16, 16, 16\] is not a multiple of patch"),
    "patch of nothing": ({"model.encoder.patch": 0}, r"^model\.encoder: patch 0 must be at least 1 voxel"),
    "heads do not divide the width": (
        {"model.encoder.heads": 5},
        r"^model\.encoder: width 24 must be a multiple of heads 5",
    ),
    "decoder heads": ({"model.decoder.heads": 3}, r"^model\.decoder: width 16 must be a multiple of heads 3"),
    "kv heads": ({"model.encoder.kv_heads": 3}, r"^model\.encoder: heads 2 must be a multiple of kv_heads 3"),
    "crop with too few axes": ({"data.crop": [16, 16]}, r"^data\.crop: \[16, 16\] has 2 numbers, but there are 3 axes"),
    "block with too few axes": (
        {"data.block": [16, 16]},
        r"^data\.block: \[16, 16\] has 2 numbers, but there are 3 axes",
    ),
    "no visible token": (
        {"model.mask.ratio": 0.999},
        r"mask\.ratio 0\.999 leaves no token visible of 64; use a smaller patch",
    ),
    "no hidden token": ({"model.mask.ratio": 1e-9}, r"mask\.ratio 1e-09 leaves no token hidden of 64"),
    "nothing decoded": (
        {"model.decoder.decode_ratio": 0},
        r"^model\.decoder: decode_ratio 0\.0 must be above 0 and at most 1",
    ),
    "a model that no objective trains": (
        {"model": {"kind": "vit", "ndim": 3, "channels": 1, "width": 8, "depth": 1, "heads": 1, "patch": 4}},
        r"^objective\.kind: 'reconstruct' trains model\.kind 'mae', not 'vit'",
    ),
    "channels": ({"model.channels": 4}, r"^model\.channels: 4, but the data have 1 variables; set it to 1"),
    "another shape than the crop": ({"model.shape": 32}, r"^model\.shape: 32 differs from data\.crop \[16, 16, 16\]"),
    "statistics of other variables": (
        {"data.normalize": {"mean": [0, 0], "std": [1, 1]}},
        r"^data\.normalize: give 1 means and stds",
    ),
    # the optimizer
    "a rule for no parameter": (
        {"optimizer.groups": [{"match": "decodr"}]},
        r"^optimizer\.groups: 'decodr' matches no parameter.*names look like encoder",
    ),
    "everything frozen": ({"optimizer.groups": [{"match": ".", "freeze": True}]}, r"every parameter is frozen"),
    "clip at nothing": ({"optimizer.clip": 0}, r"^optimizer: clip 0\.0 must be above 0; use null for no clipping"),
    # ranks and devices
    "groups of ranks": (
        {"parallel": {"strategy": "HYBRID_SHARD", "group": 2}},
        r"^parallel\.group: 2 does not divide the 1 ranks; choose one of 1",
    ),
    "group without its strategy": (
        {"parallel": {"group": 1}},
        r"^parallel\.group: it is only for strategy HYBRID_SHARD",
    ),
    "more tensor ranks than there are": (
        {"parallel": {"tensor": 2}},
        r"^parallel: tensor 2 does not divide the 1 ranks; start a multiple of 2 ranks, or set parallel\.tensor=1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_recipe(name: str, recipe, refused: Refused, tmp_path: Path) -> None:
    changes, words = WRONG[name]
    path = recipe(**{key.replace(".", "__"): value for key, value in changes.items()})
    assert re.search(words, refused("train", path, "--quiet"))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device here")
def test_a_device_that_is_not_there(recipe, refused: Refused, tmp_path: Path) -> None:
    sentence = refused("train", recipe(), "run.device=cuda")
    assert re.search(
        r"^run\.device: 'cuda' was asked for but PyTorch sees no such device; use 'cpu' or 'auto'", sentence
    )
    assert not (tmp_path / "run").exists()


def test_wrong_words_on_the_command_line(recipe, refused: Refused, tmp_path: Path) -> None:
    path = recipe()
    assert "unknown key" in refused("train", path, "optimizer.rate=1")
    assert "key=value" in refused("train", path, "optimizer.lr")
    assert "cannot be imported" in refused("train", path, "--plugin", "nowhere_lab.beamline")
    assert "nowhere.yaml" in refused("train", tmp_path / "nowhere.yaml")
    (tmp_path / "empty").mkdir()
    assert "no recipe.yaml" in refused("train", tmp_path / "empty")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "a: [1", "- 1\n- 2\n", "run: {name: a, name: b}", "\x00\x01", "just words"])
def test_files_that_are_no_recipe(text: str, refused: Refused, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert "recipe.yaml" in refused("train", path)


# ---------------------------------------------------------------- wrong data


def test_data_that_are_not_there(recipe, refused: Refused, tmp_path: Path) -> None:
    for path in ("nowhere.zarr", "nowhere", "recipe.yaml"):
        sentence = refused("train", recipe(data__train=[{"path": str(tmp_path / path)}]), "--quiet")
        assert path in sentence
        assert "data" in sentence
    (tmp_path / "empty").mkdir()
    sentence = refused("train", recipe(data__train=[{"path": str(tmp_path / "empty")}]))
    assert "is an empty folder" in sentence
    assert not (tmp_path / "run").exists()


def test_a_volume_smaller_than_the_crop(recipe, volume: Path, refused: Refused, tmp_path: Path) -> None:
    sentence = refused("train", recipe(data__crop=32))
    assert re.search(r"^data\.train\.0: em\.zarr is 48 x 48 x 29 voxels \(z, y, x\), smaller than data\.crop", sentence)
    sentence = refused("train", recipe(data__valid=[{"path": str(volume), "region": {"z": [0, 8]}}]))
    assert re.search(r"^data\.valid\.0: em\.zarr is 8 x 48 x 48", sentence)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("region", "words"),
    [
        ({"x": [0.5, 0.5]}, "0 <= lo < hi"),
        ({"x": [0.1, 0.101]}, "holds no voxel"),
        ({"x": [0, 100]}, "ends beyond the axis, which has 48 voxels"),
        ({"t": [0, 1]}, "has the axes z, y, x"),
    ],
)
def test_an_empty_region(region: dict, words: str, recipe, volume: Path, refused: Refused, tmp_path: Path) -> None:
    assert words in refused("train", recipe(data__train=[{"path": str(volume), "region": region}]))
    assert not (tmp_path / "run").exists()


def test_variables_that_do_not_match(recipe, volume: Path, refused: Refused, tmp_path: Path) -> None:
    one, other = ({"path": str(volume), "variables": [name]} for name in ("em", "mask"))
    sentence = refused("train", recipe(data__train=[one, other], data__valid=[]))
    assert re.search(r"^data\.train\.1: variables \['mask'\] do not match \['em'\] of data\.train\.0", sentence)
    sentence = refused("train", recipe(data__train=[one], data__valid=[other]))
    assert re.search(r"^data\.valid has variables \['mask'\], data\.train \['em'\]", sentence)
    assert not (tmp_path / "run").exists()


def test_a_model_of_another_dimension_than_the_data(recipe, refused: Refused, tmp_path: Path) -> None:
    sentence = refused("train", recipe(model__ndim=2))
    assert re.search(
        r"^data\.train\.0: .*em\.zarr has 3 axes \(z, y, x\), but the model has 2; set model\.ndim", sentence
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("normalize", ["fit", "none"])
def test_values_that_are_not_numbers(normalize: str, recipe, refused: Refused, tmp_path: Path) -> None:
    """Found while the statistics are fitted, or by the first picture: in both cases before the first step."""
    image = np.full((32, 32, 32), 0.5, np.float32)
    image[15, 16, 17] = np.nan
    source = [{"path": str(write_array(tmp_path / "nan.zarr", image))}]
    sentence = refused(
        "train", recipe(data__train=source, data__valid=source, data__crop=32, data__normalize=normalize), "--quiet"
    )
    assert re.search(r"nan\.zarr/s0 holds nan at z = 15, y = 16, x = 17, .*`region`, or set `nodata: fill`", sentence)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- a chunk that is lost


def chunks_of(sampler: Sampler, counters: range) -> set[tuple[int, ...]]:
    """Chunks of 16 voxels that the crops of these samples touch."""
    found = set()
    for counter in counters:
        spans = [
            range(s // 16, (s + c - 1) // 16 + 1) for s, c in zip(sampler(counter).start, sampler.crop, strict=True)
        ]
        found |= {(z, y, x) for z in spans[0] for y in spans[1] for x in spans[2]}
    return found


@pytest.fixture
def lossy(recipe, tmp_path: Path) -> Any:
    """A recipe of 6 steps whose data lack a chunk that a given step is the first to need; and the chunk's file."""
    data = write_array(tmp_path / "lossy.zarr", np.random.default_rng(0).integers(0, 255, (80, 80, 80), dtype=np.uint8))
    path = recipe(
        data__train=[{"path": str(data)}],
        data__valid=[],
        data__batch=2,
        data__reuse=1,
        data__normalize={"mean": [128.0], "std": [70.0]},
        run__steps=6,
        log__report=True,
    )

    def lose(step: int) -> tuple[Path, Path]:
        from vitrail.data.dataset import Dataset
        from vitrail.draws import key

        settings = load_recipe(path)
        dataset = Dataset(settings.data.train, (16, 16, 16), where="data.train")
        order = dataset.sampler(seed=3, lanes=2, reuse=1)
        pictured = dataset.sampler(seed=key(3, "valid"), lanes=1, reuse=1)
        early = chunks_of(order, range(2 * step)) | chunks_of(pictured, range(3))
        late = sorted(chunks_of(order, range(2 * step, 2 * step + 2)) - early)
        victim = data.joinpath("s0", "c", *map(str, late[0]))
        victim.unlink()
        return path, victim

    return lose


def test_a_chunk_lost_before_the_first_step(lossy, refused: Refused, tmp_path: Path) -> None:
    path, victim = lossy(0)
    sentence = refused("train", path, "--quiet")
    assert str(victim.relative_to(tmp_path)) in sentence
    assert "missing" in sentence
    assert not (tmp_path / "run").exists()


def test_a_chunk_lost_later_fails_the_run_and_leaves_its_record(lossy, tmp_path: Path) -> None:
    """Through a process of its own, for its exit code; a file that is restored lets the run go on."""
    path, victim = lossy(4)
    code, output = vitrail("train", path)
    sentence = one_sentence(output)
    assert code == 1
    assert str(victim.relative_to(tmp_path)) in sentence
    run_dir = tmp_path / "run"
    assert len(losses(run_dir)) == 4
    end = events(run_dir, "end")[-1]
    assert (end["reason"], end["step"]) == ("failed", 4)
    assert str(victim.relative_to(tmp_path)) in end["message"]
    assert (run_dir / "report.html").is_file()


def test_a_chunk_lost_in_front_of_the_statistics(recipe, volume: Path, refused: Refused, tmp_path: Path) -> None:
    data = tmp_path / "em.zarr"
    shutil.copytree(volume, data)
    (data / "s0" / "c" / "1" / "1" / "1").unlink()
    sentence = refused("train", recipe(data__train=[{"path": str(data)}], data__valid=[]))
    assert "em.zarr/s0/c/1/1/1" in sentence
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- the run folder


def test_a_folder_that_cannot_be_made(recipe, refused: Refused, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("in the way")
    sentence = refused("train", recipe(run__dir=str(blocker / "below" / "run")), "--quiet")
    assert "run.dir" in sentence
    assert str(blocker) in sentence
    assert blocker.read_text() == "in the way"
    sentence = refused("train", recipe(run__dir=str(blocker)), "--quiet")
    assert "run.dir" in sentence
    assert blocker.read_text() == "in the way"


def test_a_full_disk(recipe, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 4096, 4096))
    sentence = refused("train", recipe(), "--quiet")
    assert "MiB free, but a checkpoint needs" in sentence
    assert "run.dir" in sentence
    assert not (tmp_path / "run").exists()


def test_a_folder_in_use(recipe, refused: Refused, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with (run_dir / ".lock").open("w") as lock:
        lock.write("process 123 on elsewhere")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        sentence = refused("train", recipe(), "--quiet")
        assert re.search(r"^run\.dir: .*run' is in use by process 123 on elsewhere; .*--fresh", sentence)
    assert [p.name for p in run_dir.iterdir()] == [".lock"]
    assert (run_dir / ".lock").read_text() == "process 123 on elsewhere"


def test_a_missing_extra(recipe, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    sentence = refused("train", recipe(log__tensorboard=True), "--quiet")
    assert "TensorBoard is not installed" in sentence
    assert "vitrail[tensorboard]" in sentence
    assert not (tmp_path / "run").exists()


def test_another_recipe_in_the_same_folder(recipe, refused: Refused, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(recipe()), "--quiet"])
    assert end.value.code == 0
    before = sorted(p.relative_to(tmp_path) for p in (tmp_path / "run").rglob("*"))
    sentence = refused("train", recipe(optimizer__lr=0.5), "--quiet")
    assert re.search(r"was begun with another recipe \(optimizer\.lr: 0\.001 became 0\.5\).*--fresh", sentence)
    assert sorted(p.relative_to(tmp_path) for p in (tmp_path / "run").rglob("*")) == before


# ---------------------------------------------------------------- processes of their own


def test_a_mistake_in_a_process_of_its_own(recipe, tmp_path: Path) -> None:
    code, output = vitrail("train", recipe(model__encoder__heads=5))
    assert code == 2
    assert output == "error: model.encoder: width 24 must be a multiple of heads 5\n"
    assert not (tmp_path / "run").exists()


def test_a_batch_that_ranks_cannot_share_is_told_once(recipe, tmp_path: Path) -> None:
    """torchrun adds a wall of its own; of ours there is one sentence, from one rank, and no traceback."""
    code, output = run(*torchrun(2, "-m", "vitrail", "train", recipe(data__batch=3)))
    assert code != 0
    told = [line for line in output.splitlines() if "error: " in line and "data.batch" in line]
    assert len(told) == 1, output
    assert (
        "error: data.batch: 3 samples cannot be shared evenly by 2 data-parallel ranks (shard 2); set data.batch=2"
        in told[0]
    )
    assert not re.search(r'File ".*/src/vitrail/(?!__main__)', output), output
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- odd, but fine


def write_images(folder: Path, make, number: int = 6) -> Path:
    folder.mkdir()
    for i in range(number):
        Image.fromarray(make(i)).save(folder / f"{i}.png")
    return folder


IMAGES = {
    "model__ndim": 2,
    "data__augment": {"orientations": True},
    "data__batch": 4,
    "log__every": 1,
}


def train_on(recipe, folder: Path, **changes: Any) -> None:
    source = [{"path": str(folder)}]
    path = recipe(data__train=source, data__valid=source, **(IMAGES | changes))
    with pytest.raises(SystemExit) as end:
        cli.main(["train", str(path), "--quiet"])
    assert end.value.code == 0


def test_a_folder_of_images_of_several_sizes_trains_a_2d_model(recipe, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = write_images(tmp_path / "images", lambda i: rng.integers(0, 255, (24 + i, 40 - i, 3), dtype=np.uint8))
    train_on(recipe, folder)
    assert np.isfinite(losses(tmp_path / "run")).all()
    assert len(losses(tmp_path / "run")) == 3
    start = events(tmp_path / "run", "start")[0]
    assert start["samples_per_epoch"] == 6
    assert start["tokens_per_sample"] == 16
    assert list((tmp_path / "run" / "pictures").glob("*.png"))


@pytest.mark.parametrize("target", ["raw", "patch"])
@pytest.mark.parametrize("value", [lambda i: 40 * i, lambda i: 77], ids=["of each image", "of all"])
def test_constant_images_train_with_a_finite_loss(target: str, value, recipe, tmp_path: Path) -> None:
    """Patches without variance, and data without any; the score that divides by the variance has no value then."""
    folder = write_images(tmp_path / "images", lambda i: np.full((20, 20), value(i), np.uint8))
    train_on(recipe, folder, objective={"kind": "reconstruct", "target": target}, log__report=True)
    run_dir = tmp_path / "run"
    assert np.isfinite(losses(run_dir)).all()
    assert not events(run_dir, "skip")
    metrics = events(run_dir, "eval")[-1]["metrics"]
    assert np.isfinite(metrics["mse"])
    if value(0) == value(1):
        assert metrics["variance"] == pytest.approx(0, abs=1e-6)
        ratio = metrics["mse_over_variance"]
        assert ratio is None or np.isnan(ratio)
    assert (run_dir / "report.html").is_file()
