"""What the pages tell people to type works when it is pasted: README.md and all of docs/, block after block.

`tests/pasting.py` runs the blocks of a page in order, in one new folder that has `configs/`. A page may speak of what
its reader has already, such as `my/volume.zarr`: GIVEN says what that is, and PRESUPPOSED which pages have it. What
cannot run on any machine with two cores and no network stands in NOT_RUN with the reason; its words must still be
right.
"""

import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pasting
import pytest
from pasting import SHELLS, Shell, bare, blocks_of, commands_of, is_signature, parsed
from predicting import write_em
from support import MODELS, ROOT, tiny_recipe, write_recipe

from vitrail.errors import UserError
from vitrail.launch.jobs import check_machine
from vitrail.recipe import kinds, load_recipe, plugins, yaml

# What the words of pages stand for: something that is made, or commands that make it; these may need others.
GIVEN: dict[str, Callable[[Path], Any] | tuple[str, ...]] = {
    "data/em.zarr": ("vitrail data generate data/em.zarr",),
    "data/digits": ("vitrail data generate data/digits --kind digits",),
    "data/ct.nii.gz": lambda place: write_scan(place / "data/ct.nii.gz"),
    "ct": lambda place: write_scan(place / "ct/patient.nii.gz"),
    "my/volume.zarr": lambda place: write_em(place / "my/volume.zarr", shape=(32, 36, 160)),
    "my/new.zarr": lambda place: write_em(place / "my/new.zarr", shape=(32, 36, 40)),
    "my.yaml": lambda place: own_recipe(place / "my.yaml"),
    "run.yaml": lambda place: own_recipe(place / "run.yaml"),
    "recipe.yaml": lambda place: own_recipe(place / "recipe.yaml", codec={"kind": "identity"}),
    "scan.cube": lambda place: np.arange(40**3, dtype=np.uint8).tofile(place / "scan.cube"),
    "my_lab": lambda place: write_lab(place / "my_lab"),
    "beamline.yaml": lambda place: own_recipe(place / "beamline.yaml", **BEAMLINE),
    "images.yaml": lambda place: own_recipe(place / "images.yaml", **IMAGES),
    "runs/demo-mae3d": ("data/em.zarr", "vitrail train configs/demo/mae3d.yaml"),
    "runs/demo-unetr3d": ("data/em.zarr", "vitrail train configs/demo/unetr3d.yaml"),
    "runs/digits-vit": ("data/digits", "vitrail train configs/digits/vit.yaml"),
    "runs/my-autoencoder": ("data/digits", "vitrail train configs/digits/autoencoder.yaml run.name=my-autoencoder"),
    "em-classes.ome.zarr": (
        "runs/demo-unetr3d",
        "vitrail predict runs/demo-unetr3d data/em.zarr --out em-classes.ome.zarr",
    ),
    "data/isbi2012": lambda place: write_sections(place / "data/isbi2012", (30, 144, 144)),
    "scan.h5": lambda place: write_scan_with_labels(place),
    "train_configs/demo.toml": lambda place: seed(place, "torchtitan-mae/demo.toml", "train_configs/demo.toml"),
    "train_demo.sh": lambda place: (place / "train_demo.sh").write_text(f"{TITAN} --training.mask_ratio=0.95\n"),
    "train_configs/llama3_latent_diffusion.toml": lambda place: latent_seed(place, "llama3_latent_diffusion"),
    "train_configs/llama3_latent_diffusion_ablate.toml": lambda place: latent_seed(
        place, "llama3_latent_diffusion_ablate"
    ),
    "UCF-VIT": lambda place: ucf_seed(place, "UCF-VIT/configs/imagenet/mae/base_config.yaml"),
    "base_config.yaml": lambda place: seed(place, "ucf-vit/basic_ct/unetr/base_config.yaml", "base_config.yaml"),
    "isbi.yaml": lambda place: write_stack(place),
    "scripts": lambda place: [
        seed(place, "vit-fsdp-study/sub_15B_HYBRID_4G_4N.sh", f"scripts/{name}.sh")
        for name in ("sub_15B_HYBRID_4G_4N", "sub_base")
    ],
}
TITAN = "torchrun train.py --job.config_file ./train_configs/demo.toml"
ONE = {"data.train": [{"kind": "synthetic", "shape": [16, 16], "items": 16}]}
IMAGES = {"model": {"kind": "vit", "width": 16, "depth": 1, "heads": 2, "patch": 4}, "objective": {"kind": "classify"}}
IMAGES |= ONE | {"data.valid": ONE["data.train"], "data.augment": {}}
BEAMLINE = {"data.train": [{"kind": "beamline", "path": "scan.cube"}]}
BEAMLINE |= {"data.valid": BEAMLINE["data.train"]}

BESIDE = {  # what else belongs to them
    "my.yaml": ("my/volume.zarr",),
    "run.yaml": ("my/volume.zarr",),
    "recipe.yaml": ("my/volume.zarr",),
    "isbi.yaml": ("image.tif", "label.tif"),
    "scan.h5": ("drawn.tif",),
    "train_configs/llama3_latent_diffusion.toml": ("latents.safetensors",),
}

# What the reader of a page has beside vitrail and configs/.
PRESUPPOSED: dict[str, tuple[str, ...]] = {
    "README.md": ("my/volume.zarr", "my/new.zarr"),
    "docs/data.md": ("my/volume.zarr", "my.yaml", "ct"),
    "docs/bench.md": ("data/em.zarr",),
    "docs/evaluation.md": ("data/em.zarr", "runs/demo-unetr3d"),
    "docs/formats.md": ("data/ct.nii.gz",),
    "docs/install.md": (),
    "docs/latents.md": ("runs/my-autoencoder", "recipe.yaml"),
    "docs/launch.md": ("my.yaml",),
    "docs/parallel.md": ("run.yaml",),
    "docs/plan.md": ("run.yaml",),
    "docs/plugins.md": ("my_lab", "scan.cube", "beamline.yaml", "images.yaml"),
    "docs/probe.md": ("data/em.zarr", "runs/demo-mae3d"),
    "docs/resume.md": ("data/em.zarr", "runs/demo-mae3d"),
    "docs/tutorials/isbi2012.md": ("data/isbi2012",),
    "docs/view.md": ("runs/demo-unetr3d", "em-classes.ome.zarr", "scan.h5"),
    "docs/coming-from/torchditan.md": (
        "train_configs/llama3_latent_diffusion.toml",
        "train_configs/llama3_latent_diffusion_ablate.toml",
    ),
    "docs/coming-from/torchtitan-mae.md": ("train_configs/demo.toml", "train_demo.sh"),
    "docs/coming-from/ucf-vit.md": ("UCF-VIT", "base_config.yaml", "isbi.yaml"),
    "docs/coming-from/vit-fsdp-study.md": ("scripts",),
}

# Keys for commands that train what a page has too large for two cores; the page's own words stay before them.
SMALLER = {
    "docs/tune.md": "model.size=null model.width=32 model.depth=2 model.heads=2 model.patch=2 parallel.compile=false",
    "docs/coming-from/torchditan.md": "model.width=32 model.depth=2 model.heads=2 parallel.compile=false",
}

NETWORK, GPUS, SLURM = "needs the network", "needs GPUs", "needs Slurm, and test_launchers.py starts one where it can"
# Commands, without the comment behind them, and blocks of Python, by their first line, that run nowhere here; and why.
NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {
        "make demo": "test_demo.py runs it, and an installation needs the network",
        "make docs": "test_site.py builds the site",
        "make test": "it would run these tests in these tests",
        'pip install -c constraints.txt -e ".[formats]"': NETWORK,
        "srun vitrail train my.yaml parallel.context=4": SLURM,
        "vitrail launch slurm my.yaml --nodes 4 --gpus 8 --time 12:00:00 --submit": SLURM,
    },
    "docs/export.md": {"import timm": "timm wants torchvision, which is not installed with the tests"},
    "docs/install.md": {
        "python3 -m venv .venv && source .venv/bin/activate": "the environment of the tests is in use",
        "pip install -c constraints.txt -e .": NETWORK,
        "pip install -c constraints.txt --extra-index-url ADDRESS -e .": NETWORK,
        'docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" -v "$PWD:$PWD" -w "$PWD" vitrail:cuda '
        "vitrail train my.yaml": "needs Docker and an image",
        "apptainer exec --nv vitrail-cuda.sif vitrail train my.yaml": "needs Apptainer and an image",
    },
    "docs/latents.md": {
        "vitrail data encode configs/imagenet/dit_l2_latents.yaml --out data/imagenet-latents --trust "
        "'data.train=[{path: data/imagenet/train}]' 'data.valid=[{path: data/imagenet/valid}]' "
        "'data.fit={resize: 256}' data.crop=256": "needs ImageNet, and a codec from the network",
    },
    "docs/launch.md": {
        "vitrail launch slurm my.yaml data.batch=512 --machine dgx --nodes 4 --time 1d --submit": SLURM,
        "vitrail launch torchrun my.yaml --gpus 4 --submit": GPUS,
        "HEAD=$(scontrol show hostnames | head -n 1) srun --ntasks-per-node=1 --cpus-per-task=64 bash job.sh": SLURM,
    },
    "docs/mutants.md": {
        "python tests/mutants/run.py --jobs 16": "takes hours",
        "python tests/mutants/run.py --only samplers.py --again": "takes hours",
        "python tests/mutants/run.py --seconds 0 --table docs/mutants.md": "writes into the repository",
    },
    "docs/resume.md": {
        "torchfrtrace runs/demo-mae3d/flight-recorder --prefix nccl_rank_": "needs what a hang on GPUs has left",
    },
    "docs/tutorials/instances.md": {'pip install -c constraints.txt -e ".[instances]"': NETWORK},
    "docs/view.md": {'pip install -c constraints.txt -e ".[view]"': NETWORK},
    "docs/coming-from/torchditan.md": {
        "vitrail bench dit.yaml --sweep model.patch=8,4,2 --sweep data.batch=16/rank,64/rank,256/rank "
        "--sweep parallel.compile=true,false --sweep parallel.recompute=none,full": "36 measurements, some compiled",
    },
    "docs/coming-from/torchtitan-mae.md": {
        "torchrun --nproc-per-node 4 -m vitrail train mae.yaml": "a network of 2 billion parameters",
    },
    "docs/coming-from/vit-fsdp-study.md": {
        "vitrail launch slurm study.yaml --machine frontier --nodes 4 --time 25m --account abc123 --submit": SLURM,
    },
}
# Pages that take a few seconds of the processor; all others are run by make test-slow.
QUICK = [f"docs/{name}.md" for name in ("augment", "formats", "install", "launch", "logging", "models", "plugins")]
QUICK += ["docs/resume.md", "docs/tutorials/first-run.md", "docs/weights.md"]


def own_recipe(path: Path, **changes: Any) -> Path:
    """A recipe of the reader's own, for a volume of theirs."""
    volume = path.parent / "my/volume.zarr"
    if not volume.exists():
        write_em(volume, shape=(32, 36, 160))
    changes = {"run__name": path.stem, "data__batch": "8/rank"} | changes
    return write_recipe(path, tiny_recipe(Path("my/volume.zarr"), Path("runs", path.stem), **changes))


def write_scan(path: Path) -> None:
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(0).integers(-1000, 1000, (32, 32, 16), np.int16)
    nibabel.save(nibabel.Nifti1Image(values, np.diag([0.7, 0.7, 2.0, 1.0])), path)


def write_lab(folder: Path) -> None:
    """The files that a page shows, under the names that it gives them."""
    folder.mkdir()
    for block in blocks_of("docs/plugins.md"):
        if registered := re.search(r'kinds\.register\("\w+", "(\w+)"', block.text):
            (folder / f"{registered[1]}.py").write_text(block.text)


def write_sections(place: Path, shape: tuple[int, ...]) -> None:
    """A stack as ISBI-2012 has it, with labels of 0 and 255 beside."""
    import tifffile

    place.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    for name, array in (("image", values), ("label", np.where(values > 99, np.uint8(255), np.uint8(0)))):
        tifffile.imwrite(place / f"{name}.tif", array, photometric="minisblack")


def write_scan_with_labels(place: Path) -> None:
    import h5py
    import tifffile

    values = np.random.default_rng(0).integers(0, 255, (16, 32, 32), np.uint8)
    with h5py.File(place / "scan.h5", "w") as file:
        file["raw"] = values
    tifffile.imwrite(place / "drawn.tif", values // 128, photometric="minisblack")


def write_stack(place: Path) -> None:
    """A stack of sections with labels of 0 and 255, and a recipe for it."""
    write_sections(place, (4, 64, 64))
    entry = [{"path": "image.tif", "labels": "label.tif"}]
    both = {"data__train": entry, "data__valid": [entry[0] | {"slices": "z", "label_map": {"255": 1}}]}
    objective = {"kind": "segment", "names": ["membrane", "inside"]}
    own_recipe(place / "isbi.yaml", model=MODELS["unetr"][0], objective=objective, **both)


def seed(place: Path, name: str, target: str, **changes: str) -> None:
    """A file of another system, with some of its words changed."""
    text = (ROOT / "tests/golden/seeds" / name).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (place / target).parent.mkdir(parents=True, exist_ok=True)
    (place / target).write_text(text)


def latent_seed(place: Path, name: str) -> None:
    """A file of TorchDiTan, and latents as it has them."""
    from safetensors.numpy import save_file

    draws = np.random.default_rng(0)
    latents = {"latents": draws.integers(0, 255, (16, 16, 32, 32), np.uint8), "labels": np.arange(16)}
    save_file(latents, place / "latents.safetensors")
    changes = {"/data/imagenet_ci8x8.safetensors": "latents.safetensors", "num_classes = 1000": "num_classes = 16"}
    seed(place, "torchditan/llama3_latent_diffusion.toml", f"train_configs/{name}.toml", **changes)


def ucf_seed(place: Path, target: str) -> None:
    """A file of UCF-VIT for a small network, and images in folders."""
    from PIL import Image

    for number in range(8):
        path = place / "UCF-VIT/images" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.random.default_rng(number).integers(0, 255, (256, 256, 3), np.uint8)
        Image.fromarray(values).save(path)
    small = {"/data/imagenet/train": "UCF-VIT/images", "embed_dim: 768": "embed_dim: 48", "depth: 12": "depth: 2"}
    seed(place, "ucf-vit/imagenet/mae/base_config.yaml", target, **small)


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    opened = Shell(tmp_path_factory.mktemp("p"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what is presupposed is made, once for all pages."""
    place = tmp_path_factory.mktemp("given") / "given"
    shutil.copytree(ROOT / "configs", place / "configs")
    return place


def give(name: str, shell: Shell, workshop: Path) -> None:
    """Make what a word of a page stands for, in the workshop."""
    if (workshop / name).exists():
        return
    how = GIVEN[name]
    if callable(how):
        how(workshop)
    else:
        for word in how:
            if word in GIVEN:
                give(word, shell, workshop)
            else:
                failed = shell.paste([(name, word)], workshop)
                assert failed is None, f"GIVEN[{name!r}]: `{word}` {failed[1]}"
    assert (workshop / name).exists(), name


def is_run(page: str, block: pasting.Block, command: str) -> bool:
    """Whether a command, or a block of Python, runs here."""
    told = NOT_RUN.get(page, {})
    return bare(command if block.language in SHELLS else block.text.partition("\n")[0]) not in told


def steps_of(page: str, folder: Path) -> list[tuple[str, str]]:
    """Where each command of a page stands, and the command; code of Python is written beside the folder."""
    steps = []
    for block in blocks_of(page):
        if block.language in SHELLS:
            for line, command in commands_of(block):
                if is_run(page, block, command):
                    steps.append((f"{page}, line {line}: {bare(command)}", command))
        elif block.language == "python" and is_run(page, block, block.text) and not is_signature(block):
            file = folder.parent / f"line_{block.line}.py"
            file.write_text(block.text)
            steps.append((f"{page}, line {block.line}: this block of Python", f"python {shlex.quote(str(file))}"))
    return steps


def page_params(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in names]


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page", page_params(pasting.pages()))
def test_what_a_page_says_works_when_it_is_pasted(page: str, shell: Shell, workshop: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    steps = steps_of(page, folder)
    if not steps:
        pytest.skip("nothing to run")
    shutil.copytree(ROOT / "configs", folder / "configs")
    for name in PRESUPPOSED.get(page, ()):
        give(name, shell, workshop)
        for path in (name, *BESIDE.get(name, ())):
            copy = shutil.copytree if (workshop / path).is_dir() else shutil.copyfile
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            if not (folder / path).exists():
                copy(workshop / path, folder / path)
    failed = shell.paste(steps, folder, SMALLER.get(page, ""))
    assert failed is None, (
        f"{failed[0]} {failed[1]}\nMend the page or the program; where the reader has something by then, name it in "
        "PRESUPPOSED of tests/system/test_pages.py, and where it cannot run here, in NOT_RUN with the reason"
    )


def test_the_first_command_that_fails_is_named_and_is_the_last(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    steps = [("one", "export WHERE=nowhere"), ("two", "vitrail train $WHERE.yaml | cat"), ("three", "touch three")]
    failed = shell.paste(steps, folder)
    assert failed is not None
    assert failed[0] == "two"
    assert failed[1].startswith("ended with 2:\nerror: nowhere.yaml")
    assert not list(folder.iterdir())


# ---------------------------------------------------------------- without running


def test_commands_are_read_as_the_shell_reads_them() -> None:
    text = "# words\na \\\n  b  # why\ncat <<'END'\nc d\n\nEND\nfor x in 1 2; do\n  e\ndone\n"
    block = pasting.Block("page", 10, "sh", text)
    assert commands_of(block) == [
        (11, "a \\\n  b  # why"),
        (13, "cat <<'END'\nc d\n\nEND"),
        (17, "for x in 1 2; do\n  e\ndone"),
    ]
    assert bare("a \\\n  b  # why") == "a b"
    console = pasting.Block("page", 1, "console", "$ a\nshown\n$ b\n")
    assert commands_of(console) == [(1, "a"), (3, "b")]


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds that a page adds are gone after the test."""
    monkeypatch.setattr(kinds, "_registered", {slot: {} for slot in kinds.BUILT_IN})
    monkeypatch.setattr(plugins, "_named", {})


def bases() -> Iterator[dict[str, Any]]:
    """Whole recipes, of which what a page shows may be a part."""
    whole = tiny_recipe(Path("em.zarr"), Path("runs/my-run"))
    del whole["log"]["tensorboard"]  # what pages say of `log.to` would be said twice
    yield whole
    for model, objective in MODELS.values():
        kind = {"kind": objective} if isinstance(objective, str) else objective
        yield whole | {"model": model, "objective": kind}


def is_part_of_a_recipe(part: Any, overrides: Sequence[str] = ()) -> str:
    """What is wrong with a part of a recipe, if it fits none; else nothing."""
    wrong = []
    for base in bases():
        try:
            load_recipe(yaml.merge(base, part, set()), overrides)
            return ""
        except UserError as error:
            wrong.append(
                [line for line in str(error).splitlines() if " does not exist; check the spelling" not in line]
            )
    return "\n".join(min(wrong, key=len))


def alternatives(text: str) -> list[str]:
    """The entries of a block one by one where it gives the same key more than once, to choose from."""
    keys = re.findall(r"^(\w+):", text, re.MULTILINE)
    if len(keys) == len(set(keys)):
        return [text]
    return [entry for entry in re.split(r"^(?=\w+:)", text, flags=re.MULTILINE) if re.match(r"\w+:", entry)]


@pytest.mark.parametrize("page", pasting.pages())
def test_recipes_of_a_page_are_right(
    page: str, forgotten: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks_of(page)
    recipes = [block for block in found if block.language == "yaml"]
    for name in PRESUPPOSED.get(page, ()):
        how = GIVEN[name]
        if callable(how) and any(name in block.text for block in recipes):
            how(tmp_path)
    for block in found:
        if recipes and block.language == "python" and "kinds.register(" in block.text:
            exec(compile(block.text, page, "exec"), {"__name__": "shown"})
    for block in recipes:
        for text in alternatives(block.text):
            where = f"{page}, line {block.line}"
            tree = yaml.parse(text, where)
            if "about" in tree:  # of a machine
                check_machine(tree, where)
            elif {"run", "model", "data"} <= set(tree):
                load_recipe(tree)
            else:
                wrong = is_part_of_a_recipe(tree)
                assert not wrong, f"{where}: {wrong}"


def inline(page: str) -> list[str]:
    """Whole commands between backticks; a verb that is only spoken of is asked for its help."""
    text = (ROOT / page).read_text(encoding="utf-8")
    told = [code for code in re.findall(r"`(vitrail [^`\n]+)`", text) if "VERB" not in code]
    alone = re.compile(r"vitrail (data )?[a-z]+")
    told = [code.replace("[key=value ...]", "log.every=1").replace(r"torchrun\|slurm\|mpi", "slurm") for code in told]
    return [f"{code} --help" if alone.fullmatch(code) else code for code in told]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", *pasting.pages()])
def test_commands_of_a_page_exist(page: str, monkeypatch: pytest.MonkeyPatch, forgotten: None) -> None:
    """Verbs and options, and keys where they cannot be tried by running."""
    for block in blocks_of(page):
        if block.language not in SHELLS:
            continue
        for line, command in commands_of(block):
            given = parsed(bare(command), monkeypatch)
            if given.get("overrides") and not is_run(page, block, command):
                wrong = is_part_of_a_recipe({}, given["overrides"])
                assert not wrong, f"{page}, line {line}: {wrong}"
    for command in inline(page):
        parsed(command, monkeypatch)


def test_tables_name_nothing_that_is_no_more() -> None:
    for table in (PRESUPPOSED, NOT_RUN, SMALLER, dict.fromkeys(QUICK)):
        assert not set(table) - set(pasting.pages())
    for page, told in NOT_RUN.items():
        there = {bare(command) for block in blocks_of(page) for _, command in commands_of(block)}
        there |= {bare(block.text.partition("\n")[0]) for block in blocks_of(page)}
        assert not set(told) - there, f"NOT_RUN names what {page} does not say"
    for page, names in PRESUPPOSED.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        of_recipes = "data/"  # configs/ name these
        assert not [name for name in names if name not in text and not name.startswith(of_recipes)], page


def test_blocks_of_pages_say_what_they_are() -> None:
    for page in pasting.pages():
        for block in blocks_of(page):
            words = re.match(r"(\$ )?(vitrail|torchrun|python|pip|import)\b", block.text)
            assert block.language or not words, f"{page}, line {block.line}: begin this block with ```sh or ```python"
            if block.language == "console":
                assert "$ " in block.text, f"{page}, line {block.line}: write `$ ` before the commands of this block"


def test_examples_of_ucf_vit_are_all_there() -> None:
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in ("VIT", "MAE", "UNETR", "SAP", "DiffusionVIT"):
        assert "```python\n" in text.split(f"### {name}\n", 1)[1].split("\n## ", 1)[0], name
