"""Samples as files: every format gives back what was written, the plan of a call, and the page of pictures."""

import json
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from vitrail.contents import check_contents
from vitrail.data.batch import Statistics
from vitrail.data.normalize import Values
from vitrail.data.sources.tiff import TiffConfig
from vitrail.data.sources.zarr import OmeZarrConfig
from vitrail.errors import UserError
from vitrail.infer.collection import Generated
from vitrail.infer.folder import (
    FORMATS,
    MANIFEST,
    SETTINGS,
    Kind,
    Plan,
    as_stored,
    choose_classes,
    choose_format,
    close_folder,
    decoded_kind,
    folder_names,
    kind_of,
    of_samples,
    open_folder,
    read_facts,
    read_sample,
    read_settings,
    stored_type,
    sweep,
    write_sample,
)
from vitrail.infer.pages import draw_grid, draw_samples
from vitrail.infer.sample import Made, Work
from vitrail.recipe.normalize import ByVariable, Logarithm, Standard

CASES = [
    ("uint8", "yx", 1, None),
    ("uint8", "yx", 3, None),
    ("uint16", "yx", 1, None),
    ("float32", "yx", 3, None),
    ("float32", "yx", 5, "nanometer"),
    ("uint8", "zyx", 1, "nanometer"),
    ("float32", "zyx", 1, None),
    ("int16", "zyx", 3, "millimeter"),
]


def make(dtype: str, axes: str, channels: int, unit: str | None) -> tuple[np.ndarray, Kind]:
    values = np.random.default_rng(1).normal(100, 90, (channels, *(5, 6, 7)[-len(axes) :]))
    names = tuple(f"v{c}" for c in range(channels))
    stored = stored_type(dtype)
    kind = Kind(stored, tuple(axes), names, (2.0, 3.0, 4.0)[-len(axes) :], unit, "auto")
    return as_stored(values, stored), kind


def with_format(kind: Kind, wanted: str) -> Kind:
    chosen = choose_format(wanted, kind.dtype, kind.axes, len(kind.variables))
    return Kind(kind.dtype, kind.axes, kind.variables, kind.spacing, kind.unit, chosen)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c)))
def test_what_is_written_is_read_back_and_the_same_values_give_the_same_bytes(case, tmp_path):
    sample, plain = make(*case)
    for wanted in FORMATS:
        try:
            kind = with_format(plain, wanted)
        except UserError:
            assert wanted in ("png", "ome-zarr")
            continue
        path, again = (
            write_sample(tmp_path / f / f"0{kind.suffix}", sample, kind) for f in (wanted, f"{wanted}-again")
        )
        found = read_sample(path, kind)
        assert found.dtype == sample.dtype
        np.testing.assert_array_equal(found, sample)
        if path.is_file():
            assert path.read_bytes() == again.read_bytes()
        if kind.format in ("tiff", "ome-zarr"):
            source = {"tiff": TiffConfig, "ome-zarr": OmeZarrConfig}[kind.format](path=str(path)).open()
            window = tuple(slice(0, size) for size in source.items[0].shape)
            np.testing.assert_array_equal(source.read(0, window), sample)
            if kind.unit is not None:
                assert (source.items[0].spacing, source.items[0].unit) == (kind.spacing, kind.unit)


def test_tiff_keeps_axes_of_length_1_and_tells_units_as_ome_does(tmp_path):
    for shape in ((1, 1, 8, 8), (2, 1, 1, 8), (3, 1, 1), (1, 1, 1), (3, 4, 1)):
        names = tuple(f"v{c}" for c in range(shape[0]))
        axes = "zyx"[-len(shape) + 1 :]
        for unit, symbol in (("nanometer", "nm"), ("micrometer", "µm"), ("angstrom", "Å"), ("parsec", None)):
            kind = Kind(np.dtype("int16"), tuple(axes), names, (2.0,) * len(axes), unit, "tiff")
            sample = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
            path = write_sample(tmp_path / f"{len(list(tmp_path.iterdir()))}.tif", sample, kind)
            found = read_sample(path, kind)
            assert found.shape == shape
            np.testing.assert_array_equal(found, sample)
            with tifffile.TiffFile(path) as file:
                assert (f'PhysicalSizeXUnit="{symbol}"' in file.ome_metadata) == (symbol is not None)
                assert ("PhysicalSizeX" in file.ome_metadata) == (symbol is not None)


def test_the_usual_formats():
    usual = [with_format(make(*case)[1], "auto").format for case in CASES]
    assert usual == ["png", "png", "png", "tiff", "tiff", "ome-zarr", "ome-zarr", "tiff"]


@pytest.mark.parametrize(
    ("wanted", "case", "word"),
    [
        ("png", ("float32", "yx", 1, None), "PNG"),
        ("png", ("uint8", "zyx", 1, None), "PNG"),
        ("png", ("uint8", "yx", 2, None), "PNG"),
        ("ome-zarr", ("uint8", "yx", 1, None), "OME-Zarr"),
        ("ome-zarr", ("uint8", "zyx", 2, None), "OME-Zarr"),
        ("jpeg", ("uint8", "yx", 1, None), "'jpeg' is not known"),
    ],
)
def test_a_format_that_cannot_hold_the_samples_is_refused(wanted, case, word):
    with pytest.raises(UserError, match=rf"^format: .*{word}.*choose"):
        with_format(make(*case)[1], wanted)


def test_whole_numbers_are_rounded_and_clipped_and_floats_stay():
    values = np.array([[-3.0, 0.4, 0.6, 254.6, 300.0]])
    assert as_stored(values, np.dtype("uint8")).tolist() == [[0, 0, 1, 255, 255]]
    assert as_stored(values, np.dtype("int8")).tolist() == [[-3, 0, 1, 127, 127]]
    assert as_stored(np.array([1e12, -1e12]), stored_type("int64")).tolist() == [2**31 - 1, -(2**31)]
    floats = as_stored(values, stored_type("float64"))
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, values.astype(np.float32))
    for dtype in ("uint8", "float32"):
        with pytest.raises(UserError, match="not finite"):
            as_stored(np.array([np.nan]), np.dtype(dtype))


def test_what_samples_are_follows_from_what_was_kept_of_the_data(tmp_path):
    assert read_facts(tmp_path) == {}
    assert kind_of({}, 2, ["a"], "auto").describe()["dtype"] == "float32"
    facts = {"dtype": "uint8", "axes": ["z", "y", "x"], "spacing": [4.0, 8.0, 8.0], "unit": "nanometer"}
    (tmp_path / "data.json").write_text(json.dumps(facts))
    kind = kind_of(read_facts(tmp_path), 3, ["em"], "auto")
    assert (kind.spacing, kind.unit, kind.suffix) == ((4.0, 8.0, 8.0), "nanometer", ".ome.zarr")
    flat = kind_of(facts, 2, ["em"], "auto")  # of which it is not known what the axes are
    assert (flat.axes, flat.spacing, flat.unit, flat.format) == (("y", "x"), (1.0, 1.0), None, "png")
    entry = OmeZarrConfig(path="em.zarr", spacing=[4.0, 16.0, 12.0], slices="y")
    across = kind_of(of_samples(facts, entry), 2, ["em"], "auto")
    assert (across.axes, across.spacing, across.unit) == (("z", "x"), (4.0, 12.0), "nanometer")
    assert of_samples(facts, OmeZarrConfig(path="em.zarr")) == facts
    decoded = decoded_kind({"dtype": "float32", "codec": {"range": [0, 255]}}, 2, 3, "auto")
    assert (decoded.dtype, decoded.variables, decoded.format) == (np.uint8, ("red", "green", "blue"), "png")
    assert decoded_kind({"codec": None}, 2, 2, "auto").describe()["variables"] == ["channel 0", "channel 1"]


# ---------------------------------------------------------------- plans and folders


def test_classes_take_turns_and_groups_are_fixed(tmp_path):
    plan = Plan(7, 3, (2, 0), ("a", "b", "c"), ".png")
    assert [plan.label(c) for c in range(4)] == [2, 0, 2, 0]
    assert [plan.file(c) for c in range(3)] == [f"samples/{name}.png" for name in ("c/00000", "a/00000", "c/00001")]
    assert [list(plan.counters(group)) for group in range(plan.groups)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert plan.missing(tmp_path, {}) == [0, 1, 2]
    for counter in (0, 1, 2, 3, 6):  # one of group 1; 7 and 8 were not asked for
        (tmp_path / plan.file(counter)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / plan.file(counter)).touch()
    assert plan.missing(tmp_path, {}) == [1]
    assert plan.missing(tmp_path, {"truth": ".tif"}) == [0, 1, 2]
    assert Plan(2, 1, (), (), ".npy").file(1) == "samples/00001.npy"
    assert Plan(2, 1, (), (), ".npy").file(1, "truth", ".tif") == "truth/00001.tif"


def test_what_a_group_has_beyond_the_number_is_not_written(tmp_path):
    value, kind = make("uint8", "yx", 1, None)
    kind = with_format(kind, "auto")
    nothing = dict.fromkeys(("flow", "place", "settings", "decode", "beside"))
    nothing |= {"objective": SimpleNamespace(made=()), "values": Values("fit", ["a"], Statistics((0.0,), (1.0,)))}
    work = Work(**nothing, plan=Plan(6, 4, (), (), kind.suffix), kind=kind, seed=0, out=tmp_path)
    (tmp_path / "samples").mkdir()
    work.write(Made(range(4, 8), torch.from_numpy(np.stack([value] * 4)), None))
    assert sorted(path.stem for path in (tmp_path / "samples").iterdir()) == ["00004", "00005"]


def test_logarithms_are_taken_back(tmp_path):
    value, kind = make("float32", "yx", 1, None)
    ways = {"a": Logarithm(scale=2.0), "b": Standard()}
    values = Values(ByVariable(of=ways), ["b", "a"], Statistics((0.0, 0.0), (1.0, 1.0)))
    nothing = dict.fromkeys(("flow", "place", "settings", "decode", "beside"))
    nothing |= {"objective": SimpleNamespace(made=("a",)), "values": values}
    work = Work(**nothing, plan=Plan(1, 1, (), (), ".npy"), kind=with_format(kind, "npy"), seed=0, out=tmp_path)
    (tmp_path / "samples").mkdir()
    work.write(Made(range(1), values.change(torch.from_numpy(value)[None], ["a"]), None))
    (file,) = (tmp_path / "samples").iterdir()
    np.testing.assert_allclose(np.load(file).squeeze(), value.squeeze(), rtol=1e-4, atol=1e-4)


def test_classes_by_name_and_number():
    names = ("cat", "dog", "7")
    assert choose_classes(None, names) == choose_classes("all", names) == (0, 1, 2)
    assert choose_classes("dog, 0", names) == choose_classes(["dog", 0], names) == (1, 0)
    assert choose_classes("7", names) == (2,)  # a name before a number
    assert choose_classes(None, ()) == ()
    for given, words in (
        ("dgo", "'dgo' is not a class of this run; did you mean 'dog'"),
        ("3", "'3' is not a class of this run; there are cat, dog, 7 .or numbers from 0 to 2"),
        ("cat,0", "'cat' is given twice"),
        ("-1", "'-1' is not a class"),
    ):
        with pytest.raises(UserError, match=words):
            choose_classes(given, names)
    with pytest.raises(UserError, match="knows no classes"):
        choose_classes("cat", ())


def test_folders_of_classes_are_names_that_file_systems_take():
    names = ("cat", "a/b", "..", ".hidden", "Cat", "")
    assert folder_names(names) == ("cat", "a_b", "class 2", "hidden", "Cat 4", "class 5")
    assert folder_names(("a_b 2", "a/b", "a:b")) == ("a_b 2", "a_b", "a_b 3")


def test_a_folder_goes_on_with_the_same_settings_alone(tmp_path):
    out, settings = tmp_path / "out", {"seed": 1, "batch": 2, "interval": (0.0, 1.0)}

    def plan(number: int) -> Plan:
        return Plan(number, 2, (0,), ("a",), ".png")

    assert read_settings(out) is None
    out.mkdir()
    (out / ".settings.json.0123456789abcdef.part").touch()  # of a kill within the very first write
    assert open_folder(out, settings, plan(4)) == 4
    assert (out / SETTINGS).exists()
    assert read_settings(out)["batch"] == 2
    (out / "samples" / "a").mkdir(parents=True)
    (out / "samples" / "a" / ".00000.png.0123456789abcdef.part").touch()
    (out / "samples" / "a" / ".00001.ome.zarr.0123456789abcdef.part").mkdir()
    (out / "samples" / "a" / ".00001.ome.zarr.0123456789abcdef.part" / ".vitrail").write_text('{"vitrail": "draft"}')
    (out / "truth").mkdir()
    (out / "truth" / ".00001.png.0123456789abcdef.part").touch()
    for draft in out.rglob(".*.part"):
        os.utime(draft, (0, 0))
    young = out / "samples" / "a" / ".00003.png.0123456789abcdef.part"  # of another call, which is writing it
    young.touch()
    for counter in range(4):
        (out / plan(4).file(counter)).touch()
    close_folder(out, {"files": []})
    assert open_folder(out, settings, plan(4)) == 4
    sweep(out)
    assert list(out.rglob(".*.part")) == [young]
    assert (out / MANIFEST).exists()
    (out / plan(4).file(1)).unlink()
    assert open_folder(out, settings, plan(4)) == 4
    assert not (out / MANIFEST).exists()  # it told of a file that is made anew
    with pytest.raises(UserError, match=r"seed: 1 became 2.*choose another folder with --out"):
        open_folder(out, settings | {"seed": 2}, plan(4))
    assert open_folder(out, settings, plan(6)) == 6  # more of the same
    assert not (out / MANIFEST).exists()
    (out / plan(6).file(4)).touch()
    assert open_folder(out, settings, plan(2)) == 5  # less of it: what is there stays
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").touch()
    with pytest.raises(UserError, match="holds other files than samples"):
        open_folder(other, settings, plan(4))
    (out / SETTINGS).write_text("[]")
    with pytest.raises(UserError, match=r"holds a settings\.json that is not of samples; choose another folder"):
        open_folder(out, settings, plan(4))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be"):
        open_folder(tmp_path / "file" / "out", settings, plan(4))


# ---------------------------------------------------------------- samples of others


def grey(format: str, axes: str = "yx") -> Kind:
    return Kind(np.dtype("uint8"), tuple(axes), ("a",), (1.0,) * len(axes), None, format)


def test_a_sample_in_tiff_leads_to_no_other_file(tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "samples").mkdir()
    tifffile.imwrite(tmp_path / "private" / "s.ome.tif", np.full((8, 8), 99, np.uint8), ome=True)
    text = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:1"><Image ID="Image:0"><Pixels '
        'ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="8" SizeY="8" SizeC="1" SizeZ="1" SizeT="1"><TiffData '
        'IFD="0" PlaneCount="1"><UUID FileName="../private/s.ome.tif">urn:uuid:2</UUID></TiffData></Pixels></Image>'
        "</OME>"
    )
    place = tmp_path / "samples" / "0.tif"
    tifffile.imwrite(place, np.full((8, 8), 7, np.uint8), description=text, metadata=None)
    assert np.unique(read_sample(place, grey("tiff"))).tolist() == [7]


def test_a_sample_in_tiff_has_as_many_bytes_as_pixels(tmp_path):
    place = tmp_path / "0.tif"
    tifffile.imwrite(place, np.zeros((2048, 2048), np.uint8), compression="zlib")
    with pytest.raises(UserError, match=r"0\.tif does not hold its pixels as they are; make it again"):
        read_sample(place, grey("tiff"))
    tifffile.imwrite(place, np.zeros((64, 64), np.uint8))
    whole = place.read_bytes()
    for number in range(1, 8):
        place.write_bytes(whole[: len(whole) * number // 8])
        with pytest.raises(UserError, match=r"0\.tif "):
            read_sample(place, grey("tiff"))


def test_a_sample_in_png_starts_no_program(tmp_path, monkeypatch):
    """Pillow takes what it finds for what it is, and has Ghostscript draw PostScript."""
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "0.png").write_bytes(page)
    with pytest.raises(UserError, match=r"0\.png is not a PNG"):
        read_sample(tmp_path / "0.png", grey("png"))
    assert not (tmp_path / "started").exists()


def test_a_sample_in_npy_is_as_large_as_it_says(tmp_path):
    place = tmp_path / "0.npy"
    np.save(place, np.zeros((8, 8), np.uint8))
    whole = place.read_bytes()
    for content in (whole[:-1], whole + b"x", whole.replace(b"(8, 8), ", b"(8, 2**9)"), whole.replace(b"|u1", b"|i1")):
        place.write_bytes(content)
        with pytest.raises(UserError, match=r"0\.npy "):
            read_sample(place, grey("npy"))
    np.save(place, np.array([[{}]]), allow_pickle=True)
    with pytest.raises(UserError, match="Python objects"):
        read_sample(place, grey("npy"))
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(UserError, match="is a FIFO"):
        read_sample(place, grey("npy"))


@pytest.mark.parametrize("reader", [read_sample, lambda path, kind: draw_samples(path.parent, drawn(path), kind, {})])
def test_a_sample_in_ome_zarr_unpickles_nothing(tmp_path, reader):
    """Neither where it is measured nor where it is drawn."""

    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    place = write_sample(tmp_path / "0.ome.zarr", np.zeros((1, 2, 2, 2), np.uint8), grey("ome-zarr", "zyx"))
    reader(place, grey("ome-zarr", "zyx"))
    for file in place.rglob("*"):
        if file.is_file() and "s0" in file.parts:
            file.unlink()
    codecs = [{"id": "vlen-utf8"}, {"id": "pickle"}]
    facts = {"shape": [2, 2, 2], "chunks": [2, 2, 2], "dtype": "|O", "fill_value": "", "order": "C"}
    (place / "zarr.json").unlink()
    (place / ".zgroup").write_text('{"zarr_format": 2}')
    scales = [{"path": "s0", "coordinateTransformations": [{"type": "scale", "scale": [1, 1, 1]}]}]
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    attributes = {"multiscales": [{"version": "0.4", "axes": axes, "datasets": scales}]}
    (place / ".zattrs").write_text(json.dumps(attributes))
    (place / "s0" / ".zarray").write_text(
        json.dumps({"zarr_format": 2, "compressor": None, "filters": codecs, **facts})
    )
    (place / "s0" / "0.0.0").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(UserError, match=r"0\.ome\.zarr"):
        reader(place, grey("ome-zarr", "zyx"))
    assert not (tmp_path / "ran").exists()


def drawn(path: Path) -> dict[str, object]:
    settings = {"sampler": "euler", "steps": 1, "guidance": 1, "interval": [0, 1]}
    about = {"settings": settings, "seed": 0, "weights": "ema", "run": "r", "step": 1}
    return {"files": [{"path": path.name, "counter": 0}], **about}


# ---------------------------------------------------------------- the page


def test_a_manifest_names_files_of_its_own_folder_alone(tmp_path):
    """Others hand such folders over; a device would be read without an end, and a pipe keep one waiting."""
    plan, out = Plan(number=1, batch=1, classes=(), folders=(), suffix=".npy"), tmp_path / "out"
    open_folder(out, {"batch": 1}, plan)
    (out / "samples").mkdir()
    np.save(out / "samples" / "00000.npy", np.zeros((1, 4, 4), np.float32))
    (tmp_path / "mine.npy").write_bytes((out / "samples" / "00000.npy").read_bytes())
    facts = {"dtype": "float32", "axes": ["y", "x"], "variables": ["a"], "spacing": [1, 1], "unit": None}
    good = {**facts, "format": "npy", "files": [{"path": "samples/00000.npy"}]}
    close_folder(out, good)
    assert Generated(out, seed=0).size == 1
    assert open_folder(out, {"batch": 1}, plan) == 1
    os.mkfifo(tmp_path / "pipe")
    for name in ("/dev/zero", "../mine.npy", str(tmp_path / "mine.npy"), "../pipe", "", "a\0b"):
        (out / "manifest.json").write_text(json.dumps(good | {"sums": {name: 1}}))
        with pytest.raises(UserError, match="does not lie in this folder"):
            open_folder(out, {"batch": 1}, plan)
        (out / "manifest.json").write_text(json.dumps(good | {"files": [{"path": name}]}))
        with pytest.raises(UserError, match="does not lie in this folder"):
            Generated(out, seed=0)
    for odd in ({"sums": []}, {"sums": 3}):
        (out / "manifest.json").write_text(json.dumps(good | odd))
        with pytest.raises(UserError, match="checksums belong to no files"):
            Generated(out, seed=0)
    (out / "manifest.json").write_text(json.dumps(good | {"files": [{"path": "samples/pipe.npy"}]}))
    os.mkfifo(out / "samples" / "pipe.npy")
    with pytest.raises(UserError, match="is a FIFO, not a plain file"):
        Generated(out, seed=0)


def test_samples_are_not_written_through_links(tmp_path):
    plan, mine = Plan(number=1, batch=1, classes=(), folders=(), suffix=".npy"), tmp_path / "mine"
    mine.mkdir()
    for number, name in enumerate(("samples", "samples/cat", "condition", "grid.png")):
        out = tmp_path / "run" / "samples" / str(number)
        open_folder(out, {"batch": 1}, plan)
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).symlink_to(mine)
        with pytest.raises(UserError, match="is a link, which may lead anywhere, and a folder of samples holds"):
            open_folder(out, {"batch": 1}, plan)
    check_contents(tmp_path / "run")
    (tmp_path / "run" / "samples" / "step-1").symlink_to(mine)
    with pytest.raises(UserError, match="step-1 is a link"):
        check_contents(tmp_path / "run")
    assert not os.listdir(mine)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 40, 20), (5, 8, 300), (1, 6, 8, 10), (2, 4, 4, 4)])
def test_a_page_of_any_samples(shape, tmp_path):
    samples = np.random.default_rng(0).normal(size=(3, *shape))
    spacing = (3.0, 1.0, 1.0)[-len(shape) + 1 :] if len(shape) == 4 else ()
    path: Path = draw_grid(tmp_path / "grid.png", [("one", samples[:2]), ("a $long$ name" * 5, samples[2:])],
                           title="t", caption="c", heads=("a", "b"), spacing=spacing)  # fmt: skip
    with Image.open(path) as picture:
        assert min(picture.size) > 60
        assert len(np.unique(np.asarray(picture))) > 20
