"""Files that others made: no plain files, names of other files and networks, and files with changed bytes."""

import io
import json
import os
import pickle
import re
import shutil
import socket
import struct
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bounded import run_cases
from damage import as_key, pairs, plain
from fuzzed import VALUES, originals
from loopback import listening

from vitrail.data.sources import guess_kind
from vitrail.errors import BadData, UserError
from vitrail.foreign import check_plain, named_file, open_plain, parse_json, read_plain, trusted
from vitrail.recipe import kinds, load_recipe, yaml


def opened(kind: str, path: object, **keys: Any) -> Any:
    return kinds.find("source", kind)(path=str(path), **keys).open()


def first(kind: str, path: object, **keys: Any) -> np.ndarray:
    source = opened(kind, path, **keys)
    return source.read(0, tuple(slice(0, n) for n in source.items[0].shape))


def within(call: Callable[[], Any]) -> Any:
    """The result or error of a call that must not wait for anybody."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(call())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(600)
    assert box, "it hangs"
    return box[0]


# ---------------------------------------------------------------- no plain files

# Format (tests/fuzzed.py), and the file of its folder that is something else.
PLACES = {
    "npy": None, "npz": None, "nifti.nii": None, "nifti.nii.gz": None, "ome-tiff": None, "hdf5": None, "netcdf4": None,
    "netcdf3": None, "geotiff": None, "image png": None, "image tif": None, "parquet": None, "tar": None,
    "zarr2 zstd": "0.0.0", "zarr2 .zarray": ".zarray", "zarr2 attributes": ".zattrs", "zarr3 shard": "c/0/0/0",
    "zarr3 zarr.json": "zarr.json", "ome_zarr": "zarr.json", "n5 block": "0/0/0", "n5 attributes": "attributes.json",
    "latents shard": "latents-00000.safetensors", "latents index": "index.json", "dataset.json": "dataset.json",
    "image of a case": "imagesTr/a_0000.tif", "labels of a case": "labelsTr/a.tif",
}  # fmt: skip
SAME = {"zarr2 attributes": "zarr2 zstd", "image of a case": "dataset.json", "labels of a case": "dataset.json"}


def make_fifo(place: Path) -> None:
    os.mkfifo(place)


def make_folder(place: Path) -> None:
    place.mkdir()


def make_socket(place: Path) -> None:
    here = os.getcwd()
    os.chdir(place.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(place.name)
    finally:
        os.chdir(here)


def make_device(place: Path) -> None:
    os.mknod(place, 0o20666, os.makedev(1, 5))  # as /dev/zero, without an end


MAKERS = {"FIFO": make_fifo, "folder": make_folder, "socket": make_socket, "device": make_device}
BESIDE = {
    "a header of ENVI": ("geotiff", "e.img", "e.hdr"),
    "metadata beside a scene": ("geotiff", "g.tif", "g.tif.aux.xml"),
    "overviews beside a scene": ("geotiff", "g.tif", "g.tif.ovr"),
    "the other file of NIfTI": ("nifti", "p.hdr", "p.img"),
}


@pytest.fixture(scope="module")
def not_plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    top = tmp_path_factory.mktemp("plain")
    made = originals(top / "valid")
    cases: list[dict[str, Any]] = []
    for number, (name, inside) in enumerate(PLACES.items()):
        for what, make in MAKERS.items():
            if what != "FIFO" and name not in ("npy", "image png", "zarr2 zstd", "zarr2 .zarray", "hdf5", "ome-tiff"):
                continue
            if what == "device" and os.geteuid():
                continue
            work = top / f"{number}-{what}"
            work.mkdir()
            case = made[SAME.get(name, name)](work, [0])[0]
            path = Path(case["path"]) if inside is None else Path(case["folder"]) / inside
            path.unlink(missing_ok=True)
            make(path)
            opened_at = case["path"] if inside is None else case["folder"]
            cases.append({"name": f"{name}: {what}", "kind": case["kind"], "keys": case["keys"], "path": opened_at})
    for what, (kind, file, beside) in BESIDE.items():
        work = top / what
        work.mkdir()
        (work / file).write_bytes((top / "valid" / "g.tif").read_bytes() if file == "g.tif" else bytes(720))
        os.mkfifo(work / beside)
        cases.append({"name": f"{what}: FIFO", "kind": kind, "path": str(work / file)})
    os.mkfifo(top / "recipe.yaml")
    (top / "child.yaml").write_text("extends: recipe.yaml\n")
    run = top / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("run: {}\n")
    os.mkfifo(run / "metrics.jsonl")
    calls = {
        "a recipe: FIFO": ("vitrail.recipe.load:load_recipe", "recipe.yaml"),
        "a recipe that is extended: FIFO": ("vitrail.recipe.load:load_recipe", "child.yaml"),
        "a cluster: FIFO": ("vitrail.cost.cluster:load_cluster", "recipe.yaml"),
        "the metrics of a report: FIFO": ("vitrail.report.metrics:read_lines", "run"),
    }
    cases += [{"name": name, "call": call, "words": [str(top / file)]} for name, (call, file) in calls.items()]
    return run_cases(cases)


@pytest.mark.parametrize("name", PLACES)
def test_a_fifo_in_place_of_a_file_is_refused(not_plain: dict[str, str], name: str) -> None:
    assert re.match("refused: |error: ", not_plain[f"{name}: FIFO"]), not_plain[f"{name}: FIFO"]


@pytest.mark.parametrize("what", ["folder", "socket", "device"])
def test_what_is_no_plain_file_is_refused(not_plain: dict[str, str], what: str) -> None:
    found = {name: outcome for name, outcome in not_plain.items() if name.endswith(what)}
    assert found or os.geteuid()
    for name, outcome in found.items():
        assert re.match("refused: |error: ", outcome), (name, outcome)


@pytest.mark.parametrize("what", [*BESIDE, "a recipe", "a recipe that is extended", "a cluster"])
def test_a_fifo_beside_the_data_is_refused(not_plain: dict[str, str], what: str) -> None:
    assert re.match("refused: .*FIFO|error: .*FIFO|error: extends: .* not a file", not_plain[f"{what}: FIFO"]), (
        not_plain
    )


def test_a_report_of_a_run_with_a_fifo_ends(not_plain: dict[str, str]) -> None:
    assert re.match("error: .*metrics.jsonl is a pipe", not_plain["the metrics of a report: FIFO"])


def test_weights_that_are_no_plain_file(tmp_path: Path) -> None:
    from vitrail.weights.files import open_weights

    for name in ("a.safetensors", "a.pt", "a.bin"):
        os.mkfifo(tmp_path / name)
        error = within(lambda name=name: open_weights(tmp_path / name))
        assert isinstance(error, UserError)
        assert "is a FIFO, not a plain file" in str(error)


def test_weights_that_are_packed_or_name_other_files(tmp_path: Path) -> None:
    from vitrail.weights.files import open_weights

    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10 << 20))
    with pytest.raises(UserError, match="it is packed"):
        open_weights(tmp_path / "a.pt")
    torch.save({"a": torch.zeros(999)}, tmp_path / "a.pt")
    assert open_weights(tmp_path / "a.pt").shapes == {"a": (999,)}
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        archive.filelist += [member for member in archive.filelist if member.file_size == 4 * 999] * 100
        archive.writestr("more", "")
    with pytest.raises(UserError, match="larger than all of it"):
        open_weights(tmp_path / "a.pt")
    index = tmp_path / "model.safetensors.index.json"
    for table in ({"a": "../b.safetensors"}, {"a": "/etc/passwd"}, {"a": 5}, {"a": ["b"]}, [], 3):
        index.write_text(json.dumps({"weight_map": table}))
        with pytest.raises(UserError, match=r"does not lie beside it|does not list"):
            open_weights(index)


def test_tensors_that_are_larger_than_what_is_stored(tmp_path: Path) -> None:
    from vitrail.weights.files import open_weights

    for tensor in (
        torch.zeros(1).expand(2**40),
        torch.zeros(3, device="meta"),
        torch.sparse_coo_tensor(size=(2**20, 2**20)),
    ):
        torch.save({"model": {"a": tensor, "b": torch.zeros(3)}}, tmp_path / "a.pt")
        with pytest.raises(UserError, match="its tensor 'a' is not stored as plain numbers"):
            open_weights(tmp_path / "a.pt")
    torch.save({"a": torch.zeros(4, 4).t()[1:], "b": torch.zeros(1).expand(2)}, tmp_path / "a.pt")
    assert open_weights(tmp_path / "a.pt").shapes == {"a": (3, 4), "b": (2,)}


@pytest.mark.parametrize("old", [False, True])
def test_weights_whose_keys_would_be_hashed_for_ever(tmp_path: Path, old: bool) -> None:
    from vitrail.weights.files import open_weights

    raw = pickle.PROTO + b"\x02" + as_key(pairs(plain(1))) + pickle.STOP
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=not old)
    if old:
        (tmp_path / "a.pt").write_bytes(file.getvalue().replace(pickle.dumps({}, 2), raw))
    else:
        with zipfile.ZipFile(file) as good, zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
            for member in good.namelist():
                archive.writestr(member, raw if member.endswith("data.pkl") else good.read(member))
    with pytest.raises(UserError, match="has too many parts"):
        open_weights(tmp_path / "a.pt")


def saved(tree: Any) -> dict[str, bytes]:
    """The members of what torch.save writes."""
    file = io.BytesIO()
    torch.save(tree, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_old_file_of_weights_that_ends_as_an_archive_does(tmp_path: Path) -> None:
    """PyTorch tells what a file is by its first bytes, and does not look at its end."""
    from vitrail.weights.files import open_weights

    end = io.BytesIO()
    zipfile.ZipFile(end, "w").close()
    file = io.BytesIO()
    torch.save({}, file, _use_new_zipfile_serialization=False)
    raw = pickle.PROTO + b"\x02" + as_key(pairs(plain(1))) + pickle.STOP
    for content, why in (
        (file.getvalue().replace(pickle.dumps({}, 2), raw), "many parts"),
        (file.getvalue(), "ends as"),
    ):
        (tmp_path / "a.pt").write_bytes(content + end.getvalue())
        with pytest.raises(UserError, match=why):
            open_weights(tmp_path / "a.pt")


def test_weights_with_two_lists_of_members(tmp_path: Path) -> None:
    """Python takes the list right before the end of an archive, PyTorch the one that the end names."""
    from vitrail.weights.files import open_weights

    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in saved({"a": torch.zeros(2**14)}).items():
            archive.writestr(name, content)
    packed = file.getvalue()
    end = packed.rindex(b"PK\5\6")
    number, length, start = struct.unpack("<H2L", packed[end + 10 : end + 20])
    names = [f"archive/{n}".encode() for n in range(number)]
    plain = b"".join(
        b"PK\1\2" + struct.pack("<6H3L5H2L", 20, 20, 0, 0, 0, 33, 0, 0, 0, len(n), 0, 0, 0, 0, 0, 0) + n for n in names
    )
    rest = length - len(plain)  # the comment of the last one
    at = plain.rindex(b"PK\1\2") + 32
    plain = plain[:at] + struct.pack("<H", rest) + plain[at + 2 :] + bytes(rest)
    (tmp_path / "a.pt").write_bytes(packed[: start + length] + plain + packed[end:])
    with zipfile.ZipFile(tmp_path / "a.pt") as seen:
        assert sorted(seen.namelist()) == sorted(name.decode() for name in names)
    with pytest.raises(UserError, match="its list of members does not lie where its end says"):
        open_weights(tmp_path / "a.pt")
    for wrong in (packed + b"x", packed[:-2] + b"\1\0x", packed[:-5] + bytes(1) + packed[-4:]):  # more, a comment
        (tmp_path / "a.pt").write_bytes(wrong)
        with pytest.raises(UserError, match=r"does not end as an archive does|does not lie where"):
            open_weights(tmp_path / "a.pt")


def test_weights_whose_pickle_has_its_name_in_other_cases(tmp_path: Path) -> None:
    """PyTorch finds members in any mixture of cases."""
    from vitrail.weights.files import open_weights

    raw = pickle.PROTO + b"\x02" + as_key(pairs(plain(1))) + pickle.STOP
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name, content in saved({}).items():
            archive.writestr(*((name.replace("data.pkl", "Data.PKL"), raw) if "data.pkl" in name else (name, content)))
    with pytest.raises(UserError, match="has too many parts"):
        open_weights(tmp_path / "a.pt")


@pytest.mark.parametrize("new", [True, False])
def test_pickles_of_weights_are_read_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool) -> None:
    from vitrail.weights.files import open_weights

    names = {f"layer {number}": torch.zeros(1) for number in range(300)}
    torch.save(names, tmp_path / "a.pt", _use_new_zipfile_serialization=new)
    assert len(open_weights(tmp_path / "a.pt").shapes) == 300
    monkeypatch.setattr("vitrail.foreign.largest", lambda: 5000)
    with pytest.raises(UserError, match="bytes, too many for memory"):
        open_weights(tmp_path / "a.pt")


@pytest.mark.parametrize("place", [None, 0, 5 << 30])
def test_ordinary_archives_of_weights_are_opened(tmp_path: Path, place: int | None) -> None:
    """As torch.save writes them, as others do for small ones, and with numbers beyond 4 GiB."""
    from vitrail.weights.files import open_weights

    values = torch.arange(1000.0)
    if place is None:
        torch.save({"a": values}, tmp_path / "a.pt")
    else:
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
            for name, content in saved({"a": values}).items():
                if name.endswith("/data/0"):
                    archive.start_dir = max(archive.start_dir, place)  # type: ignore[attr-defined]  # after a hole
                archive.writestr(name, content)
    assert torch.equal(open_weights(tmp_path / "a.pt").read("a"), values)


# ---------------------------------------------------------------- the one way in


def test_plain_files_alone_are_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert open_plain(tmp_path / "link").read() == b"12345"  # people link large data into place
    with pytest.raises(BadData, match="has 5 bytes, more than the 4 that"):
        read_plain(tmp_path / "a", 4)
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "none")
    check_plain(tmp_path / "none")
    for name, make in MAKERS.items():
        if name == "device" and os.geteuid():
            continue
        make(tmp_path / name)
        for call in (open_plain, read_plain, check_plain):
            with pytest.raises(BadData, match=rf"{name} is a {name}, not a plain file"):
                call(tmp_path / name)


def test_json_is_parsed_within_bounds() -> None:
    assert parse_json(b'{"a": NaN, "b": [1, 2.5]}')["b"] == [1, 2.5]
    for text in ("[" * 100_000, '{"a": 1, "a": 2}', "9" * 5000, "{", b"\xff\xfe\xff"):
        with pytest.raises(ValueError):
            parse_json(text)
    keys = ", ".join(f'"{number}": 1' for number in range(50_000))
    with pytest.raises(ValueError, match="the key '7' is given twice"):  # in one pass
        parse_json(f'{{{keys}, "7": 2}}')


def test_odd_metadata_of_zarr_tell_no_kind(tmp_path: Path) -> None:
    """Where a kind is guessed, values of the wrong type are passed over: the source itself will say so."""
    for number, odd in enumerate(([1], 3, "x", {"metadata": [1]}, {"metadata": {"a": 3}})):
        (tmp_path / f"{number}.zarr").mkdir()
        text = json.dumps({"zarr_format": 3, "node_type": "group", "consolidated_metadata": odd})
        (tmp_path / f"{number}.zarr" / "zarr.json").write_text(text)
        assert guess_kind(str(tmp_path / f"{number}.zarr")) == "zarr"
    for number, odd in enumerate(([1], 3, {"a/.zattrs": 3}, {"a/.zattrs": [1]})):
        (tmp_path / f"{number}-2.zarr").mkdir()
        (tmp_path / f"{number}-2.zarr" / ".zgroup").write_text('{"zarr_format": 2}')
        (tmp_path / f"{number}-2.zarr" / ".zmetadata").write_text(json.dumps({"metadata": odd}))
        assert guess_kind(str(tmp_path / f"{number}-2.zarr")) == "zarr"


def test_an_archive_of_arrays_gives_the_member_that_was_checked(tmp_path: Path) -> None:
    """NumPy itself would take the member `raw` before `raw.npy`."""
    np.save(tmp_path / "raw.npy", VALUES)
    np.save(tmp_path / "other.npy", VALUES[::-1])
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.write(tmp_path / "raw.npy", "raw.npy")
        archive.write(tmp_path / "other.npy", "raw")
    assert np.array_equal(first("numpy", tmp_path / "a.npz", key="raw")[0], VALUES)


def test_names_of_other_files_count_in_their_own_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "linked").symlink_to(tmp_path)
    here = tmp_path / "in" / "a.h5"
    for name in ("b.h5", "below/b.h5", str(tmp_path / "in" / "b.h5"), "linked/b.h5"):
        assert named_file(here, name).name == "b.h5"
    for name in ("../b.h5", "/etc/passwd", "linked/../../b.h5", "http://host/b.h5", "below/../../b.h5"):
        with pytest.raises(BadData, match=r"does not lie in its own folder.*--trust"):
            named_file(here, name)
        with trusted():
            named_file(here, name)
        with trusted(False), pytest.raises(BadData):
            named_file(here, name)


def test_no_recipe_can_trust(tmp_path: Path) -> None:
    tree = {"run": {"steps": 1}, "model": {"kind": "mae"}, "data": {"train": [{"path": "a.h5", "trust": True}]}}
    with pytest.raises(UserError, match="trust"):
        load_recipe(tree)
    with pytest.raises(UserError, match="trust"):
        load_recipe({**tree, "trust": True})


def test_the_word_trust_reaches_the_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from vitrail.cli import main

    path = linked(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["data", "inspect", str(path), "--set", "key=raw"])
    assert caught.value.code == 2
    assert "does not lie in its own folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["data", "inspect", str(path), "--trust", "--set", "key=raw"])
    assert caught.value.code == 0
    with pytest.raises(BadData, match="does not lie in its own folder"):  # it ends with the verb
        opened("hdf5", path, key="raw")


# ---------------------------------------------------------------- HDF5 and netCDF


def secret(folder: Path) -> Path:
    import h5py

    with h5py.File(folder / "secret.h5", "w") as file:
        file["raw"] = VALUES
    return folder / "secret.h5"


def linked(folder: Path) -> Path:
    """A file with an external link to a file elsewhere, and an array of its own."""
    import h5py

    secret(folder)
    (folder / "in").mkdir(exist_ok=True)
    with h5py.File(folder / "in" / "a.h5", "w") as file:
        file["raw"] = h5py.ExternalLink("../secret.h5", "raw")
        file["own"] = VALUES
    return folder / "in" / "a.h5"


def test_hdf5_links_to_other_folders_are_refused(tmp_path: Path) -> None:
    path = linked(tmp_path)
    with pytest.raises(BadData, match=r"a\.h5 names the file '\.\./secret\.h5', which does not lie in its own folder"):
        opened("hdf5", path, key="raw")
    assert np.array_equal(first("hdf5", path, key="own")[0], VALUES)
    with trusted():
        assert np.array_equal(first("hdf5", path, key="raw")[0], VALUES)


def test_hdf5_storage_and_parts_in_other_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import h5py

    secret(tmp_path)
    (tmp_path / "passwords").write_bytes(VALUES.tobytes())
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.h5"
    layout = h5py.VirtualLayout(VALUES.shape, "u1")
    layout[:] = h5py.VirtualSource("../secret.h5", "raw", VALUES.shape)
    between = h5py.VirtualLayout(VALUES.shape, "u1")
    between[:] = h5py.VirtualSource("b.h5", "raw", VALUES.shape)
    with h5py.File(tmp_path / "in" / "b.h5", "w") as file:
        file["raw"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "raw")
    with h5py.File(path, "w") as file:
        file.create_dataset("storage", VALUES.shape, "u1", external=[(str(tmp_path / "passwords"), 0, VALUES.nbytes)])
        file.create_dataset("up", VALUES.shape, "u1", external=[("../passwords", 0, VALUES.nbytes)])
        file.create_virtual_dataset("virtual", layout)
        file.create_virtual_dataset("between", between)
        file.create_dataset("working", VALUES.shape, "u1", external=[("passwords", 0, VALUES.nbytes)])
    for key in ("storage", "up", "virtual", "between"):
        with pytest.raises(BadData, match="does not lie in its own folder"):
            opened("hdf5", path, key=key, missing="fill")
    monkeypatch.chdir(tmp_path)  # where HDF5 would look for it
    with pytest.raises(BadData, match="does not lie in its own folder"):
        opened("hdf5", path, key="working", missing="fill")
    with trusted():
        for key in ("storage", "virtual", "between"):
            assert np.array_equal(first("hdf5", path, key=key)[0], VALUES)
    shutil.copy(tmp_path / "passwords", tmp_path / "in" / "passwords")
    assert np.array_equal(first("hdf5", path, key="working")[0], VALUES)


def test_hdf5_links_in_rings_and_to_fifos_end(tmp_path: Path) -> None:
    import h5py

    os.mkfifo(tmp_path / "fifo.h5")
    virtual = h5py.VirtualLayout(VALUES.shape, "u1")
    virtual[:] = h5py.VirtualSource("fifo.h5", "raw", VALUES.shape)
    again = h5py.VirtualLayout(VALUES.shape, "u1")
    again[:] = h5py.VirtualSource(".", "again", VALUES.shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["own"] = VALUES
        file["soft"], file["other"] = h5py.SoftLink("/other"), h5py.SoftLink("/soft")
        file["ring"] = h5py.ExternalLink("a.h5", "ring")
        file["fifo"] = h5py.ExternalLink("fifo.h5", "raw")
        file["below/up"] = file["/"]
        file.create_virtual_dataset("virtual", virtual)
        file.create_virtual_dataset("again", again)
    for key, words in {
        "soft": "more than 16 links",
        "ring": "more than 16 links",
        "fifo": "is a FIFO",
        "virtual": "is a FIFO",
        "again": "in a ring",
    }.items():
        error = within(lambda key=key: opened("hdf5", tmp_path / "a.h5", key=key))
        assert isinstance(error, BadData), error
        assert words in str(error)
    assert np.array_equal(within(lambda: first("hdf5", tmp_path / "a.h5", key="below/up/own"))[0], VALUES)


def mapped(path: Path, file: str, dataset: str, *, pattern: bool = False) -> Path:
    """A virtual dataset `raw` that is one other dataset, whatever its name, or a pattern of them."""
    import h5py

    rows, *rest = VALUES.shape
    most = (h5py.h5s.UNLIMITED if pattern else rows, *rest)
    space, properties = h5py.h5s.create_simple(VALUES.shape, most), h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    if pattern:
        ones = (1,) * len(rest)
        space.select_hyperslab((0,) * VALUES.ndim, (h5py.h5s.UNLIMITED, *ones), VALUES.shape, VALUES.shape)
    source = h5py.h5s.create_simple(VALUES.shape)
    properties.set_virtual(space, file.encode(), dataset.encode(), source)
    with h5py.File(path, "w") as opened:
        whole = h5py.h5s.create_simple(VALUES.shape, most)
        h5py.h5d.create(opened.id, b"raw", h5py.h5t.NATIVE_UINT8, whole, properties)
    return path


def test_names_of_parts_that_hdf5_takes_for_others_are_refused(tmp_path: Path) -> None:
    import h5py

    elsewhere = h5py.ExternalLink(str(secret(tmp_path)), "raw")
    folder = tmp_path / "in"
    folder.mkdir()
    for name, nodes in {
        "x%%": {"raw": VALUES},  # what lies where the names say is no link
        "x%": {"raw": elsewhere},
        "y": {"d%%": VALUES, "d%": elsewhere, "d%b": VALUES, "d0": elsewhere},
        "p0": {"d%%": VALUES, "d%": elsewhere, "raw": VALUES, "raw0": VALUES},
        "w%%": {"raw": VALUES},
    }.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for key, value in nodes.items():
                file[key] = value
    os.mkfifo(folder / "w%.h5")
    for number, (file, dataset, pattern) in enumerate(
        (
            ("x%%.h5", "raw", False),
            ("y.h5", "d%%", False),
            ("p%b.h5", "d%%", True),
            ("y.h5", "d%b", True),
            ("w%%.h5", "raw", False),
        )
    ):
        path = mapped(folder / f"{number}.hdf5", file, dataset, pattern=pattern)
        for missing in ("error", "fill"):
            error = within(lambda path=path, missing=missing: first("hdf5", path, missing=missing))
            assert isinstance(error, BadData), error
            assert f"{number}.hdf5 has a part in {file!r}, dataset {dataset!r}: of names with %" in str(error)
    for dataset in ("raw", "raw%b"):  # ordinary patterns
        path = mapped(folder / "pattern.hdf5", "p%b.h5", dataset, pattern=True)
        assert np.array_equal(within(lambda path=path: first("hdf5", path))[0], VALUES)
    with trusted():  # the names that HDF5 makes of them are those that are looked at
        assert np.array_equal(first("hdf5", folder / "0.hdf5")[0], VALUES)
        with pytest.raises(BadData, match="is a FIFO"):
            opened("hdf5", folder / "4.hdf5")


def test_a_pattern_of_more_files_than_are_looked_at_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import h5py

    from vitrail.data.formats import hdf5 as hdf5_links

    for number in range(3):
        with h5py.File(tmp_path / f"p{number}.h5", "w") as file:
            file["raw"] = VALUES
    path = mapped(tmp_path / "all.hdf5", "p%b.h5", "raw", pattern=True)
    monkeypatch.setattr(hdf5_links, "MOST_PARTS", 3)
    assert np.array_equal(first("hdf5", path)[0][: len(VALUES)], VALUES)
    monkeypatch.setattr(hdf5_links, "MOST_PARTS", 2)
    with pytest.raises(BadData, match="has parts in more than 2 files"):
        opened("hdf5", path)


def test_netcdf_with_values_elsewhere_is_refused(tmp_path: Path) -> None:
    import h5py

    (tmp_path / "passwords").write_bytes(VALUES.tobytes())
    with h5py.File(tmp_path / "storage.nc", "w") as file:
        file.create_dataset("t", VALUES.shape, "u1", external=[(str(tmp_path / "passwords"), 0, VALUES.nbytes)])
    secret(tmp_path)
    with h5py.File(tmp_path / "link.nc", "w") as file:
        file["t"] = h5py.ExternalLink("secret.h5", "raw")
    with pytest.raises(BadData, match=r"keeps the values of 't' in other files.*--trust"):
        opened("netcdf", tmp_path / "storage.nc")
    with pytest.raises(BadData, match=r"has a link at 't', which may lead to another file.*--trust"):
        opened("netcdf", tmp_path / "link.nc")


# ---------------------------------------------------------------- GDAL and TIFF


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    yield from listening()


def scene(path: Path, **tags: str) -> Path:
    import rasterio

    with rasterio.open(path, "w", driver="GTiff", width=12, height=10, count=1, dtype="uint8") as raster:
        raster.write(VALUES[:1])
        if tags:
            raster.update_tags(ns="OVERVIEWS", **tags)
    return path


def vrt(source: str) -> str:
    return (
        '<VRTDataset rasterXSize="12" rasterYSize="10"><VRTRasterBand dataType="Byte" band="1"><SimpleSource>'
        f'<SourceFilename relativeToVRT="0">{source}</SourceFilename><SourceBand>1</SourceBand></SimpleSource>'
        "</VRTRasterBand></VRTDataset>"
    )


@pytest.mark.filterwarnings("ignore")
def test_gdal_reads_no_other_files_and_no_network(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    address, asked = server
    elsewhere = scene(tmp_path / "elsewhere.tif")
    (tmp_path / "in").mkdir()
    kinds_of = {
        "a.vrt": vrt(str(elsewhere)),
        "named.tif": vrt(str(elsewhere)),
        "network.vrt": vrt(f"/vsicurl/{address}/x.tif"),
        "network.tif": vrt(f"/vsicurl/{address}/x.tif"),
        "wms.tif": f'<GDAL_WMS><Service name="TMS"><ServerUrl>{address}/x</ServerUrl></Service></GDAL_WMS>',
    }
    for name, text in kinds_of.items():
        (tmp_path / "in" / name).write_text(text)
        with pytest.raises(BadData, match=r"no GeoTIFF, JPEG 2000, PNG, JPEG or ENVI file.*--trust"):
            opened("geotiff", tmp_path / "in" / name)
    scene(tmp_path / "in" / "o.tif", OVERVIEW_FILE=f"/vsicurl/{address}/overviews.tif")
    with pytest.raises(BadData, match=r"keeps its overviews in '/vsicurl/.*--trust"):
        opened("geotiff", tmp_path / "in" / "o.tif")
    assert asked == []
    with trusted():
        assert np.array_equal(first("geotiff", tmp_path / "in" / "a.vrt"), VALUES[:1])
    assert np.array_equal(first("geotiff", elsewhere), VALUES[:1])


def test_ome_tiff_that_names_other_folders_is_refused(tmp_path: Path) -> None:
    import tifffile

    tifffile.imwrite(tmp_path / "secret.tif", VALUES)
    (tmp_path / "in").mkdir()
    for number, name in enumerate(("../secret.tif", str(tmp_path / "secret.tif"))):
        text = (
            '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:1">'
            '<Image ID="Image:0"><Pixels ID="P:0" DimensionOrder="XYZCT" Type="uint8" SizeX="12" SizeY="10" SizeZ="6" '
            f'SizeC="1" SizeT="1"><TiffData IFD="0" PlaneCount="6"><UUID FileName="{name}">urn:uuid:2</UUID></TiffData>'
            "</Pixels></Image></OME>"
        )
        path = tmp_path / "in" / f"{number}.ome.tif"
        tifffile.imwrite(path, VALUES[0], description=text, metadata=None)
        with pytest.raises(BadData, match=r"secret\.tif', which does not lie in its own folder.*--trust"):
            opened("tiff", path)


def test_entities_of_xml_do_not_grow(tmp_path: Path) -> None:
    """A billion laughs, and a file by name, in the description of an OME-TIFF."""
    import tifffile

    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    for text in (
        f'<?xml version="1.0"?><!DOCTYPE OME [<!ENTITY l0 "{"lol" * 1000}">{laughs}]><OME>&l9;</OME>',
        '<?xml version="1.0"?><!DOCTYPE OME [<!ENTITY e SYSTEM "file:///etc/passwd">]><OME>&e;</OME>',
    ):
        tifffile.imwrite(tmp_path / "a.ome.tif", VALUES[0], description=text, metadata=None)
        found = within(lambda: first("tiff", tmp_path / "a.ome.tif"))
        assert isinstance(found, UserError) or np.array_equal(found[0], VALUES[0])


def test_jpeg_in_tiff_is_read(tmp_path: Path) -> None:
    """Its decoder looks into the file when it is made, which must be before the file is closed."""
    import tifffile

    tifffile.imwrite(tmp_path / "a.tif", np.full((32, 32, 3), 90, np.uint8), compression="jpeg", tile=(16, 16))
    assert np.array_equal(first("tiff", tmp_path / "a.tif"), np.full((3, 32, 32), 90))


# ---------------------------------------------------------------- odd values


def test_yaml_nested_without_an_end_is_refused() -> None:
    for text in ("[" * 100_000, "a: " + "{a: " * 5_000, "- " * 500 + "1"):
        with pytest.raises(UserError):
            yaml.parse(text)


def test_a_block_of_n5_that_lacks_voxels_is_no_zeros(tmp_path: Path) -> None:
    import gzip

    facts = {"dimensions": [4, 4], "blockSize": [4, 4], "dataType": "uint8", "compression": {"type": "gzip"}}
    (tmp_path / "a.n5" / "0").mkdir(parents=True)
    (tmp_path / "a.n5" / "attributes.json").write_text(json.dumps(facts))
    block = struct.pack(">HH2I", 0, 2, 4, 3) + gzip.compress(bytes(12))
    (tmp_path / "a.n5" / "0" / "0").write_bytes(block)
    with pytest.raises(BadData, match="fewer than the array has there"):
        first("n5", tmp_path / "a.n5")


def test_chunks_of_one_voxel_take_little_memory(tmp_path: Path) -> None:
    import zarr

    array = zarr.create_array(tmp_path / "a.zarr", shape=(4, 4), chunks=(1, 1), dtype="u1")
    array[:] = VALUES[1, :4, :4]
    assert np.array_equal(first("zarr", tmp_path / "a.zarr")[0], VALUES[1, :4, :4])
    from vitrail.data.chunks.decoded import ChunkCache, open_chunks

    cache, reader = ChunkCache(limit=5000), open_chunks(tmp_path / "a.zarr")
    assert np.array_equal(cache.read(reader, (slice(0, 4), slice(0, 4))), VALUES[1, :4, :4])
    assert 0 < len(cache) < 10  # each place is an object of some hundred bytes


# ---------------------------------------------------------------- changed bytes


def check_mutants(folder: Path, seeds: range) -> None:
    made = originals(folder / "valid")
    cases = []
    for number, make in enumerate(made.values()):
        work = folder / str(number)
        work.mkdir()
        cases += make(work, seeds)
    outcomes = run_cases(cases, limit=3000)
    bugs = {name: outcome for name, outcome in outcomes.items() if outcome.startswith("BUG")}
    assert not bugs, "\n".join(f"{name}: {outcome}" for name, outcome in bugs.items())
    assert any(outcome.startswith("array") for outcome in outcomes.values())
    assert len(outcomes) == len(cases)


def test_files_with_changed_bytes_give_arrays_or_sentences(tmp_path: Path) -> None:
    check_mutants(tmp_path, range(10))


@pytest.mark.slow
def test_many_files_with_changed_bytes_give_arrays_or_sentences(tmp_path: Path) -> None:
    check_mutants(tmp_path, range(100, 300))
