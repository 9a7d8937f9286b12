"""Configurations, tables, names and patterns that strangers wrote: refused or read, in no time and little memory.

A regular expression holds up every thread of its process, so what may take for ever is tried in a child, to which the
system gives a number of seconds of the processor that is far more than it needs, and far less than for ever.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from support import ROOT

from vitrail import foreign
from vitrail.convert import convert
from vitrail.convert.engine import UNKNOWN
from vitrail.credentials import strip
from vitrail.data.files.patterns import STAR, find_matches, match_stars
from vitrail.data.files.places import Remote
from vitrail.data.latents.store import check_facts
from vitrail.data.sources import zarr as zarr_sources
from vitrail.data.sources.arrays import NumpyConfig
from vitrail.data.sources.classes import classes_by_pattern, classes_by_table
from vitrail.data.sources.folders import read_layout
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.errors import BadData, UserError
from vitrail.infer.collection import Generated
from vitrail.infer.folder import read_facts
from vitrail.infer.sample import check_scales
from vitrail.recipe import yaml
from vitrail.training.failures import STOP_SIGNALS
from vitrail.training.optimizers.adam import AdamWConfig
from vitrail.training.optimizers.optimizer import GroupRule, make_groups

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


# ---------------------------------------------------------------- regular expressions, and stars

FOREVER = r"(?P<class>(a|aa)+)\.png"


def test_patterns_that_take_for_ever_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "SECONDS", 2)
    names = ["a" * 200 + "!"]
    with pytest.raises(UserError, match=r"class_pattern = .* takes for ever.* on some of 1 names"):
        classes_by_pattern(FOREVER, names, "images")


def test_rules_of_groups_that_take_for_ever_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign, "SECONDS", 2)
    with pytest.raises(UserError, match=r"optimizer\.groups: match .* takes for ever"):
        make_groups(None, AdamWConfig(groups=(GroupRule(match=r"(\w+)+!"),)), ["weight" * 10])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "pattern", ["(?P<class>a", "(?P<class>a{99999999999})", "(?P<class>" + "(" * 5000 + ")" * 5001]
)
def test_patterns_that_are_none(pattern: str) -> None:
    with pytest.raises(UserError, match="is no regular expression"):
        classes_by_pattern(pattern, ["a"], "images")
    with pytest.raises(ValueError, match="is not a regular expression"):
        GroupRule(match=pattern)


def test_patterns_find_what_they_found() -> None:
    names = ["cat.1.png", "dog/2.png", "\udcff.png", "\u2028\n"]
    assert foreign.search_all("(cat|dog)", names, where="it") == ["cat", "dog", None, None]
    assert foreign.search_all("(?P<class>c)?.", names, "class", where="it") == ["c", None, None, None]
    assert foreign.search_all("$", ["a"], where="it") == [""]


def test_patterns_are_searched_here_where_no_process_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_words: Any, **_options: Any) -> Any:
        raise PermissionError("no")

    monkeypatch.setattr(foreign.subprocess, "run", refuse)
    assert foreign.search_all("(cat|dog)", ["a cat", "b"], where="it") == ["cat", None]


SEARCH_STOPPED = """
import os, signal, sys
from vitrail import foreign
os.setsid()
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
foreign._SEARCH = sys.argv[1] + foreign._SEARCH
print(foreign.search_all("(cat|dog)", ["a cat", "b"], where="it"), stopped)
"""
STOP_ONCE = """
import os, signal
try:
    os.mkdir({!r})
    os.killpg(os.getpgrp(), signal.SIGTERM)
except FileExistsError:
    pass
"""


def test_a_search_survives_a_stop_of_the_job(tmp_path: Path) -> None:
    """The system tells every process of a job to stop; a search that has ended so says nothing of its pattern."""
    assert set(foreign._STOPS) == set(STOP_SIGNALS)
    told = in_child(SEARCH_STOPPED, STOP_ONCE.format(str(tmp_path / "once")))
    assert told.strip() == "['cat', None] [1]"


LETTERS = st.text("ab.", max_size=9)


@given(wanted=st.text("ab.*", max_size=9), name=LETTERS)
@settings(deadline=None, max_examples=500)
def test_stars_stand_for_what_a_regular_expression_says(wanted: str, name: str) -> None:
    told = re.fullmatch(STAR.sub("(.*)", re.escape(wanted).replace(r"\*", "*")), name)
    assert match_stars(wanted, name) == (told.groups() if told else None)


def test_many_stars_cost_no_time(tmp_path: Path) -> None:
    picture(tmp_path / ("a" * 240 + ".png"))
    program = """
import sys
from vitrail.data.files.patterns import find_matches
from vitrail.data.sources import guess_kind
from vitrail.errors import UserError
many = sys.argv[1] + "/" + "*a" * 60 + "b.png"
for call, path in ((find_matches, many), (guess_kind, many), (guess_kind, "{" * 1_000_000)):
    try:
        print(call(path))
    except (OSError, UserError):
        print("refused")
"""
    assert in_child(program, str(tmp_path)).split() == ["refused"] * 3


def test_folders_that_lie_too_deep_for_stars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(1200):  # far more than Python calls within calls
        os.mkdir("d")
        os.chdir("d")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("x.png")
    monkeypatch.chdir(tmp_path)
    try:
        with pytest.raises(UserError, match="more than 64 deep"):
            find_matches(f"{tmp_path}/**/x.png")
        with pytest.raises(UserError, match="more than 64 names from its first star on"):
            find_matches(f"{tmp_path}/{'*/' * 1200}x.png")
    finally:  # pytest cannot remove as deep a folder
        subprocess.run(["rm", "-r", "d"], cwd=tmp_path, check=True)


def test_a_link_to_itself_among_images_is_told_by_its_name(tmp_path: Path) -> None:
    picture(tmp_path / "x.png")
    (tmp_path / "self").symlink_to("self")
    assert len(ImageFolderConfig(path=str(tmp_path)).open().items) == 1
    (tmp_path / "a.png").symlink_to("a.png")
    source = ImageFolderConfig(path=str(tmp_path)).open()
    with pytest.raises(BadData, match=r"a\.png cannot be opened"):
        list(source.items)


def test_a_link_to_what_cannot_be_looked_at_is_not_left_out(tmp_path: Path) -> None:
    """It may be the folder of a class, without which the others would have other numbers."""
    picture(tmp_path / "dog" / "x.png")
    (tmp_path / "cat").symlink_to("/" + "x" * 300)
    with pytest.raises(UserError, match="cannot be opened"):
        ImageFolderConfig(path=str(tmp_path)).open()


# ---------------------------------------------------------------- tables, and lists of channels and classes


def test_a_long_table_of_other_images_takes_no_memory(tmp_path: Path) -> None:
    rows = "".join(f"elsewhere/{number:06d}.png,class {number}\n" for number in range(100_000))
    table = write(tmp_path, "t.csv", f"image,class\n{rows}a.png,cat\n")
    tracemalloc.start()
    try:
        assert classes_by_table(str(table), None, ["a.png"], "images") == ["cat"]
        assert tracemalloc.get_traced_memory()[1] < MEBI
    finally:
        tracemalloc.stop()


def test_a_table_with_two_classes_of_an_image_by_its_whole_path_says_so(tmp_path: Path) -> None:
    table = write(tmp_path, "t.csv", "image,class\n/d/x.png,cat\n/d/x.png,dog\n")
    with pytest.raises(UserError, match=r"tells no single class of 1 of the 1 images of images, such as 'x\.png'"):
        classes_by_table(str(table), None, ["x.png"], "images")
    with pytest.raises(UserError, match=r"tells no class of 1 of the 1 images of images, such as 'y\.png'"):
        classes_by_table(str(table), None, ["y.png"], "images")


def test_a_table_of_very_many_columns_is_told_of_in_a_few_words(tmp_path: Path) -> None:
    table = write(tmp_path, "t.csv", "," * 500_000 + "\na.png,x\n")
    with pytest.raises(UserError, match="and 499961 more") as caught:
        classes_by_table(str(table), None, ["a.png"], "images")
    assert len(str(caught.value)) < 1000


def test_numbers_of_channels_with_thousands_of_digits_are_none(tmp_path: Path) -> None:
    picture(tmp_path / "imagesTr" / "case_0000.png")
    write(tmp_path, "dataset.json", json.dumps({"channel_names": {"9" * 5000: "CT"}}))
    layout = read_layout(str(tmp_path), (".png",))
    assert layout.channels is None


WRONG_FACTS: list[tuple[str, Any]] = [
    ("dtype", "x"), ("dtype", 5), ("dtype", "(1,i4"), ("dtype", "object"), ("dtype", "complex64"), ("axes", 5),
    ("axes", [1, 2]), ("axes", {"y": 1}), ("spacing", "ab"), ("spacing", ["a", "b"]), ("spacing", [10**400, 1]),
    ("unit", 5), ("variables", "red"), ("codec", 5), ("codec.range", {"range": 5}), ("codec.range", {"range": [1]}),
    ("codec.range", {"range": [3, 3]}), ("codec.data", {"data": 5}), ("codec.data.dtype", {"data": {"dtype": "x"}}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG_FACTS)
def test_facts_that_no_data_tell_of_themselves(tmp_path: Path, key: str, value: Any) -> None:
    """In data.json of somebody else's run, of which samples are made, and in an index of latents."""
    facts = {"kind": "latents", "axes": ["y", "x"], "dtype": "float32", "spacing": [1.0, 0.5], "unit": None}
    facts |= {"variables": ["a"], "codec": {"kind": "kl", "range": [0.0, 255.0], "data": {"dtype": "uint8"}}}
    write(tmp_path, "data.json", json.dumps(facts))
    assert read_facts(tmp_path) == facts
    write(tmp_path, "data.json", json.dumps(facts | {key.partition(".")[0]: value}))
    with pytest.raises(UserError, match=rf"data\.json: `{key}` is nothing that data tell"):
        read_facts(tmp_path)
    inner, whole = value if isinstance(value, dict) else {}, {"codec": {}, "data": None}
    check_facts({"codec": facts["codec"], "data": {"dtype": "uint8"}}, "index.json")
    if key.startswith("codec."):
        with pytest.raises(BadData, match=f"`{key}` is nothing that an encoder tells"):
            check_facts(whole | {"codec": inner} | inner, "index.json")


def test_statistics_of_latents_of_hundreds_of_digits_are_refused() -> None:
    for mean in (10**400, float("nan"), True, "x"):
        with pytest.raises(BadData, match=r"`mean` is .* expected finite numbers"):
            check_facts({"mean": [mean], "std": [1.0]}, "index.json")


@pytest.mark.parametrize("dtype", ["(1,i4", "1000000000i4", "x", "(" * 300])
def test_types_of_raw_files_that_are_none(tmp_path: Path, dtype: str) -> None:
    (tmp_path / "a.raw").write_bytes(bytes(64))
    with pytest.raises(UserError, match="is no type of numbers"):
        NumpyConfig(path=str(tmp_path / "a.raw"), shape=[8, 8], dtype=dtype).open()


def test_a_server_that_has_every_level_of_a_volume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zarr_sources, "attributes_of", lambda place: ("array", {}))
    monkeypatch.setattr(Remote, "iterdir", lambda self: [])
    with pytest.raises(BadData, match="more than 64 levels"):
        zarr_sources._find_levels(Remote("http://host/volume.zarr"), {})


# ---------------------------------------------------------------- samples by several guidances


@pytest.mark.parametrize("name", ["guidance-1", "grid.png"])
@pytest.mark.parametrize("what", ["link", "pipe", "other"])
def test_what_is_no_folder_of_a_guidance_is_not_written_into(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    out = tmp_path / "out"
    (out / "guidance-2").mkdir(parents=True)
    check_scales(out)
    if what == "link":
        (out / name).symlink_to(tmp_path / "elsewhere")
    elif what == "pipe":
        os.mkfifo(out / name)
    elif name == "grid.png":
        (out / name).mkdir()
    else:
        (out / name).touch()
    with pytest.raises(UserError, match=rf"{name} is a"):
        check_scales(out)
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("wrong", [{"dtype": "(1,i4"}, {"dtype": 5}, {"axes": 5}, {"files": 5}, {"files": [5]}])
def test_a_manifest_of_samples_that_says_what_none_says(tmp_path: Path, wrong: dict[str, Any]) -> None:
    facts = {"files": [{"path": "samples/0.npy"}], "dtype": "float32", "axes": ["y", "x"], "variables": ["a"]}
    facts |= {"spacing": [1.0, 1.0], "unit": None, "format": "npy", "version": 2} | wrong
    write(tmp_path, "manifest.json", json.dumps(facts))
    with pytest.raises(UserError, match=r"its manifest\.json cannot be read"):
        Generated(tmp_path, seed=0)
