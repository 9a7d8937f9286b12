"""`vitrail view`: what lies at paths as layers, what the page is told of them, and who is answered."""

import http.client
import json
import signal
import socket
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image
from support import ROOT

from vitrail.cli import main
from vitrail.data.generate import Volume, write_ome_zarr
from vitrail.errors import UserError
from vitrail.report.views import label_colour
from vitrail.view import server as serving
from vitrail.view.layers import Layer, far_apart, open_path, together
from vitrail.view.page import array_metadata, group_metadata, state
from vitrail.view.server import Server
from vitrail.view.show import gather

SHAPE = (20, 70, 90)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A volume of two levels with labels, in chunks of 32."""
    rng = np.random.default_rng(5)
    image = rng.integers(10, 200, SHAPE).astype(np.uint8)
    labels = (image > 120).astype(np.uint8) + (image > 180)
    write_ome_zarr(tmp_path / "em.zarr", Volume(image, labels.astype(np.uint8)), levels=2, chunk=32, name="em")
    return tmp_path / "em.zarr"


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the parts of the page, so that neuroglancer need not be here."""
    folder = tmp_path / "client"
    folder.mkdir()
    (folder / "index.html").write_text("<title>page</title>")
    (folder / "main.abc.js").write_text("1")
    monkeypatch.setattr(serving, "find_client", lambda: folder)


def stored(path: Path, name: str = "s0") -> np.ndarray:
    return np.asarray(zarr.open_group(str(path), mode="r")[name])


def put_together(layer: Layer, level: int = 0) -> np.ndarray:
    """Return a level as a page would put it together out of chunks, by the metadata that it is told."""
    told = array_metadata(layer, level)
    shape, chunk = told["shape"], told["chunk_grid"]["configuration"]["chunk_shape"]
    whole = np.zeros(shape, told["data_type"])
    for place in np.ndindex(*(-(-n // c) for n, c in zip(shape, chunk, strict=True))):
        values = np.frombuffer(layer.chunk(level, place), np.dtype(told["data_type"]).newbyteorder("<")).reshape(chunk)
        window = tuple(slice(p * c, min(p * c + c, n)) for p, c, n in zip(place, chunk, shape, strict=True))
        whole[window] = values[tuple(slice(0, w.stop - w.start) for w in window)]
    return whole


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content, dict(answer.getheaders())


def test_a_volume_and_its_labels_are_layers_of_all_levels(volume: Path) -> None:
    image, labels = open_path(str(volume))
    assert (image.kind, labels.kind) == ("image", "labels")
    assert image.axes == ("z", "y", "x")
    assert [level.shape for level in image.levels] == [SHAPE, tuple(n // 2 for n in SHAPE)]
    assert [level.shape for level in labels.levels] == [SHAPE, tuple(n // 2 for n in SHAPE)]
    for number, name in enumerate(("s0", "s1")):
        assert (put_together(image, number) == stored(volume, name)).all()
    assert (put_together(labels) == stored(volume, "labels/structures/s0")).all()
    assert labels.classes == (1, 2, 3)
    assert labels.names[2] == "mitochondria"
    low, high = image.ranges[0]
    assert 10 <= low < high <= 200


def test_a_level_lies_where_its_file_says(volume: Path) -> None:
    image, _ = open_path(str(volume))
    told = group_metadata(image)["attributes"]["ome"]["multiscales"][0]
    own = zarr.open_group(str(volume), mode="r").attrs["ome"]["multiscales"][0]
    places = [level["coordinateTransformations"] for level in told["datasets"]]
    assert places == [level["coordinateTransformations"] for level in own["datasets"]]
    assert told["axes"] == [{"name": n, "type": "space", "unit": "nanometer"} for n in "zyx"]
    part = open_path(str(volume), settings={"region": {"x": [10, 60]}})[0]
    assert part.levels[0].origin == (0.0, 0.0, 80.0)
    assert not far_apart([image, part])


def test_the_page_opens_on_the_middle_with_colours_of_the_reports(volume: Path) -> None:
    layers = gather([str(volume)])
    told = state(layers, "http://127.0.0.1:1/t")
    assert told["dimensions"]["x"] == [pytest.approx(8e-9), "m"]
    assert told["position"] == [45.5, 35.5, 10.5]
    assert told["layout"] == "4panel"
    image, labels = told["layers"]
    assert (image["type"], labels["type"]) == ("image", "segmentation")
    wanted = "#" + "".join(f"{round(255 * part):02x}" for part in label_colour(2))
    assert labels["segmentColors"]["2"] == wanted
    assert labels["segments"] == ["1", "2", "3"]


def test_what_tells_no_size_lies_where_an_array_of_its_shape_does(volume: Path, tmp_path: Path) -> None:
    found = (stored(volume) > 100).astype(np.uint8)
    tifffile.imwrite(tmp_path / "found.tif", found, metadata=None)
    image, _, labels = gather([str(volume), str(tmp_path / "found.tif")])
    assert labels.kind == "labels"
    assert labels.levels[0].spacing == image.levels[0].spacing
    assert labels.unit == image.unit == "nanometer"
    told = state([image, labels], "http://127.0.0.1:1/t")["layers"][1]
    assert "segments" not in told  # all are drawn, also those that the sample has not met
    assert len(told["segmentColors"]) == 64
    tifffile.imwrite(tmp_path / "less.tif", found[:9], metadata=None)
    *_, other = gather([str(volume), str(tmp_path / "less.tif")])
    assert any("may lie elsewhere" in note for note in other.notes)


def test_units_are_brought_together() -> None:
    level: Any = serving_level((4, 4, 4), (0.008,) * 3)
    fine = Layer(
        "a", "image", ("z", "y", "x"), "nanometer", (serving_level((4, 4, 4), (8.0,) * 3),), np.dtype("u1"), ("v",)
    )
    other = Layer("a", "image", ("z", "y", "x"), "micrometer", (level,), np.dtype("u1"), ("v",))
    made = together([fine, other])
    assert made[1].levels[0].spacing == pytest.approx((8.0,) * 3)
    assert [layer.name for layer in made] == ["a", "a (2)"]
    longer: Any = replace(serving_level((5, 4, 4), (0.004,) * 3), origin=(1.0, 0.0, 0.0))
    found: Any = Layer(
        "c", "labels", ("z", "y", "x"), None, (serving_level((5, 4, 4), (1.0,) * 3),), np.dtype("u1"), ()
    )
    *_, placed = together([fine, replace(other, name="b", levels=(longer,)), found])  # as the one of its own size
    assert placed.levels[0].spacing == pytest.approx((4.0,) * 3)
    assert placed.levels[0].origin == pytest.approx((1000.0, 0.0, 0.0))
    assert not placed.notes


def serving_level(shape: tuple[int, ...], spacing: tuple[float, ...]) -> Any:
    from vitrail.view.layers import Level

    return Level(shape, spacing, (0.0,) * len(shape), shape, lambda window: np.zeros((1, *shape)))


def test_flat_images_are_a_stack_and_their_labels_may_be_few(tmp_path: Path) -> None:
    from vitrail.data.sources.image_folder import ImageFolderConfig
    from vitrail.view.layers import open_entry

    rng = np.random.default_rng(1)
    images = rng.integers(0, 255, (7, 40, 50)).astype(np.uint8)
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
        if number in (2, 5):
            Image.fromarray((image > 99).astype(np.uint8)).save(tmp_path / "labels" / f"{number}.png")
    (layer,) = open_path(str(tmp_path / "images"))
    assert (put_together(layer) == images).all()
    entry = ImageFolderConfig(
        path=str(tmp_path / "images"), labels=str(tmp_path / "labels"), unlabelled="leave_out", start=0.5
    )
    shown, labels = open_entry(entry, names=["inside", "edge"])
    assert shown.levels[0].shape == labels.levels[0].shape == (7, 40, 50)
    found = put_together(labels)
    assert (found[[2, 5]] == (images[[2, 5]] > 99)).all()
    assert not found[[0, 1, 3, 4, 6]].any()
    assert labels.names[1] == "edge"
    assert labels.classes == (1,)
    again = gather([str(tmp_path)])  # the folder of both
    assert [layer.levels[0].shape for layer in again] == [(7, 40, 50)] * 2
    assert (put_together(again[1]) == found).all()


@pytest.mark.parametrize("alike", [True, False])
def test_labels_are_those_of_the_slice_or_image_that_is_shown(tmp_path: Path, alike: bool) -> None:
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    images = [np.full((40, 50 + (0 if alike else number)), number, np.uint8) for number in range(6)]
    drawn = (2,) if alike else (2, 4)
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
        if number in drawn:
            Image.fromarray(np.full_like(image, number)).save(tmp_path / "labels" / f"{number}.png")
    if alike:  # one slice of six: the labels lie in it alone
        shown, labels = gather([str(tmp_path)])
        assert shown.levels[0].shape == labels.levels[0].shape == (6, 40, 50)
        assert [int(part.max()) for part in put_together(labels)] == [0, 0, 2, 0, 0, 0]
    for item in ("4", "4.png") if not alike else ("2", "2.png"):
        shown, labels = gather([str(tmp_path)], item=item)
        assert shown.levels[0].shape == labels.levels[0].shape
        assert (put_together(shown) == put_together(labels)).all()
    (shown,) = gather([str(tmp_path)], item="1")
    assert (put_together(shown) == 1).all()
    assert any("the item that is shown has no labels" in note for note in shown.notes)


def test_instances_that_predict_writes_are_labels(tmp_path: Path) -> None:
    from vitrail.data.formats.ngff import create_group, create_level, describe_pyramid, write_chunks

    values = np.arange(20 * 30, dtype=np.uint32).reshape(1, 20, 30)
    block = describe_pyramid("instances", (1.0,) * 3, None, 1) | {"image-label": {}}
    create_level(create_group(tmp_path / "found.ome.zarr", block), "s0", values.shape, values.shape, values.dtype)
    box = tuple(slice(0, n) for n in values.shape)
    write_chunks(tmp_path / "found.ome.zarr" / "s0", values.shape, box, values, 1)
    (layer,) = gather([str(tmp_path / "found.ome.zarr")])
    assert (layer.kind, layer.few, layer.classes) == ("labels", False, ())
    assert (put_together(layer) == values).all()


def test_labels_may_be_floats_and_are_one_number_a_voxel(tmp_path: Path) -> None:
    values = np.float32([[np.nan, -3, 0], [1, 2, np.inf]])
    np.save(tmp_path / "drawn.npy", values)
    (layer,) = gather([], labels=[str(tmp_path / "drawn.npy")])
    assert put_together(layer).tolist() == [[0, 0, 0], [1, 2, 0]]
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "colours.png")
    with pytest.raises(UserError, match=r"colours.png have 3 channels; give labels of one whole number"):
        gather([], labels=[str(tmp_path / "colours.png")])


def test_places_in_meters_are_compared_by_voxels() -> None:
    level = serving_level((20, 20, 20), (8e-9,) * 3)
    layers = [Layer(name, "image", ("z", "y", "x"), "meter", (level,), np.dtype("u1"), ("v",)) for name in "ab"]
    assert not far_apart(layers)
    moved = replace(level, origin=(0.0, 0.0, 21 * 8e-9))
    assert far_apart([layers[0], replace(layers[1], levels=(moved,))])


def test_one_image_has_two_axes_and_colours_are_mixed(tmp_path: Path) -> None:
    image = np.random.default_rng(1).integers(0, 255, (40, 50, 3)).astype(np.uint8)
    Image.fromarray(image).save(tmp_path / "a.png")
    (layer,) = gather([str(tmp_path / "a.png")])
    assert (put_together(layer) == np.moveaxis(image, -1, 0)).all()
    told = state([layer], "http://127.0.0.1:1/t")
    assert told["layout"] == "xy"
    assert told["displayDimensions"] == ["x", "y"]
    assert '"#00ff00"' in told["layers"][0]["shader"]
    assert group_metadata(layer)["attributes"]["ome"]["multiscales"][0]["axes"][0] == {"name": "c^"}


def test_of_many_channels_one_is_sent_at_a_time(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(12, 10, 20, 30)).astype(np.float16)
    np.save(tmp_path / "features.npy", values)
    (layer,) = gather([str(tmp_path / "features.npy")], settings={"axes": "czyx"})
    assert array_metadata(layer, 0)["chunk_grid"]["configuration"]["chunk_shape"][0] == 1
    assert (put_together(layer) == values.astype(np.float32)).all()
    told = state([layer], "http://127.0.0.1:1/t")["layers"][0]
    assert told["localDimensions"] == {"c'": [1, ""]}


def test_of_very_many_channels_little_is_read_at_once(tmp_path: Path) -> None:
    shape = (1024, 400, 400)  # 655 MB, of which nothing was written
    zarr.create_array(
        str(tmp_path / "features.zarr"), shape=shape, chunks=(1024, 16, 16), dtype="float32", fill_value=0
    )
    tracemalloc.start()
    (layer,) = gather([str(tmp_path / "features.zarr")], settings={"axes": "cyx"})
    layer.chunk(0, (1000, 0, 0))
    assert tracemalloc.get_traced_memory()[1] < 300 << 20
    tracemalloc.stop()
    assert layer.channel_chunks == 1024


def test_labels_that_number_things_and_are_signed(tmp_path: Path) -> None:
    values = np.arange(40 * 50, dtype=np.int16).reshape(40, 50) - 3
    np.save(tmp_path / "cells.npy", values)
    (image,) = gather([str(tmp_path / "cells.npy")])
    assert image.kind == "image"
    (layer,) = gather([], labels=[str(tmp_path / "cells.npy")])
    assert (layer.kind, layer.classes, layer.dtype) == ("labels", (), np.dtype(np.uint16))
    assert (put_together(layer) == np.maximum(values, 0)).all()


def test_a_volume_far_larger_than_memory_opens_and_little_of_it_is_read(tmp_path: Path, client: None) -> None:
    side = 60_000  # voxels: 216 TB, of which one chunk was written
    array = zarr.create_array(
        str(tmp_path / "huge.zarr"), shape=(side,) * 3, chunks=(64,) * 3, dtype="uint8", fill_value=0
    )
    array[:64, :64, :64] = 7
    tracemalloc.start()
    layers = gather([str(tmp_path / "huge.zarr")])
    with Server(layers) as server:
        root = f"/{server.token}/data/0"
        for place in ((0, 0, 0), (469, 469, 469), (937, 0, 12)):
            status, content, _ = ask(server, f"{root}/0/c/{place[0]}/{place[1]}/{place[2]}")
            assert status == 200
            assert set(content) == ({7} if place == (0, 0, 0) else {0})
        assert ask(server, f"{root}/0/c/938/0/0")[0] == 404
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


def test_the_server_answers_the_token_alone_and_here_alone(volume: Path, client: None) -> None:
    with Server(gather([str(volume)])) as server:
        assert server.http.server_address[0] == "127.0.0.1"
        assert len(server.token) >= 32
        root = f"/{server.token}"
        status, _, headers = ask(server, f"{root}/")
        assert status == 302
        assert headers["Location"].endswith(f"{root}/state.json")
        assert ask(server, f"{root}/v/page/")[1] == b"<title>page</title>"
        assert json.loads(ask(server, f"{root}/state.json")[1])["layers"]
        assert ask(server, f"{root}/data/0/0/c/0/0/0")[0] == 200
        assert json.loads(ask(server, f"{root}/names/1/info")[1])["inline"]["properties"][0]["values"][0] == "membrane"
        for path in (
            "/", "/state.json", "/x/state.json", f"/{server.token[:-1]}/state.json", f"/{server.token}x/", "//",
            f"{root}/v/page/../../../../etc/passwd", f"{root}/v/page/%2e%2e/index.html", f"{root}/v/page//etc/passwd",
            f"{root}/data/2/zarr.json", f"{root}/data/0/9/zarr.json", f"{root}/data/0/0/c/0/0",
            f"{root}/data/-1/zarr.json",
            f"{root}/data/0/0/c/0/0/99999999999999999999", f"{root}/data/0/0/c/0/0/%C2%B2", f"{root}/favicon.ico",
        ):  # fmt: skip
            assert ask(server, path)[0] in (400, 404), path
        for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1.evil.example", ""):
            assert ask(server, f"{root}/state.json", Host=host)[0] == 404, host
        assert ask(server, f"{root}/state.json", method="POST")[0] == 501
        there = json.loads(ask(server, f"{root}/state.json", Host="localhost:9999")[1])
        assert "http://localhost:9999/" in json.dumps(there)  # through a tunnel
        headers = ask(server, f"{root}/v/page/main.abc.js")[2]
        assert "connect-src 'self'" in headers["Content-Security-Policy"]
        assert headers["Cache-Control"] == "no-store"


def test_the_address_that_a_browser_is_started_with_is_good_once(volume: Path, client: None) -> None:
    with Server(gather([str(volume)])) as server:
        path = "/" + server.ticket().split("/", 3)[3]
        status, _, headers = ask(server, path)
        assert status == 302
        assert headers["Location"] == f"http://127.0.0.1:{server.port}/{server.token}/"
        assert ask(server, path)[0] == 404


def test_a_damaged_chunk_is_told_and_the_rest_is_shown(volume: Path, client: None) -> None:
    layers, told = gather([str(volume)]), []
    chunks = sorted(path for path in (volume / "s0").rglob("*") if path.is_file() and path.name.isdigit())
    chunks[0].write_bytes(b"x" * 50)
    with Server(layers) as server:
        server.tell = told.append
        answers = [ask(server, f"/{server.token}/data/0/0/c/0/{y}/{x}")[0] for y in range(3) for x in range(3)]
    assert 500 in answers
    assert 200 in answers
    assert len(told) == 1
    assert "em.zarr" in told[0]


def test_whatever_a_library_says_of_a_chunk_is_told(
    volume: Path, client: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> bytes:
        raise RuntimeError("no such filter")

    layers, told = gather([str(volume)]), []
    monkeypatch.setattr(Layer, "chunk", broken)
    with Server(layers) as server:
        server.tell = told.append
        assert ask(server, f"/{server.token}/data/0/0/c/0/0/0")[0] == 500
    assert told == ["em.zarr: no such filter"]


def test_mistakes_are_answered_by_sentences(
    volume: Path, client: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: cannot be used here .*leave it out"):
            Server([], port=port)
    (tmp_path / "broken.tif").write_bytes(b"II*\0 and no more")
    for words, said in (
        ([str(tmp_path / "nowhere.zarr")], "does not exist"),
        ([str(tmp_path / "broken.tif")], "broken.tif"),
        ([str(volume), "--item", "9"], "--item 9: .* has 1 items"),
        ([str(volume), "--item", "9" * 5000], "has 1 items"),
        ([str(volume), "--set", "levl=1"], "has no such key"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["view", *words, "--no-browser"])
        assert ended.value.code == 2
        error = capsys.readouterr().err
        assert "error: " in error
        assert "Traceback" not in error
        assert __import__("re").search(said, error), error


def test_without_neuroglancer_the_sentence_says_what_to_install(
    volume: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["view", str(volume)])
    assert ended.value.code == 2
    assert 'pip install -c constraints.txt -e ".[view]"' in capsys.readouterr().err


def test_it_runs_until_it_is_interrupted_and_writes_nothing(volume: Path) -> None:
    pytest.importorskip("neuroglancer")
    before = sums(volume)
    command = [sys.executable, "-m", "vitrail", "view", str(volume), "--no-browser", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=volume.parent
    ) as process:
        assert process.stdout is not None
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended"
        found = json.loads("".join(lines))
        connection = http.client.HTTPConnection("127.0.0.1", found["port"], timeout=600)
        connection.request("GET", "/" + found["address"].split("/", 3)[3] + "v/page/")
        assert b"<script" in connection.getresponse().read()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=600)
    assert process.returncode == 0
    assert "Traceback" not in error
    assert "ssh -N -L" in error or "Ctrl-C" in error
    assert sums(volume) == before
    assert [path.name for path in volume.parent.iterdir()] == ["em.zarr"]


def sums(folder: Path) -> dict[str, int]:
    return {str(path): zlib.crc32(path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_pages_name_the_promises() -> None:
    assert "vitrail view" in (ROOT / "SECURITY.md").read_text()
