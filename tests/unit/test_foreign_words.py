"""Configurations, tables, names and patterns that strangers wrote: refused or read, in no time and little memory.

A regular expression holds up every thread of its process, so what may take for ever is tried in a child, to which the
system gives a number of seconds of the processor that is far more than it needs, and far less than for ever.
"""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support import ROOT

from vitrail.convert import convert
from vitrail.convert.engine import UNKNOWN
from vitrail.credentials import strip
from vitrail.errors import UserError
from vitrail.recipe import yaml

SECONDS = 240  # of the processor, for a child
MEBI = 1 << 20
UCF = ROOT / "tests/golden/seeds/ucf-vit/basic_ct/unetr/base_config.yaml"


def in_child(program: str, *words: str) -> str:
    """What a program prints, which may take so much of the processor and no more."""

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, preexec_fn=bound)
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def picture(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(place)


# ---------------------------------------------------------------- configurations of other systems

CONVERT = """
import sys
from vitrail.convert import convert
from vitrail.errors import UserError
for path in sys.argv[1:]:
    script = path if path.endswith("words.sh") else None
    try:
        print("recipe of", convert(sys.argv[1] if script else path, script=script).system)
    except UserError as error:
        print("refused:", str(error).splitlines()[-1])
"""


def test_configurations_that_would_be_read_for_ever(tmp_path: Path) -> None:
    """Empty lines, marks without an end, calls without an end, and keys with half a million parts."""
    call, empty = "main_training.py --bs 1\n", "\n" * (MEBI - 100)
    files = [
        write(tmp_path, "plain.toml", '[model]\nname="llama3_diffusion"\n[dataset]\ndataset_name="cifar10"\n'),
        write(tmp_path, "empty.sh", call + empty),
        write(tmp_path, "empty.toml", empty + "x=1"),
        write(tmp_path, "words.sh", empty + "--training.steps=5"),
        write(tmp_path, "marks.sh", f'#SBATCH -a{"=" * (MEBI - 200)}" x\n{call}'),
        write(tmp_path, "calls.sh", "main_training.py " * (MEBI // 18)),
        write(tmp_path, "key.toml", ".".join("a" * (MEBI // 3)) + "=1"),
        write(tmp_path, "table.toml", f"['x'.{'.'.join('a' * 3000)}]\nx=1"),
        write(tmp_path, "quoted.toml", 'x={q="""a"""",' + '"a b" . ' * 3000 + "a=1}"),
    ]
    told = in_child(CONVERT, *map(str, files)).splitlines()
    assert told[:2] == ["recipe of TorchDiTan", "recipe of the ViT-FSDP study"]
    assert "data.train: missing" in told[2]
    assert told[3:5] == ["recipe of TorchDiTan", "recipe of the ViT-FSDP study"]
    assert "calls main_training.py more than 50 times" in told[5]
    assert all("a key in it has more than 32 parts" in line for line in told[6:])
    assert len(told) == len(files)


def test_toml_is_bounded_as_yaml_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a number in it has more than 100 digits"):
        convert(write(tmp_path, "hex.toml", f"x = 0x{'f' * 5000}"))
    deep = "x = " + "{a.b.c = " * 30 + "1" + "}" * 30
    with pytest.raises(UserError, match="nested more than 64 deep"):
        convert(write(tmp_path, "deep.toml", deep))
    fine = "# a . b . c ." + " .x" * 50 + '\n[job]\ndescription = "' + ".x" * 50 + "\"\n[model]\nname = 'llama3'\n"
    with pytest.raises(UserError, match="data"):  # it has none, and is read to its end
        convert(write(tmp_path, "fine.toml", fine))


def test_more_classes_of_voxels_than_a_recipe_has_lines_for(tmp_path: Path) -> None:
    text = UCF.read_text()
    assert convert(write(tmp_path, "few.yaml", text), task="unetr").tree["data"]["train"][0]["label_map"]
    many = re.sub(r"num_classes: *\S+", f"num_classes: {10**9}", text)
    assert many != text
    found = convert(write(tmp_path, "many.yaml", many), task="unetr")
    assert "label_map" not in found.tree["data"]["train"][0]
    assert any("more than 1000 classes" in row.why for row in found.rows if row.status == UNKNOWN)


def test_a_converted_recipe_holds_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITRAIL_CREDENTIALS", raising=False)
    text = UCF.read_text() + '\nodd: "s3://me:hidden-2@host/y?X-Amz-Signature=hidden-3"\n'
    tree: Any = yaml.parse(text)
    name = next(iter(tree["data"]["dict_root_dirs"]))
    tree["data"]["dict_root_dirs"][name] = "https://me:hidden-1@host/x"
    found = convert(write(tmp_path, "a.yaml", yaml.dump(tree)), task="unetr")
    assert found.tree["data"]["train"][0]["path"] == "https://host/x"
    everything = json.dumps([found.tree, found.text, [list(vars(row).values()) for row in found.rows]])
    assert "hidden" not in everything
    assert "set VITRAIL_CREDENTIALS" in found.text
    assert "VITRAIL_CREDENTIALS" not in convert(write(tmp_path, "b.yaml", UCF.read_text()), task="unetr").text


def test_a_long_word_before_the_mark_of_a_url_costs_no_time() -> None:
    program = "from vitrail.credentials import strip; print(len(strip('a' * 5_000_000 + '://x')))"
    assert in_child(program).strip() == "5000004"
    assert strip("x" * 50 + "http://me:hidden@host/y") == "x" * 50 + "http://host/y"
