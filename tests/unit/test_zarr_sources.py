"""Plain zarr and N5: arrays, pyramids and bigger hierarchies, with places in the world; local and by URL."""

import functools
import http.server
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import tensorstore
import zarr

from vitrail.data.dataset import Dataset
from vitrail.data.files.fingerprint import fingerprint
from vitrail.data.files.places import Remote, read_remote
from vitrail.data.generate import Volume, write_ome_zarr
from vitrail.data.sources import guess_kind
from vitrail.data.sources.zarr import N5Config, OmeZarrConfig, ZarrConfig
from vitrail.errors import BadData, MissingData, UserError
from vitrail.foreign import METADATA

WHOLE = (slice(None),) * 3
VALUES = np.random.default_rng(0).integers(1, 255, (16, 20, 24)).astype(np.uint8)
COARSE = VALUES[::2, ::2, ::2]
SENT: list[int] = []  # bytes of each answer of the server
WITHOUT_PARTS = False  # whether it sends whole files only, as many small servers do


def put(group: Any, name: str, values: np.ndarray, **attributes: Any) -> None:
    array = group.create_array(
        name, shape=values.shape, chunks=tuple(min(8, n) for n in values.shape), dtype=values.dtype
    )
    array[...] = values
    array.attrs.update(attributes)


def multiscale(scales: dict[str, float], shifts: dict[str, list[float]]) -> dict[str, Any]:
    axes = [{"name": name, "type": "space", "unit": "nanometer"} for name in "zyx"]
    datasets = [
        {
            "path": path,
            "coordinateTransformations": [
                {"type": "scale", "scale": [size] * 3},
                {"type": "translation", "translation": shifts[path]},
            ],
        }
        for path, size in scales.items()
    ]
    return {"multiscales": [{"version": "0.4", "axes": axes, "datasets": datasets}]}


@pytest.fixture
def organelle(tmp_path: Path) -> Path:
    """The layout of OpenOrganelle: one volume, and labels of a crop of it at twice the voxel size."""
    root = zarr.create_group(str(tmp_path / "jrc_x.zarr"), zarr_format=2)
    em = root.create_group("recon-1").create_group("em").create_group("fibsem-uint8")
    em.attrs.update(multiscale({"s0": 4.0, "s1": 8.0}, {"s0": [0.0] * 3, "s1": [2.0] * 3}))
    put(em, "s0", VALUES)
    put(em, "s1", COARSE)
    crop = root["recon-1"].create_group("labels").create_group("groundtruth").create_group("crop7").create_group("mito")
    crop.attrs.update(multiscale({"s0": 4.0, "s1": 8.0}, {"s0": [16.0, 32.0, 8.0], "s1": [18.0, 34.0, 10.0]}))
    labels = (VALUES > 128).astype(np.uint8)[4:12, 8:18, 2:14]
    put(crop, "s0", labels)
    put(crop, "s1", labels[::2, ::2, ::2])
    return tmp_path / "jrc_x.zarr"


def test_one_level_or_all_of_a_volume(organelle: Path) -> None:
    em = organelle / "recon-1" / "em" / "fibsem-uint8"
    one = ZarrConfig(path=str(em / "s0")).open()
    assert (one.axes, one.variables, one.items[0].spacing, one.items[0].unit) == (
        ("z", "y", "x"),
        ("image",),
        (4.0, 4.0, 4.0),
        "nanometer",
    )
    assert np.array_equal(one.read(0, WHOLE)[0], VALUES)
    second = ZarrConfig(path=str(em / "s1")).open()
    assert second.items[0].spacing == (8.0, 8.0, 8.0)
    assert second.describe()["translation"] == [2.0, 2.0, 2.0]
    group = ZarrConfig(path=str(em), spacing=[8, 8, 8]).open()
    assert (group.level, group.items[0].scale) == (1, (1.0, 1.0, 1.0))
    assert np.array_equal(group.read(0, WHOLE)[0], COARSE)
    with pytest.raises(UserError, match=r"holds the arrays recon-1/em/fibsem-uint8/s0, .*such as .*fibsem-uint8/s0"):
        ZarrConfig(path=str(organelle)).open()


@pytest.fixture
def organelles(organelle: Path) -> Path:
    """Two volumes of that layout, of different sizes, in folders of different depth."""
    other = organelle.parent / "more" / "jrc_y.zarr"
    shutil.copytree(organelle, other)
    group = zarr.open_group(str(other / "recon-1" / "em" / "fibsem-uint8"), mode="r+", zarr_format=2)
    del group["s0"]
    put(group, "s0", VALUES[:14, :, ::-1])
    return organelle.parent


def test_stars_stand_for_many_volumes(organelles: Path) -> None:
    path = f"{organelles}/**/s0"
    assert guess_kind(path) == "zarr"
    dataset = Dataset([ZarrConfig(path=path)], (4, 4, 4), where="data.train")
    source: Any = dataset.sources[0]
    assert [item.name for item in source.items] == [
        "jrc_x.zarr/recon-1/em/fibsem-uint8/s0",
        "more/jrc_y.zarr/recon-1/em/fibsem-uint8/s0",
    ]
    assert source.reads_straight
    for item, values in enumerate((VALUES, VALUES[:14, :, ::-1])):
        assert np.array_equal(source.read(item, tuple(slice(0, n) for n in values.shape))[0], values)
    assert re.fullmatch(r"data\.train\.0: .*s0: 2 labels and files are left out, such as .*/mito/s0", *dataset.notes)
    for labels in (f"{organelles}/**/labels/groundtruth/crop7/mito/s0", "recon-1/labels/groundtruth/crop7/mito/s0"):
        source = ZarrConfig(path=f"{organelles}/**/em/fibsem-uint8/s0", labels=labels).open()
        assert [item.shape for item in source.items] == [(8, 10, 12)] * 2
    of_one = f"{organelles}/jrc_x.zarr/recon-1/labels/groundtruth/crop7/mito/s0"
    with pytest.raises(UserError, match=r"labels = .* are those of one volume, and .* stands for 2; name labels"):
        ZarrConfig(path=f"{organelles}/**/em/fibsem-uint8/s0", labels=of_one).open()
    assert fingerprint([ZarrConfig(path=path)], {}) != fingerprint([ZarrConfig(path=path.replace("**", "*"))], {})
    with pytest.raises(UserError, match=r"stands for no file or folder; check the spelling"):
        ZarrConfig(path=f"{organelles}/**/s7").open()


def test_a_folder_of_hierarchies_is_many_volumes(tmp_path: Path) -> None:
    for name in ("b10", "b9"):
        write_ome_zarr(tmp_path / f"{name}.zarr", Volume(VALUES, VALUES % 3), levels=1, chunk=8)
    assert guess_kind(str(tmp_path)) == "ome_zarr"
    source = OmeZarrConfig(path=str(tmp_path)).open()
    assert [item.name for item in source.items] == ["b9.zarr", "b10.zarr"]
    source = OmeZarrConfig(path=str(tmp_path), labels="structures").open()
    whole = tuple(slice(0, n) for n in VALUES.shape)
    assert all(np.array_equal(source.read_labels(item, whole), VALUES % 3) for item in range(2))


@pytest.mark.parametrize(
    ("path", "labels"),
    [
        ("recon-1/em/fibsem-uint8/s0", "recon-1/labels/groundtruth/crop7/mito/s0"),
        ("recon-1/em/fibsem-uint8", "recon-1/labels/groundtruth/crop7/mito"),
        ("recon-1/em/fibsem-uint8", "{root}/recon-1/labels/groundtruth/crop7/mito"),
    ],
)
def test_labels_of_a_small_box_in_world_coordinates(organelle: Path, path: str, labels: str) -> None:
    source = ZarrConfig(path=str(organelle / path), labels=labels.format(root=organelle)).open()
    assert source.items[0].shape == (8, 10, 12)
    assert np.array_equal(source.read(0, WHOLE)[0], VALUES[4:12, 8:18, 2:14])
    window = (slice(1, 5), slice(0, 10), slice(3, 9))
    assert np.array_equal(source.read_labels(0, window), (VALUES > 128)[4:12, 8:18, 2:14][window])
    out = np.zeros((1, 4, 10, 6), np.int32)
    source.read_into(0, window, out)
    assert np.array_equal(out, source.read(0, window))


def test_labels_follow_the_level(organelle: Path) -> None:
    em = str(organelle / "recon-1" / "em" / "fibsem-uint8")
    crop = "recon-1/labels/groundtruth/crop7/mito"
    coarse = ZarrConfig(path=em, labels=crop, level=1).open()
    assert coarse.items[0].shape == (4, 5, 6)
    assert np.array_equal(coarse.read(0, WHOLE)[0], COARSE[2:6, 4:9, 1:7])
    assert np.array_equal(coarse.read_labels(0, WHOLE), (COARSE > 128)[2:6, 4:9, 1:7])
    assert OmeZarrConfig(path=em, labels=crop).open().items[0].shape == (8, 10, 12)
    with pytest.raises(UserError, match="labels = 'nowhere/at/all' are not found"):
        ZarrConfig(path=em, labels="nowhere/at/all").open()
    metadata = organelle / crop / ".zattrs"
    metadata.write_text(metadata.read_text().replace("32.0", "33.0"))
    with pytest.raises(BadData, match="do not cover the image"):
        ZarrConfig(path=em, labels=crop).open()


@pytest.mark.parametrize("version", [2, 3])
def test_bare_arrays(tmp_path: Path, version: int) -> None:
    bare = zarr.create_array(str(tmp_path / "a.zarr"), shape=(3, 16, 20), dtype="uint16", zarr_format=version)
    bare[...] = 5
    source = ZarrConfig(path=str(tmp_path / "a.zarr")).open()
    assert (source.axes, source.items[0].spacing, source.items[0].unit) == (("z", "y", "x"), (1.0, 1.0, 1.0), None)
    given = ZarrConfig(
        path=str(tmp_path / "a.zarr"), axes="cyx", voxel_size=[4, 2], unit="nm", variables=["a", "b", "c"]
    ).open()
    assert (given.axes, given.variables, given.items[0].spacing) == (("y", "x"), ("a", "b", "c"), (4.0, 2.0))
    picked = ZarrConfig(path=str(tmp_path / "a.zarr"), axes="cyx", variables=["channel2", "channel0"]).open()
    out = np.zeros((2, 4, 4), np.uint16)
    picked.read_into(0, (slice(0, 4), slice(2, 6)), out)
    assert (out == 5).all()


def test_what_attributes_tell(tmp_path: Path) -> None:
    group = zarr.create_group(str(tmp_path / "a.zarr"), zarr_format=2)
    transform = {"axes": ["z", "y", "x"], "scale": [8, 4, 2], "translate": [1, 2, 3], "units": ["nm", "nm", "nm"]}
    put(group, "cosem", VALUES, transform=transform)
    put(group, "daisy", VALUES, resolution=[8, 4, 2], offset=[1, 2, 3])
    put(group, "named", VALUES[None], _ARRAY_DIMENSIONS=["time", "z", "y", "x"])
    for name, unit in (("cosem", "nanometer"), ("daisy", None)):
        source = ZarrConfig(path=str(tmp_path / "a.zarr" / name)).open()
        assert (source.items[0].spacing, source.items[0].unit) == ((8.0, 4.0, 2.0), unit)
        assert source.describe()["translation"] == [1.0, 2.0, 3.0]
    named = ZarrConfig(path=str(tmp_path / "a.zarr" / "named")).open()
    assert named.axes == ("z", "y", "x")
    out = np.zeros((1, *VALUES.shape), np.uint8)
    named.read_into(0, WHOLE, out)
    assert np.array_equal(out[0], VALUES)
    three = zarr.create_array(
        str(tmp_path / "b.zarr"), shape=(4, 5), dtype="uint8", dimension_names=["latitude", "longitude"]
    )
    three[...] = 1
    assert ZarrConfig(path=str(tmp_path / "b.zarr")).open().axes == ("latitude", "longitude")


def test_levels_of_ome_zarr_by_voxel_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The coarsest level that is not coarser than asked, within 1 %; what is left to resample is in [1, 2)."""
    path = str(write_ome_zarr(tmp_path / "a.zarr", Volume(VALUES, VALUES), levels=3, chunk=8, spacing=(8.0,) * 3))
    for wanted, level, scale in ((8, 0, 1.0), (15, 0, 15 / 8), (15.9, 1, 1.0), (20, 1, 1.25), (99, 2, 99 / 64)):
        source = OmeZarrConfig(path=path, spacing=[wanted] * 3).open()
        assert source.level == level
        assert source.items[0].scale == pytest.approx((scale,) * 3)
    assert OmeZarrConfig(path=path, spacing=[99] * 3).open().items[0].spacing == (64.0,) * 3  # pooled on reading
    fine = OmeZarrConfig(path=path, spacing=[4] * 3).open()
    assert fine.items[0].scale == (0.5, 0.5, 0.5)
    assert "coarser than the spacing" in caplog.text


def test_a_partial_copy_of_a_pyramid(tmp_path: Path) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", Volume(VALUES, VALUES), levels=3, chunk=8)
    names = [level["path"] for level in OmeZarrConfig(path=str(path)).open().describe()["levels"]]
    (path / names[1] / "zarr.json").unlink()
    assert np.array_equal(OmeZarrConfig(path=str(path)).open().read(0, WHOLE)[0], VALUES)
    assert OmeZarrConfig(path=str(path), level=2).open().items[0].shape == (4, 5, 6)
    with pytest.raises(UserError, match=f"level '{names[1]}' of .* is not a zarr array"):
        OmeZarrConfig(path=str(path), level=1).open()
    (path / names[0] / "zarr.json").unlink()
    assert OmeZarrConfig(path=str(path), level=2).open().items[0].shape == (4, 5, 6)
    with pytest.raises(UserError, match=f"level '{names[0]}' of .* is not a zarr array"):
        OmeZarrConfig(path=str(path)).open()


# N5 --------------------------------------------------------------------------------------------------------------


def put_n5(path: Path, values: np.ndarray, **attributes: Any) -> Path:
    """Written by tensorstore; values are in C order, what N5 keeps of them is x first."""
    metadata = {
        "dimensions": values.shape[::-1],
        "blockSize": [6, 8, 8],
        "dataType": str(values.dtype),
        "compression": {"type": "gzip", "level": 1},
    }
    spec = {"driver": "n5", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().T.write(values).result()
    document = path / "attributes.json"
    document.write_text(json.dumps(json.loads(document.read_text()) | attributes))
    return path


@pytest.mark.parametrize(
    ("attributes", "unit", "place"),
    [
        (
            {
                "transform": {
                    "axes": ["z", "y", "x"],
                    "scale": [8, 4, 2],
                    "translate": [80, 40, 20],
                    "units": ["nm"] * 3,
                },
                "pixelResolution": [9, 9, 9],
            },
            "nanometer",
            [80.0, 40.0, 20.0],
        ),
        ({"pixelResolution": {"dimensions": [2, 4, 8], "unit": "um"}}, "micrometer", [0.0, 0.0, 0.0]),
        ({"pixelResolution": [2, 4, 8]}, None, [0.0, 0.0, 0.0]),
        ({"resolution": [2, 4, 8], "offset": [20, 40, 80], "axes": ["x", "y", "z"]}, None, [80.0, 40.0, 20.0]),
    ],
    ids=["transform", "dict", "list", "offset"],
)
def test_n5_counts_axes_from_the_fastest(tmp_path: Path, attributes: dict, unit: str | None, place: list) -> None:
    path = put_n5(tmp_path / "a.n5" / "raw", VALUES, **attributes)
    source = N5Config(path=str(path)).open()
    item = source.items[0]
    assert (source.axes, item.shape, item.chunk) == (("z", "y", "x"), VALUES.shape, (8, 8, 6))
    assert (item.spacing, item.unit) == ((8.0, 4.0, 2.0), unit)
    assert source.describe()["translation"] == place
    assert np.array_equal(source.read(0, (slice(3, 11), slice(0, 20), slice(5, 23)))[0], VALUES[3:11, :, 5:23])


def test_levels_and_labels_of_n5(tmp_path: Path) -> None:
    root = tmp_path / "a.n5"
    for number, values in enumerate((VALUES, COARSE)):
        put_n5(root / "em" / f"s{number}", values, downsamplingFactors=[2**number] * 3)
    (root / "em" / "attributes.json").write_text('{"pixelResolution": {"dimensions": [4, 4, 4], "unit": "nm"}}')
    box = {"scale": [4, 4, 4], "translate": [16, 32, 8], "units": ["nm"] * 3, "axes": ["z", "y", "x"]}
    put_n5(root / "labels" / "mito", VALUES[4:12, 8:18, 2:14], transform=box)
    source = N5Config(path=str(root / "em"), spacing=[8, 8, 8]).open()
    assert (source.level, source.items[0].spacing) == (1, (8.0, 8.0, 8.0))
    assert source.describe()["translation"] == [2.0, 2.0, 2.0]  # half a coarse voxel less half a fine one
    assert np.array_equal(source.read(0, WHOLE)[0], COARSE)
    labelled = N5Config(path=str(root / "em" / "s0"), labels="labels/mito").open()
    assert labelled.items[0].shape == (8, 10, 12)
    assert np.array_equal(labelled.read(0, WHOLE)[0], labelled.read_labels(0, WHOLE))
    with pytest.raises(UserError, match="it holds the arrays em/s0, em/s1, labels/mito"):
        N5Config(path=str(root)).open()
    (root / "em" / "s0" / "1" / "1" / "0").unlink()
    with pytest.raises(MissingData, match=r"chunk \{0, 1, 1\} in .*s0/1/1/0 is missing"):
        N5Config(path=str(root / "em" / "s0")).open().read(0, WHOLE)


def test_sizes_of_n5_levels_count_once(tmp_path: Path) -> None:
    """A group lists factors, and each level its own size, or that of the finest."""
    for kind, sizes in (("own", ([2, 4, 8], [4, 8, 16])), ("finest", ([2, 4, 8], [2, 4, 8]))):
        for number, values in enumerate((VALUES, COARSE)):
            put_n5(tmp_path / f"{kind}.n5" / f"s{number}", values, pixelResolution=sizes[number])
        (tmp_path / f"{kind}.n5" / "attributes.json").write_text('{"n5": "2.5.0", "scales": [[1, 1, 1], [2, 2, 2]]}')
        source = N5Config(path=str(tmp_path / f"{kind}.n5"), level=1).open()
        assert [level["spacing"] for level in source.describe()["levels"]] == [[8, 4, 2], [16, 8, 4]]
        assert source.describe()["translation"] == [4.0, 2.0, 1.0]


def test_units_of_some_axes_alone(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    put(group, "s0", VALUES)
    block = multiscale({"s0": 4.0}, {"s0": [0.0, 0.0, 0.0]})
    for axis, unit in zip(block["multiscales"][0]["axes"], (None, "micrometer", "micrometer"), strict=True):
        axis["unit"] = unit
    group.attrs.update(block)
    for kind in (OmeZarrConfig, ZarrConfig):
        with pytest.raises(UserError, match=r"different units .* or give voxel_size and unit"):
            kind(path=str(tmp_path / "a.zarr")).open()
        item = kind(path=str(tmp_path / "a.zarr"), voxel_size=[9, 4, 4], unit="um").open().items[0]
        assert (item.spacing, item.unit) == ((9.0, 4.0, 4.0), "micrometer")


def test_what_is_neither_is_explained(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    for config, words in ((ZarrConfig, "not in a zarr hierarchy"), (N5Config, "not in a n5 hierarchy")):
        with pytest.raises(UserError, match=words):
            config(path=str(tmp_path / "plain")).open()
        with pytest.raises(UserError, match="does not exist"):
            config(path=str(tmp_path / "nowhere")).open()
    zarr.create_group(str(tmp_path / "empty.zarr"))
    with pytest.raises(UserError, match="no array lies below it"):
        ZarrConfig(path=str(tmp_path / "empty.zarr")).open()
    array = put_n5(tmp_path / "a.n5", VALUES)
    (array / "attributes.json").write_text("{nope")
    with pytest.raises(UserError, match="not valid JSON"):
        N5Config(path=str(array)).open()


# URLs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    class Handler(http.server.SimpleHTTPRequestHandler):
        """Quiet, and with parts of files as real servers give them."""

        def log_message(self, *words: Any) -> None:
            pass

        def do_GET(self) -> None:
            path, wanted = Path(self.translate_path(self.path)), self.headers.get("Range")
            if path.is_file() and (wanted is None or WITHOUT_PARTS):
                SENT.append(path.stat().st_size)
            if wanted is None or not path.is_file() or WITHOUT_PARTS:
                return super().do_GET()
            data = path.read_bytes()
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start = int(first) if first else max(0, len(data) - int(last))
            stop = int(last) + 1 if first and last else len(data)
            SENT.append(len(data[start:stop]))
            if start >= len(data):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data[start:stop])))
            self.end_headers()
            self.wfile.write(data[start:stop])

    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_metadata_by_http_are_not_fetched_beyond_a_bound(tmp_path: Path, server: str) -> None:
    """The server is asked for the byte after the last that may come: where it has one, nothing else comes."""
    SENT.clear()
    (tmp_path / "large.json").write_bytes(bytes(2 * METADATA))
    (tmp_path / "full.json").write_bytes(b" " * METADATA)
    (tmp_path / "small.json").write_bytes(b"{}")
    (tmp_path / "empty.json").write_bytes(b"")
    with pytest.raises(BadData, match="too many for a list of facts"):
        read_remote(Remote(f"{server}/large.json"))
    assert SENT == [1]
    assert len(read_remote(Remote(f"{server}/full.json"))) == METADATA
    assert read_remote(Remote(f"{server}/small.json")) == b"{}"
    assert read_remote(Remote(f"{server}/empty.json")) == b""
    assert read_remote(Remote(f"{server}/none.json")) is None


@pytest.fixture
def too_long(tmp_path: Path, server: str) -> str:
    """The URL of an image with a file in the place of a chunk that is larger than any chunk can be."""
    path = write_ome_zarr(tmp_path / "a.zarr", Volume(VALUES, VALUES), levels=1, chunk=8)
    chunk = next(file for file in path.rglob("c/0/0/0") if "labels" not in file.parts)
    chunk.write_bytes(bytes(2**25))
    return f"{server}/a.zarr"


@pytest.mark.parametrize("decoded", ["here", "by tensorstore"])
def test_chunks_by_http_are_not_fetched_beyond_a_bound(too_long: str, decoded: str, monkeypatch) -> None:
    if decoded == "by tensorstore":
        monkeypatch.setattr("vitrail.data.chunks.decoded.open_chunks", lambda *_, **__: None)
    image = OmeZarrConfig(path=too_long).open()
    SENT.clear()
    with pytest.raises(BadData, match=r"more (bytes )?than a chunk can need"):
        image.read(0, tuple(slice(0, 8) for _ in range(3)))
    assert SENT == [1]


def test_a_server_without_parts_is_asked_once_for_what_is_too_long(too_long: str, monkeypatch) -> None:
    image = OmeZarrConfig(path=too_long).open()
    monkeypatch.setattr(sys.modules[__name__], "WITHOUT_PARTS", True)
    SENT.clear()
    with pytest.raises(BadData, match="more than a chunk can need"):
        image.read(0, tuple(slice(0, 8) for _ in range(3)))
    assert SENT == [2**25]
    assert np.array_equal(image.read(0, (slice(8, 16), slice(0, 8), slice(0, 8)))[0], VALUES[8:16, :8, :8])


def test_by_http(tmp_path: Path, server: str) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", Volume(VALUES, VALUES), levels=2, chunk=8)
    image = OmeZarrConfig(path=f"{server}/a.zarr", labels="structures").open()
    assert np.array_equal(image.read(0, WHOLE)[0], VALUES)
    assert np.array_equal(image.read_labels(0, WHOLE), VALUES)
    names = [level["path"] for level in image.describe()["levels"]]
    plain = ZarrConfig(path=f"{server}/a.zarr/{names[1]}").open()
    assert plain.items[0].shape == (8, 10, 12)
    put_n5(tmp_path / "b.n5" / "s0", VALUES, pixelResolution=[2, 4, 8])
    n5 = N5Config(path=f"{server}/b.n5/s0").open()
    assert n5.items[0].spacing == (8.0, 4.0, 2.0)
    assert np.array_equal(n5.read(0, (slice(3, 11), slice(0, 20), slice(5, 23)))[0], VALUES[3:11, :, 5:23])
    (path / names[0] / "c" / "0" / "1" / "0").unlink()
    with pytest.raises(MissingData, match=r"\{0, 1, 0\} in http://.*/c/0/1/0 is missing"):
        OmeZarrConfig(path=f"{server}/a.zarr").open().read(0, WHOLE)
    with pytest.raises(UserError, match="not a zarr group"):
        OmeZarrConfig(path=f"{server}/nowhere.zarr").open()


@pytest.mark.parametrize("shards", [None, (16, 16, 16)])
def test_shards_by_http(tmp_path: Path, server: str, shards: Any) -> None:
    array = zarr.create_array(str(tmp_path / "a.zarr"), shape=VALUES.shape, chunks=(8, 8, 8), shards=shards, dtype="u1")
    array[...] = VALUES
    source = ZarrConfig(path=f"{server}/a.zarr").open()
    assert np.array_equal(source.read(0, WHOLE)[0], VALUES)


def test_by_fsspec(tmp_path: Path) -> None:
    put_n5(tmp_path / "b.n5" / "s0", VALUES)
    for name, shards in (("plain", None), ("shards", (16, 16, 16))):
        array = zarr.create_array(
            str(tmp_path / f"{name}.zarr"), shape=VALUES.shape, chunks=(8, 8, 8), shards=shards, dtype="u1"
        )
        array[...] = VALUES
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/zarr-sources", recursive=True)
    try:
        for name in ("plain.zarr", "shards.zarr"):
            source = ZarrConfig(path=f"memory://zarr-sources/{name}").open()
            assert np.array_equal(source.read(0, WHOLE)[0], VALUES)
        n5 = N5Config(path="memory://zarr-sources/b.n5").open()
        assert np.array_equal(n5.read(0, WHOLE)[0], VALUES)
        memory.rm("/zarr-sources/plain.zarr/c/1/1/1")
        memory.pipe("/zarr-sources/shards.zarr/c/0/1/0", b"")
        with pytest.raises(MissingData, match=r"\{1, 1, 1\} in memory://"):
            ZarrConfig(path="memory://zarr-sources/plain.zarr").open().read(0, WHOLE)
        with pytest.raises(BadData, match=r"\{0, 2, 0\} in memory://.*the shard has 0 bytes"):
            ZarrConfig(path="memory://zarr-sources/shards.zarr").open().read(0, WHOLE)
    finally:
        memory.rm("/zarr-sources", recursive=True)
