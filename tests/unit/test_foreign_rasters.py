"""TIFF files, scenes and images that others made: what they name, what lies beside them, and what their pieces say."""

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fuzzed import VALUES
from loopback import listening

from vitrail import foreign
from vitrail.errors import BadData, UserError
from vitrail.foreign import trusted
from vitrail.recipe import kinds

pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")


def opened(kind: str, path: object, **keys: Any) -> Any:
    return kinds.find("source", kind)(path=str(path), **keys).open()


def first(kind: str, path: object, **keys: Any) -> np.ndarray:
    source = opened(kind, path, **keys)
    return source.read(0, tuple(slice(0, n) for n in source.items[0].shape))


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    yield from listening()


# ---------------------------------------------------------------- what lies beside a scene


def scene(path: Path, size: int = 64, **tags: str) -> Path:
    import rasterio

    shape: dict[str, Any] = {"width": size, "height": size, "count": 1, "dtype": "uint8"}
    tiles: dict[str, Any] = {"tiled": True, "blockxsize": 16, "blockysize": 16}
    with rasterio.open(path, "w", driver="GTiff", **shape, **tiles) as raster:
        raster.write(np.full((1, size, size), 7, np.uint8))
        if tags:
            raster.update_tags(ns="OVERVIEWS", **tags)
    return path


def vrt(source: str) -> str:
    band = f'<SimpleSource><SourceFilename relativeToVRT="0">{source}</SourceFilename></SimpleSource>'
    return (
        '<VRTDataset rasterXSize="32" rasterYSize="32"><VRTRasterBand dataType="Byte" band="1">'
        f"{band}</VRTRasterBand></VRTDataset>"
    )


@pytest.mark.parametrize("name", ["ovr", "msk", "OVR", "MSK", "msk.ovr", "ovr.msk"])
def test_what_lies_beside_a_scene_is_no_list_of_other_files(
    tmp_path: Path, server: tuple[str, list[str]], name: str
) -> None:
    """GDAL opens overviews and masks by any driver, and what lies beside those, too."""
    address, asked = server
    secret = scene(tmp_path / "secret.tif", 32)
    texts = {
        "hidden": vrt(f"GTIFF_DIR:1:{secret}"),
        "network": vrt(f"/vsicurl/{address}/x.tif"),
        "plain": vrt(f"{address}/x.tif"),
        "wms": f'<GDAL_WMS><Service name="TMS"><ServerUrl>{address}/x</ServerUrl></Service></GDAL_WMS>',
    }
    for case, text in texts.items():
        (tmp_path / case).mkdir()
        place = scene(tmp_path / case / "a.tif")
        if "." in name:
            scene(place.with_name(f"a.tif.{name.partition('.')[0]}"), 32)
        place.with_name(f"a.tif.{name}").write_text(text)
        with pytest.raises(BadData, match=rf"a\.tif\.{name} cannot be read: it is no GeoTIFF.*--trust"):
            opened("geotiff", place)
    assert asked == []


def test_auxiliary_files_are_refused_where_gdal_would_open_them(tmp_path: Path) -> None:
    scene(tmp_path / "a.tif")
    for name in ("a.aux", "a.tif.aux"):
        (tmp_path / name).write_text("\\relax of LaTeX")
    assert first("geotiff", tmp_path / "a.tif").mean() == 7
    (tmp_path / "a.aux").write_bytes(b"Ehfa_HEADER_TAG" + bytes(100))
    with pytest.raises(BadData, match=r"a\.aux holds statistics of ERDAS or ArcGIS, .*; move it away, or give --trust"):
        opened("geotiff", tmp_path / "a.tif")


def test_a_scene_in_a_folder_beside_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scenes").mkdir()
    (tmp_path / "work").mkdir()
    scene(tmp_path / "scenes" / "a.tif")
    monkeypatch.chdir(tmp_path / "work")
    for path in ("../scenes/a.tif", "../scenes"):
        assert first("geotiff", path).mean() == 7


def test_a_mask_beside_a_scene_that_names_overviews_elsewhere(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    address, asked = server
    scene(tmp_path / "a.tif")
    scene(tmp_path / "a.tif.msk", OVERVIEW_FILE=f"/vsicurl/{address}/overviews.tif")
    with pytest.raises(BadData, match=r"a\.tif\.msk keeps its overviews in '/vsicurl/"):
        opened("geotiff", tmp_path / "a.tif")
    assert asked == []


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("domain", "name"),
    [
        ("OVERVIEWS", "overview_file"),
        ("OVERVIEWS", "Overview_File"),
        ("overviews", "OVERVIEW_FILE"),
        ("OVERVIEWS", "OTHER"),
    ],
)
def test_overviews_elsewhere_are_refused_in_any_mixture_of_cases(
    tmp_path: Path, server: tuple[str, list[str]], domain: str, name: str, beside: bool
) -> None:
    import tifffile

    address, asked = server
    place, far = tmp_path / "a.tif", f"/vsicurl/{address}/evil.tif"
    text = f'<GDALMetadata><Item name="{name}" domain="{domain}">{far}</Item></GDALMetadata>'
    tags: list[Any] = [] if beside else [(42112, 2, 0, text, True), (42113, 2, 0, "0", True)]
    tifffile.imwrite(place, np.full((64, 64), 7, np.uint8), extratags=tags)
    if beside:
        Path(f"{place}.aux.xml").write_text(
            f'<PAMDataset><Metadata domain="{domain}"><MDI key="{name}">{far}</MDI></Metadata></PAMDataset>'
        )
    with pytest.raises(BadData, match=r"a\.tif keeps its overviews in '/vsicurl/.*--trust"):
        opened("geotiff", place)
    assert asked == []


def test_overviews_in_a_file_of_any_other_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    scene(tmp_path / "private" / "secret.tif", 32)
    scene(tmp_path / "a.tif")
    (tmp_path / "a.tif.aux.xml").write_text(
        '<PAMDataset><Metadata domain="OVERVIEWS"><MDI key="overview_file">'
        f"{tmp_path}/private/secret.tif</MDI></Metadata></PAMDataset>"
    )
    with pytest.raises(BadData, match=r"keeps its overviews in '.*secret\.tif'; build them anew"):
        opened("geotiff", tmp_path / "a.tif")


def test_names_in_other_cases_are_not_looked_for(tmp_path: Path, server: tuple[str, list[str]]) -> None:
    address, asked = server
    scene(tmp_path / "a.tif")
    (tmp_path / "a.tif.Ovr").write_text(vrt(f"/vsicurl/{address}/x.tif"))
    with pytest.raises(UserError, match="level"):
        opened("geotiff", tmp_path / "a.tif", level=1)
    assert asked == []


def test_a_name_that_gdal_alone_understands_is_refused(tmp_path: Path) -> None:
    from vitrail.data.sources.geotiff import _check_named

    class Raster:
        files = ("GTIFF_DIR:1:/other/secret.tif",)

        def tags(self, ns: str) -> dict[str, str]:
            return {}

        def get_tag_item(self, name: str, domain: str) -> None:
            return None

    with pytest.raises(BadData, match=r"reads 'GTIFF_DIR:1:/other/secret\.tif', which is no file"):
        _check_named("a.tif", tmp_path / "a.tif", Raster())
    with trusted():
        _check_named("a.tif", tmp_path / "a.tif", Raster())


def test_overviews_and_masks_beside_a_scene_are_read(tmp_path: Path) -> None:
    import rasterio

    scene(tmp_path / "a.tif")
    with rasterio.Env(TIFF_USE_OVR=True), rasterio.open(tmp_path / "a.tif", "r+") as raster:
        raster.build_overviews([2], rasterio.enums.Resampling.nearest)
    assert (tmp_path / "a.tif.ovr").exists()
    coarse = opened("geotiff", tmp_path / "a.tif", level=1)
    assert coarse.items[0].shape == (32, 32)
    assert coarse.read(0, (slice(0, 32), slice(0, 32))).mean() == 7


@pytest.mark.parametrize("beside", [True, False])
def test_blocks_of_overviews_have_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    import rasterio

    scene(tmp_path / "a.tif")
    with (
        rasterio.Env(TIFF_USE_OVR=beside, GDAL_TIFF_OVR_BLOCKSIZE=64),
        rasterio.open(tmp_path / "a.tif", "r+") as raster,
    ):
        raster.build_overviews([2], rasterio.enums.Resampling.nearest)
    monkeypatch.setattr(foreign, "room", lambda: 1000)  # bytes; a tile of the scene has 256, of the overview 4096
    with pytest.raises(BadData, match=r"a block of .*a\.tif(\.ovr|, overview 0) says that it takes"):
        opened("geotiff", tmp_path / "a.tif")


# ---------------------------------------------------------------- scenes of ENVI


def envi(folder: Path, content: bytes, more: str = "", offset: int = 7) -> Path:
    """Two bands of 64 x 64 numbers of 16 bits after some other bytes, as the header says."""
    shape = "samples = 64\nlines = 64\nbands = 2\ninterleave = bil\n"
    (folder / "a.hdr").write_text(f"ENVI\n{shape}header offset = {offset}\ndata type = 12\nbyte order = 0\n{more}")
    (folder / "a.img").write_bytes(content)
    return folder / "a.img"


@pytest.mark.parametrize("packed", [False, True])
def test_an_envi_scene_that_is_cut_short_is_refused(tmp_path: Path, packed: bool) -> None:
    values = np.arange(1, 2 * 64 * 64 + 1, dtype="<u2").reshape(64, 2, 64)  # [y, C, x]
    content, more = bytes(7) + values.tobytes(), "file compression = 1\n" if packed else ""
    whole = gzip.compress(content) if packed else content
    np.testing.assert_array_equal(first("geotiff", envi(tmp_path, whole, more)), values.swapaxes(0, 1))
    assert first("geotiff", envi(tmp_path, whole + b"more", more)).shape == (2, 64, 64)
    for lost in (1, 2, 100, len(content) // 2, len(content) - 1000):
        cut = content[: len(content) - lost]
        with pytest.raises(BadData, match=rf"a\.img is cut short: .* 16,391 bytes, and there are {len(cut):,}; resto"):
            opened("geotiff", envi(tmp_path, gzip.compress(cut) if packed else cut, more))
    if packed:
        with pytest.raises(BadData, match=r"a\.img is cut short: .* 16,391 bytes"):
            opened("geotiff", envi(tmp_path, whole[: len(whole) // 2], more))


# ---------------------------------------------------------------- files that OME-TIFF names


def ome(files: list[str], tag: str = "UUID", **sizes: int) -> str:
    """The description of images of 12 x 10 pixels, each in a file of its own, or all in the same one."""
    shape = " ".join(
        f'Size{axis}="{size}"' for axis, size in ({"X": 12, "Y": 10, "Z": 1, "C": 1, "T": 1} | sizes).items()
    )
    images = "".join(
        f'<Image ID="Image:{n}"><Pixels ID="P:{n}" DimensionOrder="XYZCT" Type="uint8" {shape}><TiffData IFD="0" '
        f'PlaneCount="1"><{tag} FileName="{name}">urn:uuid:{name}</{tag}></TiffData></Pixels></Image>'
        for n, name in enumerate(files)
    )
    return (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:own">'
        f"{images}</OME>"
    )


@pytest.mark.parametrize("tag", ["UUID", "XUUID"])
def test_files_that_ome_tiff_names_by_any_tag(tmp_path: Path, tag: str) -> None:
    """Tags of which tifffile asks for their end alone."""
    import tifffile

    tifffile.imwrite(tmp_path / "secret.tif", VALUES[0])
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.ome.tif"
    tifffile.imwrite(path, VALUES[1], description=ome(["../secret.tif"], tag), metadata=None)
    with pytest.raises(BadData, match=r"secret\.tif', which does not lie in its own folder"):
        first("tiff", path)


def test_pages_in_files_that_are_not_known_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should tifffile find names where vitrail sees none."""
    import tifffile

    from vitrail.data.formats import tiff as tiff_file

    tifffile.imwrite(tmp_path / "secret.tif", VALUES[0])
    (tmp_path / "in").mkdir()
    tifffile.imwrite(tmp_path / "in" / "a.ome.tif", VALUES[1], description=ome(["../secret.tif"]), metadata=None)
    monkeypatch.setattr(tiff_file, "_named_files", lambda place, tif: [])
    with pytest.raises(BadData, match=r"has pages in .*secret\.tif, which was not known to be a part of it"):
        first("tiff", tmp_path / "in" / "a.ome.tif")


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_an_image_in_another_file_is_read_from_there(tmp_path: Path, compression: str | None) -> None:
    import tifffile

    names = [f"{letter}.ome.tif" for letter in "ab"]
    for number, name in enumerate(names):
        text = ome(names).replace("urn:uuid:own", f"urn:uuid:{name}")
        tifffile.imwrite(tmp_path / name, VALUES[number], description=text, metadata=None, compression=compression)
    for path in (tmp_path / name for name in names):
        for number in range(2):
            assert np.array_equal(first("tiff", path, series=number)[0], VALUES[number])
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "c.ome.tif").symlink_to(tmp_path / "a.ome.tif")  # names count beside the file itself
    assert np.array_equal(first("tiff", tmp_path / "linked" / "c.ome.tif", series=1)[0], VALUES[1])


def test_planes_that_micro_manager_tells_are_counted(tmp_path: Path) -> None:
    """For as many of them tifffile makes a list."""
    from vitrail.data.formats.tiff import _count_planes

    index = np.array([[0, 0, 0, 0, 8], [1, 2, 999_999_999, 0, 8]], np.uint32)  # channel, slice, frame, position, offset
    told: dict[str, Any] = {"Summary": {"Positions": 5, "Frames": 3}, "IndexMap": index}
    flags = {"is_ome": False, "is_mmstack": True, "is_ndtiff": False}
    assert _count_planes(tmp_path / "a.tif", SimpleNamespace(micromanager_metadata=told, **flags), 1) == 30 * 10**9
    flags = {"is_ome": False, "is_mmstack": False, "is_ndtiff": True}
    with (tmp_path / "NDTiff.index").open("wb") as file:
        for axes in ('{"z": -4, "channel": "a"}', '{"z": 999999995, "channel": "b"}'):
            file.write(struct.pack("<I", len(axes)) + axes.encode() + struct.pack("<I5s", 5, b"a.tif") + bytes(32))
    assert _count_planes(tmp_path / "a.tif", SimpleNamespace(**flags), 1) == 2 * 10**9


# ---------------------------------------------------------------- pages over each other


def directory(tags: dict[int, tuple[int, int, int]], following: int, *, ndpi: bool = False) -> bytes:
    """Tags (type, count, value) of a page, by their numbers; an NDPI has offsets of 64 bits, in two parts."""
    table = b"".join(struct.pack("<HHII", tag, *tags[tag]) for tag in sorted(tags))
    end = struct.pack("<Q", following) + bytes(4 * len(tags)) if ndpi else struct.pack("<I", following)
    return struct.pack("<H", len(tags)) + table + end


GREY = {256: (4, 1, 4), 257: (4, 1, 4), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1), 273: (4, 1, 16),
        277: (3, 1, 1), 278: (4, 1, 4), 279: (4, 1, 16)}  # fmt: skip


def write_pages(path: Path, *, pages: int, tags: int, apart: int = 12, ndpi: bool = False) -> Path:
    """Directories that begin within each other: the tags of one are the heads of others."""
    start, width = 32, 8 if ndpi else 4
    content = bytearray(b"II*\0" + start.to_bytes(width, "little"))
    content += bytes(start - len(content) + pages * apart + 2 + 12 * tags + width)
    for number in range(pages):
        at = start + number * apart
        content[at : at + 2] = struct.pack("<H", tags)
    for number in range(pages - 1):
        at = start + number * apart + 2 + 12 * tags
        content[at : at + width] = (start + (number + 1) * apart).to_bytes(width, "little")
    path.write_bytes(content)
    return path


def test_pages_over_each_other_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them may claim all tags of the file: of a MB, tifffile would read for hours, of some kinds at once."""
    import tifffile

    from vitrail.data.formats import tiff as tiff_file

    def fail(*args: Any, **more: Any) -> None:
        pytest.fail("it was read")

    looked: list[int] = []
    found = tiff_file._subchains
    count = lambda name, table, *rest: looked.append(len(table)) or found(name, table, *rest)  # noqa: E731
    monkeypatch.setattr(tiff_file, "_subchains", count)
    with monkeypatch.context() as patch:
        patch.setattr(tifffile, "TiffFile", fail)
        for name, ndpi in (("a.tif", False), ("a.ndpi", True)):
            path = write_pages(tmp_path / name, pages=400, tags=1000, ndpi=ndpi)
            looked.clear()
            with pytest.raises(BadData, match=r"has pages that lie over each other: the tags of the first 2 have"):
                opened("tiff", path)
            assert sum(looked) * 12 <= path.stat().st_size

        # Values that all tags share, and offsets of pages below.
        path = tmp_path / "b.tif"
        head = b"II*\0" + (4096).to_bytes(4, "little") + bytes(4088)
        for tags in (dict.fromkeys(range(1000, 1200), (4, 1000, 16)), {330: (4, 1000, 16)}):
            path.write_bytes(head + directory(GREY | tags, 0))
            if 330 in tags:
                assert tiff_file.check_chain("b.tif", path) == 16
                path.write_bytes(head + struct.pack("<H", 2) + struct.pack("<HHII", 330, 4, 1000, 16) * 2 + bytes(4))
            with pytest.raises(BadData, match="lie over each other"):
                opened("tiff", path)


def test_a_slide_with_offsets_of_64_bits_is_read(tmp_path: Path) -> None:
    values = np.arange(16, dtype=np.uint8).reshape(4, 4)
    page = directory(GREY | {65420: (4, 1, 1), 271: (2, 2, 0)}, 0, ndpi=True)
    (tmp_path / "a.ndpi").write_bytes(b"II*\0" + (32).to_bytes(8, "little") + bytes(4) + values.tobytes() + page)
    assert np.array_equal(first("tiff", tmp_path / "a.ndpi")[0], values)


# ---------------------------------------------------------------- pieces that are images


def test_pieces_of_tiff_that_tell_their_own_sizes(tmp_path: Path) -> None:
    import imagecodecs
    import tifffile

    from vitrail.data.formats.tiff import _image_size, check_frame

    plane = np.zeros((10, 12, 3), np.uint8)
    assert _image_size(bytes(imagecodecs.png_encode(plane)))[:2] == (10, 12)
    jpeg = bytes(imagecodecs.jpeg_encode(plane))
    assert _image_size(jpeg) == _image_size(jpeg[:2] + b"\xff\xff" + jpeg[2:]) == (10, 12, 3)
    assert _image_size(jpeg[:2] + b"\0" + jpeg[2:]) == (0, 0, 0)  # which decoders pass over, and is refused
    for form in ("j2k", "jp2"):
        assert _image_size(bytes(imagecodecs.jpeg2k_encode(plane, codecformat=form))) == (10, 12, 3)
    colours = np.full((32, 32, 3), 90, np.uint8)
    for name in ("png", "jpegxl", "webp", "jpegxr", "lerc"):
        tifffile.imwrite(tmp_path / f"{name}.tif", colours, compression=name, tile=(16, 16))
    assert np.array_equal(first("tiff", tmp_path / "png.tif"), np.full((3, 32, 32), 90))
    for name in ("jpegxl", "webp", "jpegxr", "lerc"):
        with pytest.raises(BadData, match=f"compressed by {name.upper()}.*--trust"):
            opened("tiff", tmp_path / f"{name}.tif")
    with trusted():
        assert first("tiff", tmp_path / "webp.tif").shape == (3, 32, 32)
    frame = SimpleNamespace(
        is_tiled=True, tilewidth=16, tilelength=16, tiledepth=1, samplesperpixel=1, compression=48124
    )
    frame.dtype = np.dtype("uint8")
    with pytest.raises(
        BadData, match=r"compressed by 48124, which vitrail does not know; .* such as zlib, or give --trust"
    ):
        check_frame("a.tif", frame, trust=False)
    with (
        trusted(),
        pytest.raises(BadData, match=r"such as zlib$"),
    ):  # of images: read in threads, which know of no trust
        check_frame("a.tif", frame)
    data = bytearray((tmp_path / "png.tif").read_bytes())
    at = data.index(b"IHDR")
    data[at + 4 : at + 12] = struct.pack(">II", 60000, 60000)
    data[at + 17 : at + 21] = struct.pack(">I", zlib.crc32(data[at : at + 17]))
    (tmp_path / "large.tif").write_bytes(data)
    with pytest.raises(BadData, match="it says that it is 60000 x 60000 x 1 values, not 16 x 16 pixels"):
        first("tiff", tmp_path / "large.tif")


# ---------------------------------------------------------------- images of 16 bits


@pytest.mark.parametrize("planes", ["contig", "separate"])
def test_colours_of_16_bits_are_turned_as_those_of_8(tmp_path: Path, planes: str) -> None:
    import tifffile

    colours = np.arange(10 * 12 * 3, dtype=np.uint8).reshape(10, 12, 3)  # wraps around
    for orientation in range(1, 9):
        seen = []
        for dtype in (np.uint8, np.uint16):
            pixels = colours.astype(dtype) if planes == "contig" else np.moveaxis(colours, -1, 0).astype(dtype)
            tags = [(274, "H", 1, orientation, True)]
            tifffile.imwrite(tmp_path / "a.tif", pixels, photometric="rgb", planarconfig=planes, extratags=tags)
            seen.append(first("image_folder", tmp_path / "a.tif"))
        np.testing.assert_array_equal(seen[0], seen[1], f"orientation {orientation}")


def test_colours_of_16_bits_are_those_of_the_file_itself(tmp_path: Path) -> None:
    import tifffile

    colours = np.repeat(VALUES[0, ..., None], 3, 2).astype(np.uint16) * 257  # [10, 12, 3]
    tifffile.imwrite(tmp_path / "secret.tif", colours[::-1].copy(), photometric="rgb")
    (tmp_path / "in").mkdir()
    text = ome(["../secret.tif"], C=3).replace("<TiffData", '<Channel ID="C:0" SamplesPerPixel="3"/><TiffData')
    tifffile.imwrite(tmp_path / "in" / "a.tif", colours, photometric="rgb", description=text, metadata=None)
    assert np.array_equal(first("image_folder", tmp_path / "in"), np.moveaxis(colours, -1, 0))
    options: list[dict[str, Any]] = [{"compression": "zlib"}, {"planarconfig": "separate"}, {"tile": (16, 16)}]
    for number, keys in enumerate(options):
        values = np.moveaxis(colours, -1, 0) if "planarconfig" in keys else colours
        tifffile.imwrite(tmp_path / f"{number}.tif", values, photometric="rgb", **keys)
        assert np.array_equal(first("image_folder", tmp_path / f"{number}.tif"), np.moveaxis(colours, -1, 0))


def test_tiles_of_16_bits_have_room_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tifffile

    colours = np.zeros((10, 12, 3), np.uint16)
    tifffile.imwrite(tmp_path / "a.tif", colours, photometric="rgb", tile=(256, 256), compression="zlib")
    monkeypatch.setattr(foreign, "room", lambda: 100_000)
    with pytest.raises(BadData, match=r"a tile or strip of .* says that it takes"):
        first("image_folder", tmp_path / "a.tif")
