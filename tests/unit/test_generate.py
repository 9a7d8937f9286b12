"""Generated tissue: reproducible, with the contrasts of EM and the promised noise; and its OME-Zarr on disk."""

import numpy as np
import pytest
import zarr

from vitrail.data.generate import LABEL_NAMES, Volume, generate_em, write_ome_zarr
from vitrail.errors import UserError

SHAPE = (40, 56, 64)


@pytest.fixture(scope="module")
def volume() -> Volume:
    return generate_em(SHAPE, seed=3)


@pytest.fixture(scope="module")
def clean() -> Volume:
    return generate_em(SHAPE, seed=3, noise=0)


def test_same_seed_same_voxels_whatever_the_slabs(volume: Volume) -> None:
    again = generate_em(SHAPE, seed=3, slab=7)
    assert np.array_equal(again.image, volume.image)
    assert np.array_equal(again.labels, volume.labels)
    other = generate_em(SHAPE, seed=4)
    assert not np.array_equal(other.image, volume.image)


def test_shape_types_and_names(volume: Volume) -> None:
    assert volume.image.shape == volume.labels.shape == SHAPE
    assert volume.image.dtype == volume.labels.dtype == np.uint8
    assert volume.label_names == LABEL_NAMES == ("background", "membrane", "mitochondria", "vesicles")
    assert generate_em(16).image.shape == (16, 16, 16)


@pytest.mark.parametrize("seed", [0, 1])
def test_every_structure_is_there_with_its_contrast(seed: int) -> None:
    volume = generate_em((64, 80, 96), seed=seed)
    means = [volume.image[volume.labels == value].mean() for value in range(4)]
    shares = [(volume.labels == value).mean() for value in range(4)]
    assert means[1] < means[2] < means[0]  # membrane, mitochondria, cytoplasm
    assert means[0] - means[1] > 50
    assert 0.5 < shares[0] < 0.85
    assert 0.1 < shares[1] < 0.35
    assert 0.01 < shares[2] < 0.2
    assert 0.002 < shares[3] < 0.06


def test_noise_has_the_promised_share_of_the_variance(volume: Volume, clean: Volume) -> None:
    assert np.array_equal(volume.labels, clean.labels)
    noise = volume.image.astype(float) - clean.image
    assert 0.10 < noise.var() / volume.image.var() < 0.12
    assert abs(noise.mean()) < 1
    neighbours = (noise[:, :, 1:] * noise[:, :, :-1]).mean() / noise.var()
    assert abs(neighbours) < 0.02  # white: nothing to learn from it


def test_structure_can_be_seen_from_nearby(clean: Volume) -> None:
    """A hidden patch must be predictable: neighbours at two voxels still agree, those far away do not."""
    image = clean.image.astype(float) - clean.image.mean()

    def correlation(gap: int) -> float:
        return float((image[:, :, gap:] * image[:, :, :-gap]).mean() / image.var())

    assert correlation(1) > 0.75
    assert correlation(2) > 0.4
    assert abs(correlation(24)) < 0.35


def test_membranes_are_thin_sheets(clean: Volume) -> None:
    """Two to three voxels thick: few membrane voxels have only membrane around them at a distance of two."""
    membrane = clean.labels == 1
    core = membrane[2:-2, 2:-2, 2:-2].copy()
    for axis in range(3):
        for step in (-2, 2):
            core &= np.roll(membrane, step, axis)[2:-2, 2:-2, 2:-2]
    assert core.mean() < 0.15 * membrane.mean()


@pytest.mark.parametrize(
    ("options", "word"), [({"shape": (4, 40, 40)}, "shape"), ({"noise": 1.0}, "noise"), ({"seed": -1}, "seed")]
)
def test_wrong_requests_are_refused(options: dict, word: str) -> None:
    with pytest.raises(UserError, match=f"{word} = "):
        generate_em(**options)


@pytest.mark.parametrize(("version", "zarr_format"), [("0.4", 2), ("0.5", 3)])
def test_written_pyramid(tmp_path, volume: Volume, version: str, zarr_format: int) -> None:
    path = write_ome_zarr(tmp_path / "em.zarr", volume, spacing=(16, 8, 8), levels=3, version=version, chunk=24)
    group = zarr.open_group(str(path), mode="r")
    assert group.metadata.zarr_format == zarr_format
    block = dict(group.attrs) if version == "0.4" else group.attrs["ome"]
    entry = block["multiscales"][0]
    assert (entry if version == "0.4" else block)["version"] == version
    assert [(a["name"], a["type"], a["unit"]) for a in entry["axes"]] == [(n, "space", "nanometer") for n in "zyx"]
    for level, dataset in enumerate(entry["datasets"]):
        scale, shift = dataset["coordinateTransformations"]
        assert scale == {"type": "scale", "scale": [16.0 * 2**level, 8.0 * 2**level, 8.0 * 2**level]}
        half = (2**level - 1) / 2
        assert shift == {"type": "translation", "translation": [16 * half, 8 * half, 8 * half]}

    assert np.array_equal(group["s0"][:], volume.image)
    assert group["s0"].chunks == (24, 24, 24)
    coarse = group["s1"][:]
    assert coarse.shape == (20, 28, 32)
    assert coarse[1, 2, 3] == np.rint(volume.image[2:4, 4:6, 6:8].mean())

    labels = group["labels"]
    names = labels.attrs["labels"] if version == "0.4" else labels.attrs["ome"]["labels"]
    assert names == ["structures"]
    assert np.array_equal(labels["structures/s0"][:], volume.labels)
    block_of_8 = volume.labels[2:4, 4:6, 6:8].ravel()
    assert labels["structures/s1"][1, 2, 3] == np.bincount(block_of_8).argmax()
    attributes = labels["structures"].attrs
    described = (attributes if version == "0.4" else attributes["ome"])["image-label"]["properties"]
    assert described[2] == {"label-value": 2, "name": "mitochondria"}


def test_odd_sizes_and_empty_chunks_are_written_whole(tmp_path) -> None:
    image = np.zeros((9, 10, 11), np.uint8)
    image[8, 9, 10] = 200
    path = write_ome_zarr(tmp_path / "odd.zarr", Volume(image, image), levels=2, chunk=4)
    group = zarr.open_group(str(path), mode="r")
    assert group["s1"].shape == (5, 5, 6)
    assert group["s1"][4, 4, 5] == 100  # half of its 8 voxels: the last plane stands for two on z and x
    chunks = [file for file in (path / "s0").rglob("*") if file.is_file() and file.parent != path / "s0"]
    assert len(chunks) == 3 * 3 * 3


def test_existing_data_is_kept_unless_told(tmp_path, volume: Volume) -> None:
    path = tmp_path / "em.zarr"
    path.mkdir()
    (path / "precious.txt").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        write_ome_zarr(path, volume)
    assert (path / "precious.txt").read_text() == "mine"
    with pytest.raises(UserError, match="carries no mark of vitrail"):
        write_ome_zarr(path, volume, levels=1, force=True)
    assert (path / "precious.txt").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["em.zarr"]


def test_a_failed_write_leaves_nothing(tmp_path, volume: Volume, monkeypatch) -> None:
    import vitrail.data.formats.ngff as writer

    def fail(blocks: np.ndarray) -> np.ndarray:
        raise OSError("disk full")

    monkeypatch.setattr(writer, "_average", fail)
    with pytest.raises(UserError, match=r"em\.zarr cannot be written \(disk full\); choose another path"):
        write_ome_zarr(tmp_path / "em.zarr", volume)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"version": "0.3"}, {"levels": 0}, {"spacing": (8, 8)}, {"chunk": 0}])
def test_wrong_pyramids_are_refused(tmp_path, volume: Volume, options: dict) -> None:
    with pytest.raises(UserError):
        write_ome_zarr(tmp_path / "em.zarr", volume, **options)
    assert list(tmp_path.iterdir()) == []
