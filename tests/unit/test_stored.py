"""What vitrail stores tells its version and its damage: every flipped bit is noticed, or changes nothing."""

import contextlib
import hashlib
import json
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import nibabel
import numpy as np
import pytest
import tifffile
import zarr
from PIL import Image
from zarr.codecs import ZstdCodec

from vitrail import disk
from vitrail.bench.sweep import read_asked
from vitrail.data.batch import Statistics
from vitrail.data.chunks import decoded as chunks
from vitrail.data.chunks.layers import find_layers
from vitrail.data.chunks.nodes import checksums_of
from vitrail.data.files import paths as files
from vitrail.data.files.fingerprint import data_states
from vitrail.data.generate import Volume, write_ome_zarr
from vitrail.data.latents.shards import ShardedLatents
from vitrail.data.latents.store import ATTRIBUTE, open_shard, write_latents
from vitrail.data.look.inspect import inspect, look
from vitrail.data.sources.arrays import NiftiConfig, NumpyConfig
from vitrail.data.sources.items import LatentsConfig
from vitrail.data.sources.zarr import OmeZarrConfig, ZarrConfig
from vitrail.data.statistics import checked, remembered
from vitrail.disk import told
from vitrail.errors import UserError
from vitrail.infer.collection import Generated
from vitrail.infer.folder import Kind, Plan, close_folder, open_folder, write_sample
from vitrail.report.bench_cells import read_bench
from vitrail.sums import check_version, sealed, sum_of, unsealed


def test_newer_versions_are_refused_in_a_sentence() -> None:
    assert [check_version(version, 3, "x") for version in (1, 2, 3)] == [1, 2, 3]
    with pytest.raises(UserError, match="x was written by a newer vitrail: version 99, this one reads 1 to 3; upgrade"):
        check_version(99, 3, "x")
    for wrong in (0, -1, True, None, 1.5, "1", [1]):
        with pytest.raises(UserError, match=r"x says that its version is .*, expected a number from 1 to 3"):
            check_version(wrong, 3, "x")


def test_seals_and_sums(tmp_path) -> None:
    tree = {"b": [1, 2.5, None], "a": "text"}
    assert unsealed(dict(reversed(sealed(tree).items()))) == tree
    assert unsealed(sealed(tree) | {"a": "test"}) is None
    assert unsealed(tree) is None
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x").write_bytes(b"1")
    sums = {sum_of(tmp_path)}
    (tmp_path / "deep" / "x").rename(tmp_path / "deep" / "y")
    sums.add(sum_of(tmp_path))
    (tmp_path / "deep" / "y").write_bytes(b"2")
    assert len({*sums, sum_of(tmp_path), sum_of(tmp_path / "deep" / "y")}) == 4


# ---------------------------------------------------------------- flipped bits

Read = Callable[[], Any]


def flips(files: Iterable[Path], read: Read, number: int) -> dict[str, int]:
    """Turn bits of files one at a time, spread over all bytes; what came of it: told in a sentence, or the same."""
    came = {"told": 0, "same": 0}
    expected = read()
    random = np.random.default_rng(0)
    files = sorted(files)
    for file in files:
        good = file.read_bytes()
        for place in np.linspace(0, len(good) - 1, max(1, number // len(files))).astype(int).tolist():
            bad = bytearray(good)
            bad[place] ^= 1 << int(random.integers(8))
            file.write_bytes(bad)
            try:
                found = read()
            except UserError:
                came["told"] += 1
            else:
                np.testing.assert_equal(found, expected, f"bit of byte {place} in {file}")
                came["same"] += 1
        file.write_bytes(good)
    np.testing.assert_equal(read(), expected)
    return came


@pytest.mark.parametrize("version", ["0.4", "0.5"])
def test_every_flipped_bit_of_a_volume_is_told(version: str, tmp_path: Path) -> None:
    """By every way of reading chunks; and of the metadata, which have no checksum of their own."""
    values = (np.random.default_rng(0).normal(100, 20, (20, 16, 16))).astype(np.uint8)
    path = write_ome_zarr(tmp_path / "v.zarr", Volume(values, values // 64), version=version, chunk=16, levels=2)
    window = (slice(0, 20), slice(0, 16), slice(0, 16))

    def open_all() -> list[Any]:
        chunks.shared.clear()
        source = OmeZarrConfig(path=str(path), labels="structures").open()
        item = source.items[0]
        return [source, item.shape, item.spacing, item.unit, source.axes, source.variables, source.label_names]

    def whole() -> Any:
        source, *facts = open_all()
        return facts, source.read(0, window), source.read_labels(0, window)

    opened = open_all()[0]

    def by_cache() -> Any:
        chunks.shared.clear()
        return opened.read(0, window), opened.read_labels(0, window)

    def by_layers() -> Any:
        reader, out = chunks.open_chunks(path / "s0"), np.empty(values.shape, np.uint8)
        for layer in find_layers(reader, [(out, window)]):
            layer.read()
        return out

    assert opened.label_names[1] == "membrane"
    stored = [file for file in path.rglob("*") if file.is_file()]
    metadata = [file for file in stored if file.name in ("zarr.json", ".zarray", ".zattrs", ".zgroup")]
    mark = path / "s0" / ".vitrail"
    of_level = [file for file in stored if file not in metadata and file != mark and "s0" in file.parts]
    image = [file for file in of_level if "labels" not in file.parts]
    assert flips(of_level, by_cache, 160)["told"] >= 160
    assert flips(image, by_layers, 50)["told"] >= 50
    assert flips(metadata, whole, 60)["same"] == 0
    flips([mark], whole, 50)
    for odd in (
        "[" * 100_000,
        "[]",
        '{"files": 1}',
        '{"files": {"../zarr.json": 1, "/zarr.json": [], "s0/zarr.json/x": 0}}',
    ):
        listed = mark.read_bytes()
        mark.write_text(odd)  # as anybody may write it
        whole()
        mark.write_bytes(listed)
    (path / "zarr.json" if version == "0.5" else path / ".zattrs").write_text("{}")
    with pytest.raises(UserError, match=r"has changed since vitrail wrote it: .* or remove .*\.vitrail if the change"):
        OmeZarrConfig(path=str(path)).open()


def test_a_forged_list_costs_nothing_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume of somebody else lists files of any size, or behind links: these are not read, nor is a list of TiB."""
    values = np.zeros((16, 16, 16), np.uint8)
    path = write_ome_zarr(tmp_path / "a.zarr", Volume(values, values), chunk=16, levels=1)
    mark = path / "s0" / disk.MARK
    known = json.loads(mark.read_text())
    hashed: list[int] = []
    digest = disk._digest_of
    monkeypatch.setattr(disk, "_digest_of", lambda file: hashed.append(os.fstat(file.fileno()).st_size) or digest(file))

    def look(**more: Any) -> None:
        mark.write_text(json.dumps(known | {"files": known["files"] | more}, indent=0))
        hashed.clear()
        OmeZarrConfig(path=str(path)).open()

    def holes(name: str, size: int) -> None:
        (path / name).parent.mkdir(exist_ok=True)
        with (path / name).open("wb") as file:
            file.truncate(size)

    look()
    assert 0 < sum(hashed) < 2**16
    mine = sum(hashed)
    holes("s1/zarr.json", 2**40)
    with pytest.raises(UserError, match=r"s1/zarr\.json has changed since vitrail wrote it"):
        look(**{"s1/zarr.json": [10, "0" * 32]})
    assert sum(hashed) <= mine
    look(**{"s1/zarr.json": [2**40, "0" * 32]})
    assert sum(hashed) == mine
    for number in range(2, 12):
        holes(f"s{number}/zarr.json", 10 << 20)
    right = digest((path / "s2/zarr.json").open("rb"))
    look(**{f"s{number}/zarr.json": right for number in range(2, 12)})  # no more than one of them
    assert sum(hashed) == mine + (10 << 20)

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "zarr.json").write_text("{}")
    (path / "linked").symlink_to(tmp_path / "elsewhere")
    look(**{"linked/zarr.json": [2, "0" * 32]})
    (path / "folder" / "zarr.json").mkdir(parents=True)
    os.mkfifo(path / "pipe")
    odd = {"\0/zarr.json": [0, ""], "\ud800/zarr.json": [0, ""], f"{'x' * 300}/zarr.json": [0, ""]}
    look(**{"folder/zarr.json": [0, ""], "pipe/zarr.json": [0, ""]}, **odd)

    parsed, lengths = json.loads, []
    monkeypatch.setattr(json, "loads", lambda text, **more: lengths.append(len(text)) or parsed(text, **more))
    for content in (b'"' + b"x" * 2**20 + b'zarr.json": [\n', b"[" * 2**20, b'"zarr.json": [\n' + b"[" * 2**20):
        mark.write_bytes(content)
        OmeZarrConfig(path=str(path)).open()
    with mark.open("wb") as file:
        file.truncate(2**40)
    OmeZarrConfig(path=str(path)).open()
    assert max(lengths) < 2**17


def test_a_first_chunk_of_holes_is_not_read_to_find_its_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = ZstdCodec(checksum=True)
    zarr.create_array(tmp_path / "a.zarr", data=np.ones((8, 8), np.uint8), chunks=(8, 8), compressors=[codec])
    source = ZarrConfig(path=str(tmp_path / "a.zarr")).open()
    assert checksums_of(source) == "zstd"
    with (tmp_path / "a.zarr" / "c" / "0" / "0").open("r+b") as file:
        file.truncate(2**40)
    pread = os.pread
    monkeypatch.setattr(
        os, "pread", lambda file, size, at: pread(file, size, at) if size < 2**21 else pytest.fail("read")
    )
    assert checksums_of(source).startswith("none: a flipped bit")


def test_other_tools_read_volumes_with_checksums(tmp_path: Path) -> None:
    """tensorstore refuses zarr 2 metadata that tell of a checksum, so that only frames do; it compares them as well."""
    import tensorstore

    values = np.random.default_rng(0).integers(0, 255, (16, 16, 16), dtype=np.uint8)
    for version, driver in (("0.4", "zarr"), ("0.5", "zarr3")):
        path = write_ome_zarr(tmp_path / version, Volume(values, values), version=version, chunk=16, levels=1)
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{path / 's0'}/"}}
        assert np.array_equal(tensorstore.open(spec).result().read().result(), values)
        assert np.array_equal(np.asarray(zarr.open_group(str(path), mode="r")["s0"]), values)
        chunk = path / "s0" / ("0/0/0" if version == "0.4" else "c/0/0/0")
        data = bytearray(chunk.read_bytes())
        data[-1] ^= 1
        chunk.write_bytes(data)
        with pytest.raises(ValueError):
            tensorstore.open(spec).result().read().result()


def write_rows(path: Path, store: Any) -> tuple[np.ndarray, Read]:
    latents = np.random.default_rng(0).normal(size=(10, 2, 4, 4)).astype(np.float32)
    write_latents(path, [(latents, np.arange(10) % 3)], classes=["a", "b", "c"], rows=4, store=store)

    def read() -> Any:
        chunks.shared.clear()
        source = LatentsConfig(path=str(path)).open()
        rows = [source.read(item, (slice(None), slice(None))) for item in range(len(source.items))]
        facts = source.class_names, source.statistics, source.variables, [item.label for item in source.items]
        return np.stack(rows), str(rows[0].dtype), facts

    return latents, read


@pytest.mark.parametrize("store", ["safetensors", "zarr"])
def test_every_flipped_bit_of_latents_is_told(store: str, tmp_path: Path) -> None:
    _, read = write_rows(tmp_path / "a", store)
    stored = [file for file in (tmp_path / "a").rglob("*") if file.is_file()]
    came = flips(stored, read, 160 if store == "safetensors" else 63)  # zarr metadata that are odd take long to open
    assert came["told"] >= 50


def test_every_flipped_bit_of_latents_in_the_making_is_told(tmp_path: Path) -> None:
    """A shard that is damaged before the index is written is made again."""
    values = np.random.default_rng(0).normal(size=(4, 2, 4, 4)).astype(np.float32)
    latents = ShardedLatents(tmp_path / "a", {"data": {}}, store="safetensors")
    assert not latents.begin()
    latents.write(0, iter([(values, np.arange(4))]))
    good = latents.place(0).read_bytes()
    for place in np.linspace(0, len(good) - 1, 120).astype(int).tolist():
        bad = bytearray(good)
        bad[place] ^= 4
        latents.place(0).write_bytes(bad)
        if latents.has(0):  # such as a space of the header that became another
            shard = open_shard(str(latents.place(0)))
            np.testing.assert_array_equal(np.stack([shard.row(row) for row in range(4)]), values)
            np.testing.assert_array_equal(shard.labels, np.arange(4))
    latents.place(0).write_bytes(good)
    assert latents.has(0)
    (tmp_path / "a" / "plan.json").write_text("{")
    with pytest.raises(UserError, match=r"plan\.json cannot be read .*; choose another folder"):
        latents.begin()


@pytest.mark.parametrize("wanted", ["png", "tiff", "npy", "ome-zarr"])
def test_every_flipped_bit_of_samples_is_told(wanted: str, tmp_path: Path) -> None:
    volume = wanted == "ome-zarr"
    kind = Kind(np.dtype(np.uint8), tuple("zyx" if volume else "yx"), ("grey",), (1.0,) * (2 + volume), None, wanted)
    random, files = np.random.default_rng(0), []
    for number in range(2):
        name = f"samples/{number:05d}{kind.suffix}"
        write_sample(tmp_path / name, random.integers(0, 255, (1, *(8,) * len(kind.axes)), dtype=np.uint8), kind)
        files.append({"path": name, "counter": number, "class": "ab"[number]})
    close_folder(tmp_path, {"run": "r", "step": 1, "weights": "ema", "files": files, **kind.describe()})

    def read() -> Any:
        chunks.shared.clear()
        generated = Generated(tmp_path, seed=0)
        (some,) = generated.batches(2, 2)
        return some.values.numpy(), some.names, generated.kind

    stored = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "manifest.json"]
    assert flips(stored, read, 60)["same"] == 0
    assert flips([tmp_path / "manifest.json"], read, 60)["told"] > 55
    plan = Plan(2, 2, (), (), kind.suffix)
    stored[0].write_bytes(stored[0].read_bytes()[:-1] + b"x")
    (tmp_path / "settings.json").write_text(json.dumps({"number": 2, "batch": 2}))
    with pytest.raises(UserError, match=r"does not match its checksum in manifest\.json"):
        open_folder(tmp_path, {"batch": 2}, plan)  # a second call does not take it for good


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_flipped_bit_of_the_cache_is_noticed(cache: Path) -> None:
    made: list[int] = []

    def make() -> list[list[float]]:
        made.append(1)
        return [[1.5, 2.5], [3.0, 4.0]]

    def read() -> Statistics:
        return remembered("mark", make, checked(2))

    expected = read()
    (file,) = (cache / "statistics").iterdir()
    good = file.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << place % 8
        file.write_bytes(bad)
        assert read() == expected
    assert len(made) >= len(good)  # each was found out, and written anew
    assert read() == expected == Statistics((1.5, 2.5), (3.0, 4.0))


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "text", "nan", "std 0", "too many", "folder", "link", "fifo", "foreign", "open to all"]
)
def test_a_statistics_cache_that_cannot_be_trusted_is_done_without(
    damage: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, other = [[1.0], [2.0]], [[7.0], [8.0]]
    assert remembered("mark", lambda: good, checked(1)) == Statistics((1.0,), (2.0,))
    assert remembered("mark", lambda: pytest.fail("made again"), checked(1)) == Statistics((1.0,), (2.0,))
    (file,) = (cache / "statistics").iterdir()
    content = file.read_bytes()
    values: dict[str, Any] = {"nan": [[float("nan")], [1.0]], "std 0": [[1.0], [0.0]], "too many": [[1.0] * 2] * 2}
    if damage in values or damage == "text":  # as another program would write it, with a digest that fits
        body = json.dumps(values.get(damage, "text")).encode()
        file.write_bytes(f"vitrail-cache 1 {hashlib.blake2b(body, digest_size=16).hexdigest()}\n".encode() + body)
    elif damage in ("cut", "empty"):
        file.write_bytes(content[: len(content) // 2 if damage == "cut" else 0])
    elif damage == "foreign":
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    elif damage == "open to all":
        file.chmod(0o666)
    else:
        file.unlink()
        if damage == "folder":
            file.mkdir()
        elif damage == "fifo":
            os.mkfifo(file)
        else:
            (cache / "elsewhere").write_bytes(content)
            file.symlink_to(cache / "elsewhere")
    assert remembered("mark", lambda: other, checked(1)) == Statistics((7.0,), (8.0,))
    if damage not in ("folder", "link", "fifo", "foreign"):  # what is no plain file is not replaced
        assert remembered("mark", lambda: pytest.fail("made again"), checked(1)) == Statistics((7.0,), (8.0,))
    if damage == "link":
        assert (cache / "elsewhere").read_bytes() == content


def test_a_cache_of_a_newer_version_is_left_alone(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert remembered("mark", lambda: [1]) == [1]
    (file,) = (cache / "statistics").iterdir()
    newer = file.read_bytes().replace(b"vitrail-cache 1 ", b"vitrail-cache 99 ")
    file.write_bytes(newer)
    assert remembered("mark", lambda: [2]) == [2]
    assert file.read_bytes() == newer
    assert "was written by a newer vitrail: version 99, this one reads 1; upgrade" in caplog.text


def test_copies_of_urls_are_what_was_fetched(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/stored/a.bin", bytes(range(200)))
    fetched: list[str] = []
    get = type(memory).get_file
    monkeypatch.setattr(type(memory), "get_file", lambda self, *a, **k: (fetched.append(a[0]), get(self, *a, **k))[1])

    def copy() -> Path:
        return files.local_copy("memory://stored/a.bin")

    place = copy()
    copy()
    assert len(fetched) == 1
    facts = place.stat()
    for number in range(50):  # the size and the time of the copy do not tell
        bad = bytearray(range(200))
        bad[4 * number] ^= 1 << number % 8
        place.write_bytes(bad)
        os.utime(place, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        assert copy().read_bytes() == bytes(range(200))
    assert len(fetched) == 51
    os.utime(place)  # touched and still the same: not fetched again
    copy()
    assert len(fetched) == 51
    (sidecar,) = place.parent.glob("*.sum")
    for wrong in (b"", b"[]", b"{}", sidecar.read_bytes().replace(b'"size"', b'"siae"')):
        sidecar.write_bytes(wrong)
        assert copy().read_bytes() == bytes(range(200))
    assert len(fetched) == 55
    monkeypatch.setattr(os, "geteuid", lambda: 4242)  # somebody else's
    assert copy().read_bytes() == bytes(range(200))
    assert len(fetched) == 56


# ---------------------------------------------------------------- facts of latents


FACTS: list[tuple[str, Any, str]] = [
    ("std", [1.0, 0.0], "`std` is .*, expected finite numbers above 0"),
    ("std", [1.0, float("nan")], "`std` is .*, expected finite numbers above 0"),
    ("std", [1.0, -1.0], "`std` is .*, expected finite numbers above 0"),
    ("std", [1.0, float("inf")], "`std` is .*, expected finite numbers above 0"),
    ("std", ["1", "2"], "`std` is .*, expected finite numbers above 0"),
    ("std", 1.0, "`std` is 1.0, expected a list"),
    ("std", [], "`std` is .*, expected one a mean"),
    ("mean", [1.0], "`mean` is .*, expected 2 numbers"),
    ("mean", [1.0, True], "`mean` is .*, expected finite numbers"),
    ("shape", [2, 4, 5], r"`shape` is .*, expected the \[2, 4, 4\] of the latents"),
    ("shape", [2, -4, 4], "`shape` is .*, expected .* of whole numbers above 0"),
    ("shape", [3, 4, 4], "`variables` is .*, expected 3 names"),
    ("shape", "2x4x4", "`shape` is '2x4x4', expected"),
    ("rows", 9, "`rows` is 9, expected the 10 that there are"),
    ("rows", "10", "`rows` is '10', expected a whole number"),
    ("dtype", "float16", "`dtype` is 'float16', expected float32, as the latents are"),
    ("variables", ["a", "a"], "`variables` is .*, expected names that differ"),
    ("classes", "abc", "`classes` is 'abc', expected a list"),
    ("labelled", False, "labels of its latents are missing"),
    ("version", 99, "was written by a newer vitrail: version 99, this one reads 1 to 2; upgrade"),
    ("version", "2", "says that its version is '2', expected a number"),
]


@pytest.mark.parametrize("store", ["safetensors", "zarr"])
def test_facts_that_cannot_be_those_of_latents_are_refused(store: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    _, read = write_rows(path, store)
    file = path / ("index.json" if store == "safetensors" else "zarr.json")
    document = json.loads(file.read_text())

    def write(facts: dict[str, Any]) -> None:
        whole = facts if store == "safetensors" else document | {"attributes": {ATTRIBUTE: facts}}
        file.write_text(json.dumps(whole))

    facts = document if store == "safetensors" else document["attributes"][ATTRIBUTE]
    for key, value, sentence in FACTS:
        write(facts | {key: value})
        with pytest.raises(UserError, match=f"{sentence}|does not match its own checksum"):
            read()
        write(sealed({k: v for k, v in facts.items() if k != "seal"} | {key: value}))
        with pytest.raises(UserError, match=sentence):
            read()
    write(facts | {"classes": ["a", "b", "d"]})
    with pytest.raises(UserError, match="does not match its own checksum: it was damaged or edited; restore it, or"):
        read()
    write({k: v for k, v in facts.items() if k != "seal"} | {"classes": ["a", "b", "d"]})
    assert LatentsConfig(path=str(path)).open().class_names == ("a", "b", "d")  # a change that is meant


def test_shards_that_cannot_be_those_of_latents_are_refused(tmp_path: Path) -> None:
    _, read = write_rows(tmp_path / "a", "safetensors")
    index = tmp_path / "a" / "index.json"
    facts = json.loads(index.read_text())
    first, second, third = facts["shards"]
    for shards, sentence in (
        ([first, first, third], "lists the shard latents-00000.safetensors twice"),
        ([first, third], "`rows` is 10, expected the 6 that there are"),
        ([first | {"rows": 3}, second, third], "has 4 rows, but index.json says 3"),
        ([first | {"rows": -4}, second, third], "`rows of latents-00000.safetensors` is -4"),
        ([first | {"file": "../a/latents-00000.safetensors"}, second, third], "does not lie in its folder"),
        ([first | {"file": "a/b"}, second, third], "does not lie in its folder"),
        ([first | {"file": ".."}, second, third], "does not lie in its folder"),
        ([first | {"file": 7}, second, third], "does not lie in its folder"),
        ([first | {"crc32": 1}, second, third], "does not match its checksum in index.json"),
        ([first | {"file": second["file"]}, second | {"file": first["file"]}, third], "does not match its checksum"),
        ("shards", "lists no shards"),
    ):
        index.write_text(json.dumps({k: v for k, v in facts.items() if k != "seal"} | {"shards": shards}))
        with pytest.raises(UserError, match=sentence):
            read()


def test_latents_of_version_1_are_still_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    latents, read = write_rows(tmp_path / "a", "safetensors")
    expected = read()
    index = tmp_path / "a" / "index.json"
    facts = json.loads(index.read_text())
    old = {k: v for k, v in facts.items() if k not in ("seal", "labelled")} | {"version": 1}
    old["shards"] = [{"file": shard["file"], "rows": shard["rows"]} for shard in facts["shards"]]
    for number, shard in enumerate(old["shards"]):
        rows = slice(4 * number, 4 * number + shard["rows"])
        save_file({"latents": latents[rows], "labels": (np.arange(10) % 3)[rows]}, tmp_path / "a" / shard["file"])
    index.write_text(json.dumps(old))
    np.testing.assert_equal(read(), expected)
    assert checksums_of(LatentsConfig(path=str(tmp_path / "a")).open()).startswith("none: a flipped bit")


# ---------------------------------------------------------------- data that change


def test_latents_of_data_that_have_changed_are_never_taken_for_theirs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", np.zeros(4))
    entry = NumpyConfig(path=str(tmp_path / "data"))
    values = np.zeros((4, 2, 4, 4), np.float32) + np.arange(4, dtype=np.float32)[:, None, None, None]

    def latents() -> ShardedLatents:
        return ShardedLatents(tmp_path / "out", {"data": {"state": data_states([entry])}}, store="safetensors")

    begun = latents()
    assert not begun.begin()
    begun.write(0, iter([(values, None)]))
    assert not latents().begin()  # it goes on
    np.save(tmp_path / "data" / "b.npy", np.zeros(4))
    sentence = r"out was encoded from data that have changed since \(entry 0: 1 files with .* became 2 with .*\)"
    with pytest.raises(UserError, match=sentence):
        begun.check_states(data_states([entry]))  # while it is encoded
    with pytest.raises(UserError, match=sentence):
        latents().begin()  # in the middle
    (tmp_path / "data" / "b.npy").unlink()
    begun.finish(1)
    assert latents().begin()
    os.utime(tmp_path / "data" / "a.npy", ns=(5, 5))
    with pytest.raises(UserError, match="the times or names of its 1 files are others"):
        latents().begin()  # afterwards


# ---------------------------------------------------------------- full disks


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path) -> None:
    out = tmp_path / "out"
    values = np.random.default_rng(0).normal(size=(32, 4, 16, 16)).astype(np.float32)
    volume = (values[:16, 0] * 40 + 128).astype(np.uint8)
    kind = Kind(np.dtype(np.float32), ("y", "x"), tuple("abcd"), (1.0, 1.0), None, "tiff")
    sentence = r"cannot be written \(.*\); free some space"
    for version in ("0.4", "0.5"):
        with full_disk(2048), pytest.raises(UserError, match=sentence):
            write_ome_zarr(out / "v.zarr", Volume(volume, volume), version=version)
    for store in ("safetensors", "zarr"):
        with full_disk(4096), pytest.raises(UserError, match=sentence):
            write_latents(out / "latents", [(values, None)], store=store)
        latents = ShardedLatents(out / store, {"data": {}}, store=store)
        latents.begin()
        with full_disk(4096), pytest.raises(UserError, match=sentence):
            latents.write(0, iter([(values, None)]))
        assert [path.name for path in latents.folder.iterdir()] == ["plan.json"]  # from where it goes on
        latents.write(0, iter([(values, None)]))
        with full_disk(400), pytest.raises(UserError, match=sentence):
            latents.finish(1)
        assert latents.finish(1)["rows"] == 32
    with full_disk(1024), told(out / "samples"), contextlib.suppress(UserError), pytest.raises(OSError):
        write_sample(out / "samples" / "a.tif", values[0], kind)
    assert sorted(path.name for path in out.iterdir()) == ["safetensors", "samples", "zarr"]
    assert list((out / "samples").iterdir()) == []


# ---------------------------------------------------------------- what is not protected


def test_data_without_checksums_are_named(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 255, (16, 16, 16), dtype=np.uint8)
    made = {
        "zstd": ZstdCodec(checksum=True),
        "none": ZstdCodec(checksum=False),
        "gzip": zarr.codecs.GzipCodec(),
        "blosc": zarr.codecs.BloscCodec(),
        "crc32c": [ZstdCodec(), zarr.codecs.Crc32cCodec()],
    }
    for name, codec in made.items():
        for shards in ({}, {"shards": (16, 16, 16)}):
            path = tmp_path / f"{name}{len(shards)}.zarr"
            array = zarr.create_array(
                str(path), shape=values.shape, chunks=(8, 8, 8), dtype=values.dtype, compressors=codec, **shards
            )
            array[:] = values
            found = inspect(ZarrConfig(path=str(path)).open(), samples=1)["checksums"]
            assert found == name if name in ("zstd", "gzip", "crc32c") else found.startswith("none: a flipped bit")
    np.save(tmp_path / "a.npy", values)
    np.savez(tmp_path / "a.npz", x=values)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("plain", data=values)
        file.create_dataset("checked", data=values, chunks=(8, 8, 8), fletcher32=True)
        file.create_dataset("packed", data=values, chunks=(8, 8, 8), compression="gzip")
    tifffile.imwrite(tmp_path / "a.tif", values)
    tifffile.imwrite(tmp_path / "b.tif", values, compression="zlib")
    (tmp_path / "images").mkdir()
    Image.fromarray(values[0]).save(tmp_path / "images" / "a.png")
    for name, wanted in {
        "a.npy": None,
        "a.npz::x": "zip",
        "a.h5::plain": None,
        "a.h5::checked": "fletcher32",
        "a.h5::packed": "gzip",
        "a.tif": None,
        "b.tif": "deflate",
        "images": "png",
    }.items():
        _, facts = look(str(tmp_path / name))
        assert facts["checksums"] == (wanted or "none: a flipped bit in these files would go unnoticed"), name


def test_every_flipped_bit_of_a_compressed_nifti_file_is_told(tmp_path: Path) -> None:
    """Its checksum lies behind the voxels, where a reader need not go."""
    values = np.random.default_rng(0).integers(0, 255, (8, 16, 16), dtype=np.uint8)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / "a.nii.gz")

    def read() -> Any:
        return NiftiConfig(path=str(tmp_path / "a.nii.gz")).open().read(0, (slice(None),) * 3)

    assert flips([tmp_path / "a.nii.gz"], read, 100)["told"] > 90
    assert look(str(tmp_path / "a.nii.gz"))[1]["checksums"] == "gzip"


def test_a_sweep_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(json.dumps({"version": 99, "sweep": {}, "tree": {}, "cells": []}))
    for read in (read_asked, read_bench):
        with pytest.raises(UserError, match=r"sweep\.json was written by a newer vitrail: version 99"):
            read(tmp_path)


def test_a_manifest_of_samples_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"version": 99}')
    with pytest.raises(UserError, match=r"manifest\.json was written by a newer vitrail: version 99"):
        Generated(tmp_path, seed=0)
