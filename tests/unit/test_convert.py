"""Configurations of other systems become recipes that say the same, and tell what they do not say."""

import functools
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT, events, write_volume

from vitrail import train
from vitrail.cli import main
from vitrail.convert import Converted, convert
from vitrail.convert.engine import CHANGED, DROPPED, MAPPED, UNKNOWN
from vitrail.cost.plan import num_parameters, plan
from vitrail.errors import UserError
from vitrail.recipe import load_recipe, yaml

SEEDS = ROOT / "tests/golden/seeds"
FILES = sorted(path for path in SEEDS.rglob("*") if path.is_file())
UCF = sorted((SEEDS / "ucf-vit").rglob("*.yaml"))
MAE = SEEDS / "torchtitan-mae/demo.toml"
DIT = SEEDS / "torchditan/llama3_latent_diffusion.toml"
STUDY = SEEDS / "vit-fsdp-study/sub_15B_HYBRID_4G_4N.sh"


def name_of(path: Path) -> str:
    return str(path.relative_to(SEEDS).with_suffix(""))


def value(found: Converted, key: str) -> Any:
    """The value at a dotted key of the recipe."""
    place: Any = found.tree
    for name in key.split("."):
        place = place[int(name)] if isinstance(place, list) else place[name]
    return place


def statuses(found: Converted) -> dict[str, str]:
    return {row.old: row.status for row in found.rows}


def write(folder: Path, text: str, name: str = "base_config.yaml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_all_eleven_files_are_here() -> None:
    assert (len(FILES), len(UCF)) == (11, 8)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_becomes_a_recipe_in_which_nothing_is_missing(path: Path) -> None:
    found = convert(path)
    assert yaml.parse(found.text) == found.tree
    load_recipe(found.tree)
    assert found.count(UNKNOWN) == 0
    for row in found.rows:
        assert row.why or row.status == MAPPED, row
        assert bool(row.new) == (row.status in (MAPPED, CHANGED)), row
        assert row.old in found.text or json.dumps(row.old) in found.text or repr(row.old) in found.text, row


@pytest.mark.parametrize("path", [UCF[0], MAE, STUDY], ids=name_of)
def test_a_key_that_no_table_has_is_told_of(path: Path, tmp_path: Path) -> None:
    more = {".yaml": "\nfurther:\n  key: 7\n", ".toml": "\n[further]\nkey = 7\n", ".sh": ""}[path.suffix]
    copy = write(tmp_path, path.read_text() + more, path.name)
    task = path.parent.name if path.suffix == ".yaml" else None
    found = convert(copy, task=task, words=["--further_key", "7"] if path == STUDY else [])
    assert found.count(UNKNOWN) == 1
    assert "further" in found.text.split("# Not understood:")[1]


@pytest.mark.parametrize("path", [UCF[3], MAE, DIT, STUDY], ids=name_of)
def test_values_that_make_no_sense_are_told_of(path: Path, tmp_path: Path) -> None:
    """Every value of a file in turn is replaced: a recipe that says so, or a sentence, and never a traceback."""
    if path == STUDY:
        for flag in ("--bs", "--image_size", "--model_size", "--strategy", "--scaling_group_size", "--model"):
            _refuses_or_tells(path, None, [flag, "odd"], flag)
        return
    tree = yaml.read(path) if path.suffix == ".yaml" else tomllib.loads(path.read_text())
    task = path.parent.name if path.suffix == ".yaml" else None
    for key in list(_leaves(tree)):
        odd = json.loads(json.dumps(tree))
        place = odd
        for part in key[:-1]:
            place = place[part]
        place[key[-1]] = {"odd": ["odd"]}
        if path.suffix == ".toml":
            text = "\n".join(
                f"[{name}]\n" + "\n".join(_toml(k, v) for k, v in part.items()) for name, part in odd.items()
            )
        else:
            text = json.dumps(odd)
        _refuses_or_tells(write(tmp_path, text, path.name), task, [], ".".join(key))


def _refuses_or_tells(path: Path, task: str | None, words: list[str], key: str) -> None:
    try:
        found = convert(path, task=task, words=words)
    except UserError:
        return
    row = next(row for row in found.rows if f"{key}.odd".startswith(row.old))
    assert row.status in (UNKNOWN, DROPPED), row


def _toml(key: str, value: Any) -> str:
    return f'{key} = {{odd = ["odd"]}}' if isinstance(value, dict) else f"{key} = {json.dumps(value)}"


def _leaves(tree: dict[str, Any], above: tuple[str, ...] = ()) -> Any:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name)


# ------------------------------------------------------------ what trains


def tiny_data(folder: Path, kind: str) -> dict[str, Any]:
    """A few samples of a kind, and the keys of an entry that reads them."""
    from PIL import Image

    noise = np.random.default_rng(0)
    if kind == "image_folder":
        for number in range(8):
            place = folder / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 255, (36, 40, 3), dtype=np.uint8)).save(
                place / f"{('cat', 'dog')[number % 2]}.{number}.png"
            )
        return {"path": str(folder)}
    if kind == "nifti":
        nibabel = pytest.importorskip("nibabel")
        folder.mkdir()
        for name, most in (("image", 255), ("label", 5)):  # Basic_CT's names and labels
            for number in range(2):
                voxels = noise.integers(1, most, (32, 32, 32), dtype=np.uint8)
                nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / f"{name}{number}.nii")
        return {"path": str(folder)}
    if kind == "latents":
        return {"kind": "dummy", "path": "dummy", "shape": [8, 8], "channels": 16, "classes": 10, "items": 100}
    if kind == "dummy":
        return {"path": "dummy", "shape": [28, 28], "items": 100, "classes": 10}
    return {"path": str(write_volume(folder / "em.zarr"))}


def tiny(found: Converted, folder: Path) -> dict[str, Any]:
    """The converted recipe with everything that takes time made small."""
    tree = json.loads(json.dumps(found.tree))
    entry = tree["data"]["train"][0]
    entry.pop("scale", None)  # of latents, which made-up ones have not
    entry |= tiny_data(folder / "data", entry.get("kind", "zarr"))
    model = tree["model"]
    encoder = model.get("encoder", model)
    small = {"width": 24, "depth": 4, "heads": 2}
    encoder |= small
    for name in ("hidden", "kv_heads"):
        encoder.pop(name, None)
    if isinstance(model.get("decoder"), dict):
        model["decoder"] = {"kind": model["decoder"]["kind"], "width": 24, "depth": 1, "heads": 2}
    adaptive = encoder.get("tokens")
    if adaptive:
        adaptive["length"] = 8 if model["ndim"] == 3 else 13
    if "features" in model or model["kind"] == "sap":
        model["features"] = 4
    if model["kind"] == "mae":
        model["mask"]["ratio"] = 0.5
    if "fit" in tree["data"]:
        tree["data"]["fit"]["resize"] = [32, 32]
    if model.get("classes") in (1000, 2):
        model["classes"] = {"image_folder": 2}.get(entry["kind"], 10)
    patch = encoder.get("patch", 14 if model["kind"] == "study_vit" else 4)
    if model["kind"] == "study_vit":
        model |= {"shape": 28, "classes": 10}
    tree["data"] |= {"crop": {"dit": 8, "study_vit": 28}.get(model["kind"], 32 if patch > 8 else 16), "batch": 2}
    tree["parallel"] = {key: item for key, item in tree["parallel"].items() if key == "recompute"}
    tree["parallel"]["strategy"] = "FULL_SHARD"
    tree["precision"] = {"compute": "fp32"}
    tree["run"] |= {"steps": 2, "device": "cpu", "dir": str(folder / "run")}
    tree["schedule"] |= {"warmup": 1}
    tree["checkpoint"] = {"every": "off"}
    tree["log"] = {"every": 1, "pictures": "off", "to": [], "report": False}
    return tree


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_converted_recipe_is_planned_and_starts(path: Path, tmp_path: Path) -> None:
    tree = tiny(convert(path), tmp_path)
    if tree["model"]["kind"] == "sap" or tree["model"]["kind"] == "unetr":
        assert tree["model"]["classes"] == 4
    (found,) = plan(load_recipe(tree), cluster="dgx_h100", gpus=1, as_is=True)
    assert found.fits
    assert train(tree, quiet=True).code == 0
    assert [line["step"] for line in events(tmp_path / "run", "train")] == [1, 2]


# ------------------------------------------------------------ what stays as it was


def test_models_are_as_large_as_the_originals() -> None:
    """Parameters that the originals count; where ours have a table of positions less or more, by that many."""
    assert num_parameters(load_recipe(convert(MAE).tree)) == pytest.approx(2_055_577_600, rel=1e-4)
    pixels = convert(DIT, words=["--dataset.dataset_name=imagenet_dummy"])
    assert num_parameters(load_recipe(pixels.tree)) == pytest.approx(461.9e6, rel=1e-4)
    assert num_parameters(load_recipe(convert(STUDY).tree)) == 14_720_355_376


def test_words_of_the_command_line_and_of_a_script_count(tmp_path: Path) -> None:
    found = convert(MAE, words=["--training.mask_ratio=0.95", "--training.compile", "--model.flavor", "8B"])
    assert value(found, "model.mask.ratio") == 0.95
    assert value(found, "parallel.compile") is True
    assert value(found, "model.encoder.width") == 4096
    script = write(
        tmp_path,
        "# --training.steps=1\ntorchrun train.py --job.config_file ${F} --training.steps=50 --training.batch_size=$b\n",
        "run.sh",
    )
    found = convert(MAE, script=script, words=["--training.max_norm=2.0"])
    assert (value(found, "run.steps"), value(found, "optimizer.clip")) == (50, 2.0)
    assert statuses(found)["--training.batch_size"] == UNKNOWN
    assert value(found, "data.batch") == "1/rank"
    found = convert(STUDY, words=["--model_size", "giant", "--use_ddp"])
    assert (value(found, "model.size"), value(found, "parallel.strategy")) == ("1B", "DDP")
    assert value(found, "precision.compute") == "fp32"
    for words in (["--dataset.image_size=[8, 16]"], ["--dataset.image_size", "8", "16"]):
        assert value(convert(DIT, words=words), "data.crop") == [8, 16]
    with pytest.raises(UserError, match="steps"):
        convert(MAE, words=["steps"])
    with pytest.raises(UserError, match="launcher"):
        convert(UCF[0], words=["--trainer.max_epochs=1"])


def test_scripts_are_read_as_the_shell_reads_them(tmp_path: Path) -> None:
    """Quotes, values after a space, words in a variable: each counts, and what is said twice is not guessed."""
    script = write(
        tmp_path,
        'ARGS="--training.steps=7 --model.flavor \\"8B\\""  # --training.steps=8\n'
        "torchrun train.py --training.batch_size 4 --training.compile \\\n  --training.max_norm='2.0' "
        "--checkpoint.interval=1 $ARGS > log\ntorchrun train.py --checkpoint.interval=2\n",
        "run.sh",
    )
    found = convert(MAE, script=script)
    wanted = {"run.steps": 7, "data.batch": "4/rank", "model.encoder.width": 4096, "optimizer.clip": 2.0}
    assert {key: value(found, key) for key in wanted} == wanted
    assert value(found, "parallel.compile") is True
    assert statuses(found)["--checkpoint.interval"] == UNKNOWN
    assert convert(MAE, script=script, words=["--checkpoint.interval=2"]).count(UNKNOWN) == 0
    call = "# main_training.py is the study's\n#SBATCH -N 4  # nodes\nsrun python main_training.py"
    for flags in (
        " --bs \"64\" --strategy 'FULL_SHARD' --model_size giant 2>&1 | tee log\n",
        " --bs 64 \\\n  --strategy FULL_SHARD --model_size=giant; echo done\n",
    ):
        found = convert(write(tmp_path, call + flags, "a.sh"))
        assert found.count(UNKNOWN) == 0
        assert [value(found, key) for key in ("data.batch", "parallel.strategy", "model.size")] == [
            "64/rank",
            "FULL_SHARD",
            "1B",
        ]
        assert statuses(found)["#SBATCH -N"] == DROPPED
    text = "CMD=\"python -u main_training.py\n  --model_size '5B'\n  --bs 16\"\nsrun $CMD\n"
    assert value(convert(write(tmp_path, text, "b.sh")), "model.size") == "5B"
    with pytest.raises(UserError, match="2 times"):
        convert(write(tmp_path, f"{call} --bs 1\n{call} --bs 2\n", "c.sh"))


def test_values_of_the_originals_are_recipes_or_told_of(tmp_path: Path) -> None:
    """Schedules and names of experiments as torchtitan's files have them, and what a file leaves out."""
    words = ["--experimental.pipeline_parallel_schedule=Interleaved1F1B", "--experimental.pipeline_parallel_degree=2"]
    assert value(convert(MAE, words=words), "parallel.schedule") == "interleaved"
    found = convert(DIT, words=["--metrics.experiment_name=dit-l_bs16_ps8_p1,8"])  # as run_ablations_0.5B.sh does
    assert value(found, "run.name") == "dit-l_bs16_ps8_p1-8"
    assert statuses(found)["metrics.experiment_name"] == CHANGED
    with pytest.raises(UserError, match=r"--training\.data_dir=FOLDER"):
        convert(write(tmp_path, '[model]\nflavor = "2B"\n', "a.toml"))
    tree = yaml.read(SEEDS / "ucf-vit/imagenet/mae/base_config.yaml")
    del tree["model"]["lr"], tree["model"]["loss_fn"], tree["model"]["warmup_steps"]
    found = convert(SEEDS / "ucf-vit/catsdogs/classification/base_config.yaml")
    assert value(found, "data.train.0.class_pattern") == r"(?P<class>cat|dog)\."  # cat.0.jpg, as the original reads it
    (row,) = (row for row in convert(write(tmp_path, json.dumps(tree)), task="mae").rows if row.status == UNKNOWN)
    assert row.why.startswith("model.lr, model.warmup_steps, model.loss_fn:")


def test_axes_and_labels_are_those_of_the_data(tmp_path: Path) -> None:
    """UCF-VIT counts axes as an array has them: x, y, z in NIfTI, which are read as z, y, x, and the last is cut."""
    tree = yaml.read(SEEDS / "ucf-vit/basic_ct/unetr/base_config.yaml")
    net = tree["model"]["net"]["init_args"]
    net |= {"tile_size": [64, 32, 16], "adaptive_patching": False}
    for dataset, flat, crop in (
        ("basic_ct", False, [16, 32, 64]),
        ("basic_ct", True, [32, 64]),
        ("xct", False, [64, 32, 16]),
        ("xct", True, [64, 32]),
    ):
        tree["data"]["dataset"], net["twoD"] = dataset, flat
        found = convert(write(tmp_path, json.dumps(tree)), task="unetr")
        assert value(found, "data.crop") == crop
        (entry,) = value(found, "data.train")
        assert entry.get("slices") == ({"basic_ct": "z", "xct": "x"}[dataset] if flat else None)
        assert ("label_map" in entry) == (dataset == "basic_ct")


def test_the_task_of_a_file_is_told_by_its_folder_or_by_a_person(tmp_path: Path) -> None:
    text = (SEEDS / "ucf-vit/imagenet/mae/base_config.yaml").read_text()
    assert convert(write(tmp_path / "mae", text)).task == "mae"
    away = write(tmp_path / "elsewhere", text)
    with pytest.raises(UserError, match="--as"):
        convert(away)
    assert value(convert(away, task="mae"), "model.kind") == "mae"
    with pytest.raises(UserError, match="--as mae"):
        convert(MAE, task="mae")


def test_files_are_opened_with_care(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.toml")
    with pytest.raises(UserError, match="FIFO"):
        convert(tmp_path / "a.toml")
    with pytest.raises(UserError, match="there is no such file"):
        convert(tmp_path / "b.toml")
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        convert(tmp_path / "c.toml")
    with pytest.raises(UserError, match="more than"):
        convert(write(tmp_path, "#" * 2**20 + "#", "d.toml"))
    with pytest.raises(UserError, match="not valid TOML"):
        convert(write(tmp_path, "a = = b", "e.toml"))
    with pytest.raises(UserError, match="does not call main_training"):
        convert(write(tmp_path, "echo hello", "f.sh"), system="vit-fsdp-study")
    with pytest.raises(UserError, match="whose configuration"):
        convert(write(tmp_path, "echo hello", "f.sh"))


def test_odd_names_do_not_leave_their_comments(tmp_path: Path) -> None:
    """A key with a line break in it is written on one line, and what it holds is no key of the recipe."""
    text = UCF[0].read_text() + '\n"a\\nrun: {name: evil}": 1\n"b\\u2028run: 2": 3\n'
    found = convert(write(tmp_path, text), task="diffusion")
    assert found.count(UNKNOWN) == 2
    assert yaml.parse(found.text) == found.tree


def test_the_verb_writes_a_recipe_and_never_over_another_file(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "mae.yaml"
    words = ["convert", str(MAE), "-o", str(out)]
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 0
    assert "training.mask_ratio = 0.01 -> model.mask.ratio = 0.01" in capsys.readouterr().out
    assert load_recipe(out).run.steps == 100_000
    out.write_text("mine")
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 2
    assert "not as vitrail would have written it" in capsys.readouterr().err
    assert out.read_text() == "mine"


# ------------------------------------------------------------ the pages for people who come from there

PAGES = sorted((ROOT / "docs/coming-from").glob("*.md"))
SPAN = re.compile(r"`([^`]+)`")


def rows_of(page: Path) -> list[tuple[Path, list[str], list[str], str]]:
    """The rows of the tables of a page: the file that they change, its words, those of the recipe, and why."""
    found = []
    for name, table in re.findall(r"<!-- rows: (\S+) -->\n((?:\|.*\n)+)", page.read_text(encoding="utf-8")):
        for line in table.splitlines()[2:]:
            there, here, why = (cell.strip() for cell in line.strip("|").split("|"))
            assert here == "nothing" or SPAN.search(here), line
            found.append((SEEDS / name, SPAN.findall(there), SPAN.findall(here), why))
    return found


def changed(path: Path, words: list[str], folder: Path) -> tuple[Converted, list[str]]:
    """What becomes of a file with keys set, and the names of these."""
    if words and words[0].startswith("--"):
        flags = words[0].split()
        return convert(path, words=flags), [flag for flag in flags if flag.startswith("--")]
    if not words or "(" in words[0]:  # it is in the code there
        return convert(path), []
    text = path.read_text()
    if path.suffix == ".toml":
        tree = tomllib.loads(text)
        for word in words:
            (section, values), *_ = tomllib.loads(word).items()
            tree.setdefault(section, {}).update(values)
        lines = (f"[{name}]\n" + "\n".join(_toml(k, v) for k, v in part.items()) for name, part in tree.items())
        names = [word.partition(" = ")[0] for word in words]
        return convert(write(folder, "\n".join(lines), path.name)), names
    tree = yaml.parse(text)
    names = []
    for word in words:
        key, item = next(iter(yaml.parse(word).items()))
        *above, last = key.split(".")
        place = tree
        for name in above:
            place = place.setdefault(name, {})
        place[last] = item
        names.append(key)
    return convert(write(folder, json.dumps(tree), path.name), task=path.parent.name), names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_row_of_a_page_is_what_the_converter_does(page: Path, tmp_path: Path) -> None:
    rows = rows_of(page)
    assert len(rows) > 15
    for path, there, here, why in rows:
        found, names = changed(path, there, tmp_path)
        for word in here:
            key, wanted = next(iter(yaml.parse(word).items()))
            got = value(found, key)
            assert got == wanted or _holds(got, wanted), (there, key, got, wanted)
        told = statuses(found)
        for name in names:
            assert told[name] != UNKNOWN, (there, name)
            assert (told[name] == DROPPED) <= bool(why or here), there
            assert here or told[name] == DROPPED, there
            assert why or told[name] != CHANGED, there


def _holds(got: Any, wanted: Any) -> bool:
    """Whether a mapping or a list has what is wanted, and more."""
    if isinstance(wanted, dict):
        return isinstance(got, dict) and all(key in got and _holds(got[key], item) for key, item in wanted.items())
    if isinstance(wanted, list) and isinstance(got, list) and len(got) == len(wanted):
        return all(_holds(a, b) for a, b in zip(got, wanted, strict=True))
    return bool(got == wanted)


def test_every_key_of_a_file_has_a_row_on_a_page() -> None:
    """What people find in their files, they find on the page of their system."""
    for folder, pages in PAGES_OF.items():
        text = "".join((ROOT / f"docs/coming-from/{page}.md").read_text(encoding="utf-8") for page in pages)
        for path in FILES:
            if path.relative_to(SEEDS).parts[0] == folder:
                keys = {row.old for row in convert(path).rows if row.value and "(default)" not in row.value}
                keys = {key for key in keys if not key.startswith(("(", "#SBATCH"))}
                assert not (missing := sorted(key for key in keys if key not in text)), (path.name, missing)


@pytest.mark.parametrize("place", [True, False])
def test_models_of_single_variables_start_without_what_weights_of_trees_need(tmp_path: Path, place: bool) -> None:
    text = (SEEDS / "ucf-vit/basic_ct/unetr/base_config.yaml").read_text()
    for key, said in (("use_pretrained_mae_model", True), ("use_varemb", True), ("use_adaptive_pos_emb", place)):
        text, number = re.subn(rf"\b{key}: *\w+", f"{key}: {said}", text)
        assert number == 1
    encoder = convert(write(tmp_path, text), task="unetr").tree["model"]["encoder"]
    assert encoder["variables"]["known"] == ["ct_res1"]
    assert "patch_norm" not in encoder
    assert encoder["positions"] == ("sincos" if place else "learned")


PAGES_OF = {
    "ucf-vit": ["ucf-vit"],
    "torchtitan-mae": ["torchtitan-mae"],
    "torchditan": ["torchditan", "torchtitan-mae"],
    "vit-fsdp-study": ["vit-fsdp-study"],
}


NEWER = """
trainer: {max_epochs: 100, data_type: "float32", gpu_type: "amd", checkpoint_path: "c", resume_from_checkpoint: False,
  checkpoint_filename: "epoch_0", use_pretrained_model: False, pretrained_checkpoint_filename: "", save_frequency: 2}
parallelism: {fsdp_size: 1, simple_ddp_size: 8, tensor_par_size: 1}
optimizer: {type: "AdamW", lr: 0.0001, beta_1: 0.9, beta_2: 0.95, weight_decay: 1e-5}
scheduler: {type: "linear-warmup-cosine-annealing", warmup_epochs: 4, warmup_start_lr: 1e-8, eta_min: 1e-8}
grad_scaler: {use_grad_scaler: False, init_scale: 8192, min_scale: 128, growth_interval: 100}
model: {type: "UNETR", embed_dim: 768, depth: 12, num_heads: 12, mlp_ratio: 4, drop_path: 0.0, drop_rate: 0.0,
  use_channel_aggregation: False, num_classes: 4, linear_decoder: False, feature_size: 16, skip_connection: True}
tiling: {do_tiling: True, div: 4, tile_overlap: 0, use_all_data: False}
ap: {do_ap: True, fixed_length: 512, separate_channels: False, use_adaptive_pos_emb: True, interp_size: 4}
data:
  dataset: "basic_ct"
  img_size: [256, 256, 256]
  twoD: False
  patch_size: 32
  dict_root_dirs: {ct1: /data/ct}
  num_channels: {ct1: 1}
  dict_in_variables: {ct1: [ct_res1]}
dataloader: {type: "iterative_dataloader", dict_start_idx: {ct1: 0}, dict_end_idx: {ct1: 1},
  dict_buffer_sizes: {ct1: 9},
  batch_size: 4, num_workers: 1, pin_memory: False, val_split_ratio: 0.1, test_split_ratio: 0.1}
"""


def test_the_newer_layout_of_ucf_vit_is_read_too(tmp_path: Path) -> None:
    found = convert(write(tmp_path, NEWER))
    assert found.count(UNKNOWN) == 0, [row for row in found.rows if row.status == UNKNOWN]
    assert found.task == "unetr"
    wanted = {
        "run.steps": "100 epochs",
        "schedule.warmup": "4 epochs",
        "model.encoder.patch": 4,
        "data.crop": 64,
        "data.train.0.end": 0.8,
        "data.valid.0.start": 0.8,
        "data.valid.0.end": 0.9,
        "data.valid.0.label_map": {"1": 0, "2": 1, "3": 2, "4": 3},
        "checkpoint.every": "2 epochs",
    }
    assert {key: value(found, key) for key in wanted} == wanted


HEADLINES = {
    "imagenet/classification": "imagenet/vit_b16_adaptive",
    "imagenet/mae": "imagenet/mae_b16_adaptive",
    "catsdogs/classification": "catsdogs/vit_b16",
    "basic_ct/mae": "ct/mae2d",
    "basic_ct/unetr": "ct/unetr3d",
    "basic_ct/sap": "ct/sap3d",
    "basic_ct/diffusion": "ct/ddpm2d",
}


@pytest.mark.parametrize("seed", HEADLINES)
def test_recipes_of_the_seeds_are_what_their_files_become(seed: str) -> None:
    ours = load_recipe(ROOT / f"configs/{HEADLINES[seed]}.yaml")
    theirs = load_recipe(convert(SEEDS / f"ucf-vit/{seed}/base_config.yaml").tree)
    for name in ("model", "objective", "optimizer", "schedule", "precision", "run.steps", "data.crop", "data.batch"):
        a, b = (functools.reduce(getattr, name.split("."), recipe) for recipe in (ours, theirs))
        assert a == b, name
    for name in ("fit", "normalize", "statistics"):
        assert getattr(ours.data, name) == getattr(theirs.data, name), name
