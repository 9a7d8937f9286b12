"""Grids: variables, levels, regions, labels and numbers that are none, on arrays in memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from vitrail.data.grid import Entry, GridConfig, GridSource, Stored
from vitrail.data.source import ClassifiedSource, LabelledSource, Source
from vitrail.data.stored import plain_unit, pooled, split_axes
from vitrail.errors import BadData, UserError

VALUES = np.random.default_rng(0).integers(1, 255, (8, 10, 12)).astype(np.uint8)


def store(values: np.ndarray, axes: str = "zyx", name: str = "a", **more: Any) -> Stored:
    """An array in memory as if a format had stored it."""
    return Stored(
        name,
        values.shape,
        tuple(axes),
        values.dtype,
        more.pop("chunk", (1,) * values.ndim),
        lambda w: values[w],
        **more,
    )


def source(*images: Stored, labels: Stored | None = None, **keys: Any) -> GridSource:
    return GridSource(GridConfig(path="p", **keys), [Entry("a", images, labels)], kind="test")


def window(*bounds: int) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True))


def everything(of: GridSource, item: int = 0) -> np.ndarray:
    return of.read(item, tuple(slice(0, n) for n in of.items[item].shape))


def scaled(factor: float, spacing: float = 4.0) -> dict[str, Any]:
    return {
        "spacing": dict.fromkeys("zyx", spacing * factor),
        "origin": dict.fromkeys("zyx", spacing * (factor - 1) / 2),
        "unit": "nm",
    }


def pyramid() -> Stored:
    fine = VALUES.astype(np.float32)
    middle = fine.reshape(4, 2, 5, 2, 6, 2).mean((1, 3, 5))
    return replace(store(fine, **scaled(1)), levels=(store(middle, name="a1", **scaled(2)),))


def test_a_window_of_a_region() -> None:
    made = source(store(VALUES, chunk=(4, 4, 4)), region={"y": [0.5, 1], "x": [3, 11]})
    assert isinstance(made, Source)
    assert isinstance(made, LabelledSource)
    assert isinstance(made, ClassifiedSource)
    item = made.items[0]
    assert (item.shape, item.chunk, item.origin) == ((8, 5, 8), (4, 4, 4), (0, 1, 3))
    assert (item.spacing, item.unit, item.scale, item.slices) == ((1.0,) * 3, None, (1.0,) * 3, None)
    assert np.array_equal(made.read(0, window(2, 5, 0, 4, 1, 8))[0], VALUES[2:5, 5:9, 4:11])
    assert made.describe()["region"] == {"z": [0, 8], "y": [5, 10], "x": [3, 11]}
    with pytest.raises(ValueError, match="does not lie inside"):
        made.read(0, window(0, 9, 0, 1, 0, 1))


def test_channels_and_images_are_variables() -> None:
    several = np.stack([VALUES, VALUES // 2, VALUES // 3], axis=-1)  # channels last
    both = (store(several, "zyxc", channels=("a", "b", "c")), store(VALUES // 4, channels=("d",)))
    assert source(*both).variables == ("a", "b", "c", "d")
    assert np.array_equal(everything(source(*both)), np.stack([VALUES, VALUES // 2, VALUES // 3, VALUES // 4]))
    picked = source(*both, variables=["d", "b"])
    assert np.array_equal(everything(picked), np.stack([VALUES // 4, VALUES // 2]))
    assert np.array_equal(everything(source(*both, variables=["c", "b"])), np.stack([VALUES // 3, VALUES // 2]))
    assert source(*both, variables=list("wxyz")).variables == tuple("wxyz")
    with pytest.raises(UserError, match="has no 'e'; choose from a, b, c, d, or rename all 4"):
        source(*both, variables=["e"])
    with pytest.raises(UserError, match="has no 'D'; did you mean 'd'"):  # and no swap of channels
        source(*both, variables=["c", "b", "a", "D"])
    with pytest.raises(UserError, match="has no 'D'"):
        source(*both, variables=["D", "C", "B", "A"])
    assert source(*both, variables=list("ABCD")).variables == tuple("ABCD")
    assert source(store(VALUES), store(VALUES)).variables == ("channel0", "channel1")
    for variables, words in [(["a", "a"], "different names"), ([], "different names"), (["a", "b"], "no channel axis")]:
        with pytest.raises(UserError, match=words):
            source(store(VALUES), variables=variables)
    with pytest.raises(BadData, match="channels of one item must have the same shape"):
        source(store(VALUES), store(VALUES[1:], name="b"))


def test_only_channels_that_are_needed_are_read() -> None:
    seen = []
    values = np.stack([VALUES] * 5)
    stored = replace(store(values, "czyx", channels=tuple("abcde")), read=lambda w: (seen.append(w[0]), values[w])[1])
    everything(source(stored, variables=["d", "b"]))
    assert seen == [slice(1, 4)]


def test_moments_are_chosen_or_items() -> None:
    values = np.stack([VALUES, VALUES // 2])
    stored = store(values, "tzyx")
    assert np.array_equal(everything(source(stored, time=1))[0], VALUES // 2)
    with pytest.raises(UserError, match="time = 2 does not exist in a; choose 0 to 1"):
        source(stored, time=2)
    images = (stored,)
    entries = [Entry(f"moment {n}", images, moment=n) for n in range(2)]
    made = GridSource(GridConfig(path="p"), entries, kind="test")
    assert np.array_equal(everything(made, 0)[0], VALUES)
    assert np.array_equal(everything(made, 1)[0], VALUES // 2)
    assert made.entries[0].images is made.entries[1].images  # prepared once


def test_what_the_recipe_says_counts() -> None:
    made = source(store(VALUES, "abc", spacing={"a": 2.0}), axes="zyx", voxel_size=[40, 4, 4], unit="nm")
    assert (made.axes, made.items[0].spacing, made.items[0].unit) == (("z", "y", "x"), (40.0, 4.0, 4.0), "nanometer")
    assert split_axes("time, latitude,longitude") == ("time", "latitude", "longitude")
    told = store(VALUES, spacing=dict.fromkeys("zyx", 0.004), unit="um")
    assert source(told, unit="nanometer").items[0].spacing == pytest.approx((4.0,) * 3)
    assert source(told).items[0].unit == "micrometer"
    for keys, words in [
        ({"axes": "zy"}, "has 3 axes of sizes"),
        ({"axes": "zzx"}, "has 3 axes of sizes"),
        ({"voxel_size": [1, 1]}, "one positive number for each of the axes z, y, x"),
        ({"voxel_size": [1, 1, 0]}, "one positive number"),
        ({"unit": "degree"}, "cannot be converted"),
    ]:
        with pytest.raises(UserError, match=words):
            source(told, **keys)


@pytest.mark.parametrize(
    ("unit", "full"),
    [("µm", "micrometer"), ("microns", "micrometer"), ("", None), ("pixel", None), ("parsec", "parsec"), (None, None)],
)
def test_units(unit: str | None, full: str | None) -> None:
    assert plain_unit(unit) == full


@pytest.mark.parametrize(
    ("wanted", "level", "spacing", "scale"),
    [
        ([4, 4, 4], 0, (4.0,) * 3, (1.0,) * 3),
        ([6, 6, 6], 0, (4.0,) * 3, (1.5,) * 3),
        ([8.05, 8, 8], 1, (8.0,) * 3, (1.0,) * 3),  # within 1 %
        ([15, 15, 15], 1, (8.0,) * 3, (1.875,) * 3),
        ([16, 16, 16], 1, (16.0,) * 3, (1.0,) * 3),  # pooled once
        ([40, 8, 8], 1, (32.0, 8.0, 8.0), (1.25, 1.0, 1.0)),
        ([8, 8, 4], 0, (8.0, 8.0, 4.0), (1.0, 1.0, 1.0)),  # no level is as fine along x: pooled from the finest
    ],
)
def test_the_level_leaves_less_than_a_factor_of_two(wanted: list, level: int, spacing: tuple, scale: tuple) -> None:
    made = source(pyramid(), spacing=wanted)
    assert (made.level, made.items[0].spacing) == (level, spacing)
    assert made.items[0].scale == pytest.approx(scale)
    assert everything(made).shape[1:] == made.items[0].shape


def test_finer_than_the_file_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    made = source(pyramid(), spacing=[2, 4, 4])
    assert made.items[0].scale == (0.5, 1.0, 1.0)
    assert "coarser than the spacing" in caplog.text


def test_levels_by_number() -> None:
    made = source(pyramid(), level=1)
    assert made.items[0].shape == (4, 5, 6)
    assert made.describe()["translation"] == [2.0, 2.0, 2.0]  # half a coarse voxel less half a fine one
    assert [entry["spacing"] for entry in made.describe()["levels"]] == [[4.0] * 3, [8.0] * 3]
    for keys, words in [
        ({"level": 2}, "level = 2 does not exist in a; choose 0 to 1"),
        ({"level": 0, "spacing": [4, 4, 4]}, "both level and spacing"),
        ({"spacing": [4, 4]}, "one positive number for each of the axes"),
    ]:
        with pytest.raises(UserError, match=words):
            source(pyramid(), **keys)
    with pytest.raises(UserError, match="a does not tell its voxel size along z, y, x; give it as `voxel_size`"):
        source(store(VALUES), spacing=[4, 4, 4])
    assert source(store(VALUES), spacing=[6, 6, 6], voxel_size=[4, 4, 4]).items[0].scale == (1.5,) * 3


def test_pooling_equals_means_of_boxes() -> None:
    made = pooled(store(VALUES[:, :9], **scaled(1)), (2, 4, 1))
    assert made.shape == (4, 2, 12)  # what does not fill a box is left out
    expected = np.rint(VALUES[:, :8].reshape(4, 2, 2, 4, 12).mean((1, 3))).astype(np.uint8)
    assert np.array_equal(made.read(window(1, 4, 0, 2, 3, 9)), expected[1:4, :, 3:9])
    assert made.origin == {"z": 2.0, "y": 6.0, "x": 0.0}
    labels = pooled(store(VALUES), (2, 2, 2), labels=True)
    assert np.array_equal(labels.read(window(0, 4, 0, 5, 0, 6)), VALUES[::2, ::2, ::2])


def test_labels_in_a_box_restrict_the_region() -> None:
    labels = VALUES[2:6, 3:9, 5:12]
    box = store(
        labels, name="crop", spacing=dict.fromkeys("zyx", 4.0), origin={"z": 8.0, "y": 12.0, "x": 20.0}, names={1: "er"}
    )
    made = source(store(VALUES, **scaled(1)), labels=box, region={"x": [0, 0.5]})
    assert made.items[0].shape == (4, 6, 4)
    assert np.array_equal(made.read(0, window(1, 3, 0, 6, 0, 2))[0], VALUES[3:5, 3:9, 5:7])
    assert np.array_equal(made.read_labels(0, window(1, 3, 0, 6, 0, 2)), VALUES[3:5, 3:9, 5:7])
    assert (made.label_names, made.label_dtype) == ({1: "er"}, np.uint8)
    whole = source(store(VALUES, **scaled(1)), labels=box).items[0]
    assert whole.shape == labels.shape


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"origin": {"z": 8.0, "y": 14.0, "x": 20.0}}, "do not cover the image .* 3.5"),  # half a voxel beside
        ({"origin": {"z": 20.0, "y": 12.0, "x": 20.0}}, "do not cover the image"),  # reaches out of it
        ({"origin": {}}, "do not cover the image"),  # no place told: the shapes must be equal
        ({"spacing": dict.fromkeys("zyx", 2.0)}, r"no level of spacing \[4.0, 4.0, 4.0\]"),
        ({"dtype": np.dtype("f4")}, "must be one whole number a voxel"),
        ({"axes": ("x", "y", "z")}, "write them in the same order"),
    ],
)
def test_labels_that_do_not_fit(changes: dict, words: str) -> None:
    labels = VALUES[2:6, 3:9, 5:12]
    box = store(labels, spacing=dict.fromkeys("zyx", 4.0), origin={"z": 8.0, "y": 12.0, "x": 20.0})
    with pytest.raises(BadData, match=words):
        source(store(VALUES, **scaled(1)), labels=replace(box, **changes))


def test_labels_follow_the_level_of_the_image() -> None:
    fine, coarse = VALUES // 64, VALUES[::2, ::2, ::2] // 64
    labels = replace(store(fine, **scaled(1)), levels=(store(coarse, **scaled(2)),))
    made = source(pyramid(), labels=labels, level=1)
    assert np.array_equal(made.read_labels(0, window(0, 4, 0, 5, 0, 6)), coarse)
    made = source(pyramid(), labels=store(fine, **scaled(1)), spacing=[16, 16, 16])  # labels without levels
    assert np.array_equal(made.read_labels(0, window(0, 2, 0, 2, 0, 3)), fine[::4, ::4, ::4][:2, :2, :3])
    bare = source(pyramid(), labels=store(fine), level=0)  # a file that tells no voxel size, of the same shape
    assert np.array_equal(bare.read_labels(0, window(0, 8, 0, 10, 0, 12)), fine)
    with pytest.raises(UserError, match="without labels"):
        source(store(VALUES)).read_labels(0, window(0, 1, 0, 1, 0, 1))


def test_labels_by_another_number() -> None:
    made = source(store(VALUES), labels=store((VALUES > 99) * np.uint8(255)), label_map={255: 1})
    assert np.array_equal(made.read_labels(0, window(0, 8, 0, 10, 0, 12)), VALUES > 99)
    with pytest.raises(UserError, match=r"label_map = .* uint8"):
        source(store(VALUES), labels=store(VALUES), label_map={255: 300})
    # What one entry writes is not read by the next: two classes change places.
    few = (VALUES % 4).astype(np.uint8)
    made = source(store(VALUES), labels=store(few), label_map={0: 1, 1: 0, 2: 3})
    expected = np.array([1, 0, 3, 3], np.uint8)[few]
    assert np.array_equal(made.read_labels(0, window(0, 8, 0, 10, 0, 12)), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -9999.0])
def test_no_data_is_named_or_filled(bad: float) -> None:
    values = VALUES.astype(np.float32)
    values[3, 4, 5] = bad
    stored = store(values, nodata=-9999.0)
    assert np.isfinite(source(stored).read(0, window(0, 3, 0, 10, 0, 12))).all()
    with pytest.raises(BadData, match=r"a holds \S+ at z = 3, y = 4, x = 5.*nodata: fill"):
        everything(source(stored))
    expected = values.copy()
    expected[3, 4, 5] = 7
    assert np.array_equal(everything(source(stored, nodata="fill", fill_value=7))[0], expected)
    pool = replace(stored, **scaled(1))
    with pytest.raises(BadData, match="z = 3"):  # never averaged
        everything(source(pool, spacing=[8, 8, 8]))


def test_masks_and_marks_of_whole_numbers() -> None:
    valid = VALUES[1, 2, 3] != VALUES
    masked = store(VALUES, valid=lambda w: valid[w])
    with pytest.raises(BadData, match="marks no data"):
        everything(source(masked))
    expected = np.where(valid, VALUES, 0)
    assert np.array_equal(everything(source(masked, nodata="fill"))[0], expected)
    marked = store(VALUES, nodata=float(VALUES[1, 2, 3]))
    assert np.array_equal(everything(source(marked, nodata="fill"))[0], expected)
    for value in (0.5, -1, 256.0, float("nan")):
        with pytest.raises(UserError, match=r"fill_value = \S+ of p is no uint8"):
            source(marked, nodata="fill", fill_value=value)


def test_types_that_go_together() -> None:
    def two(a: str, b: str) -> GridSource:
        entries = [Entry(t, (store(VALUES.astype(t), name=t),)) for t in (a, b)]
        return GridSource(GridConfig(path="p"), entries, kind="test")

    assert two("i2", "f4").dtype == np.float32
    assert two("i2", "f4").read(0, window(0, 1, 0, 1, 0, 1)).dtype == np.float32
    assert two(">u2", "<u2").dtype == np.uint16
    with pytest.raises(BadData, match=r"u2 has uint16 values but u1 has uint8.*another scale"):
        two("u1", "u2")
    for wrong in ("c8", "S3", "M8[s]"):
        with pytest.raises(BadData, match="only whole numbers, floats and booleans"):
            source(replace(store(VALUES), dtype=np.dtype(wrong)))
    with pytest.raises(BadData, match="is empty"):
        source(store(VALUES[:0]))
    with pytest.raises(UserError, match=r"has 4 axes of space .* name the others with `axes`"):
        source(store(VALUES[None], "qzyx"))
    with pytest.raises(BadData, match="gave 1 x 1 x 1 values for a window of 2 x 1 x 1"):
        source(replace(store(VALUES), read=lambda w: VALUES[:1, :1, :1])).read(0, window(0, 2, 0, 1, 0, 1))


def test_items_by_hash_and_by_order() -> None:
    entries = [Entry(f"{n}", (store(VALUES),), label=n % 2) for n in range(20)]

    def names(**keys: Any) -> list[str]:
        return [i.name for i in GridSource(GridConfig(path="p", **keys), entries, kind="t", class_names="ab").items]

    assert len(names()) == 20
    left, right = names(split=(0, 0.7)), names(split=(0.7, 1))
    assert sorted(left + right) == sorted(names())
    assert left
    assert right
    assert names(start=0.5) == [str(n) for n in range(10, 20)]
    assert names(end=0.25) + names(start=0.25) == names()
    with pytest.raises(UserError, match="holds none of its 20 items"):
        names(start=0, end=0.01)
    with pytest.raises(UserError, match="holds no item"):
        GridSource(GridConfig(path="p"), [], kind="t")
    mixed = [entries[0], Entry("x", (store(VALUES[0], "yx", name="flat"),))]
    with pytest.raises(UserError, match="flat has the axes y, x"):
        GridSource(GridConfig(path="p"), mixed, kind="t")


def test_slices() -> None:
    assert source(store(VALUES), slices="y").items[0].slices == 1
    for stored in (store(VALUES), store(VALUES[0], "yx")):
        with pytest.raises(UserError, match="must be one of the three axes"):
            source(stored, slices="w")


def test_keys_are_checked() -> None:
    adapter = TypeAdapter(GridConfig)
    made = adapter.validate_python({"path": "a", "label_map": {255: 1}, "statistics": {"mean": [1], "std": [2]}})
    assert made.label_map == {255: 1}
    for wrong in (
        {"weight": 0},
        {"split": [0.5, 0.2]},
        {"start": 0.5, "end": 0.5},
        {"statistics": {"mean": [1]}},
        {"statistics": {"mean": [1], "std": [0]}},
        {"missing": "skip"},
        {"colour": 1},
    ):
        with pytest.raises(ValidationError):
            adapter.validate_python({"path": "a", **wrong})
