"""Files that say they are larger than anything, or become it: refused in a sentence, with little memory."""

import bz2
import gzip
import io
import json
import lzma
import re
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bounded import run_cases
from fuzzed import VALUES, originals

HUGE = 8 << 30  # bytes that bombs become
MADE: dict[str, tuple[Callable[[Path, dict[str, Path]], dict[str, Any]], str]] = {}


def bomb(words: str) -> Callable[[Any], Any]:
    """A function that makes a file: (folder, valid files) -> kind, path and keys; `words` are of its refusal."""

    def keep(make: Any) -> Any:
        MADE[make.__name__] = (make, words)
        return make

    return keep


def deflated(size: int, bits: int = 15) -> bytes:
    """A stream that becomes so many zeros, made in no time: one piece, again and again."""
    packer = zlib.compressobj(9, wbits=bits)
    head = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + piece * (size >> 20)


def zstd_frame(size: int, told: int | None) -> bytes:
    """Blocks of one byte repeated, with or without the size in the head."""
    head = b"\x28\xb5\x2f\xfd" + (b"\x00\x58" if told is None else b"\xc0\x58" + told.to_bytes(8, "little"))
    block, last = ((2**17 << 3 | 2 | end).to_bytes(3, "little") + b"\0" for end in (0, 1))
    return head + block * ((size >> 17) - 1) + last


def npy(shape: str, version: int = 1) -> bytes:
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117).encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(head)) + head


def copied(folder: Path, top: Path) -> Path:
    return Path(shutil.copytree(top, folder / top.name))


# ---------------------------------------------------------------- arrays in files


@bomb("is cut short")
def npy_of_2_to_the_50_values(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    (folder / "a.npy").write_bytes(npy(f"({2**25}, {2**25})") + bytes(100))
    return {"kind": "numpy", "path": folder / "a.npy"}


@bomb("shape is")
def npy_with_a_negative_side(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    (folder / "a.npy").write_bytes(npy("(-4, 8)") + bytes(100))
    return {"kind": "numpy", "path": folder / "a.npy"}


@bomb("its header would have 1,073,741,824 bytes")
def npy_with_a_header_of_a_gigabyte(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    (folder / "a.npy").write_bytes(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**30) + b"{" * 100)
    return {"kind": "numpy", "path": folder / "a.npy"}


@bomb("says that it holds")
def npz_whose_member_says_more_than_it_has(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    with zipfile.ZipFile(folder / "a.npz", "w") as archive:
        archive.writestr("raw.npy", npy(f"({2**25}, {2**25})") + bytes(100))
    return {"kind": "numpy", "path": folder / "a.npz"}


@bomb("more than half of this machine's memory")
def npz_that_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    packer = zlib.compressobj(9, wbits=-15)
    head = packer.compress(npy("(8192, 1048576)")) + packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    data, size = head + piece * 8192 + packer.flush(), HUGE + 128
    sizes = struct.pack("<QQ", size, len(data))
    local = struct.pack("<IHHHHHIIIHH", 0x04034B50, 45, 0, 8, 0, 0, 0, 2**32 - 1, 2**32 - 1, 7, 20)
    local += b"raw.npy" + struct.pack("<HH", 1, 16) + sizes
    central = struct.pack(
        "<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0, 8, 0, 0, 0, 2**32 - 1, 2**32 - 1, 7, 20, 0, 0, 0, 0, 0
    )
    central += b"raw.npy" + struct.pack("<HH", 1, 16) + sizes
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 1, 1, len(central), len(local) + len(data), 0)
    (folder / "a.npz").write_bytes(local + data + central + end)
    return {"kind": "numpy", "path": folder / "a.npz"}


@bomb("packed in a way that NumPy does not write")
def npz_packed_by_lzma(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("raw.npy", npy("(4, 4)") + bytes(16))
    return {"kind": "numpy", "path": folder / "a.npz"}


def nifti(folder: Path, valid: dict[str, Path], *, packed: bool, **changes: Any) -> dict[str, Any]:
    data = bytearray(valid["nifti.nii"].read_bytes())
    if "dims" in changes:
        struct.pack_into("<8h", data, 40, *changes["dims"])
    if "start" in changes:
        struct.pack_into("<f", data, 108, changes["start"])
    if "type" in changes:
        struct.pack_into("<2h", data, 70, *changes["type"])  # and its bits
    if "extension" in changes:
        data[348:356] = b"\1\0\0\0" + struct.pack("<i", changes["extension"])
    if "extensions" in changes:
        data[348:352] = b"\1\0\0\0"
        data[352:352] = struct.pack("<2i8x", 16, 6) * changes["extensions"]
    place = folder / ("a.nii.gz" if packed else "a.nii")
    place.write_bytes(gzip.compress(bytes(data)) if packed else bytes(data))
    return {"kind": "nifti", "path": place}


@bomb("its dimensions are")
def nifti_with_negative_dims(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return nifti(folder, valid, packed=False, dims=(3, -6, 10, -12, 1, 1, 1, 1))


@bomb("its dimensions are")
def nifti_gz_with_negative_dims(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return nifti(folder, valid, packed=True, dims=(3, -6, 10, -12, 1, 1, 1, 1))


@bomb("more than can be packed in it")
def nifti_gz_of_2_to_the_45_voxels(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return nifti(folder, valid, packed=True, dims=(3, 2**14, 2**14, 2**14, 1, 1, 1, 1))


@bomb("cannot be read|more than")
def nifti_gz_with_8_gib_behind_its_voxels(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    data = gzip.compress(valid["nifti.nii"].read_bytes())
    (folder / "a.nii.gz").write_bytes(data + deflated(HUGE, 31))
    return {"kind": "nifti", "path": folder / "a.nii.gz"}


@bomb("is cut short")
def nifti_of_2_to_the_45_voxels(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return nifti(folder, valid, packed=False, dims=(3, 2**14, 2**14, 2**14, 1, 1, 1, 1))


@bomb("from byte")
def nifti_that_begins_at_byte_10_to_the_30(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return nifti(folder, valid, packed=True, start=1e30)


@bomb("an extension of its header has")
def nifti_with_an_extension_of_2_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return nifti(folder, valid, packed=False, start=1024, extension=2**31 - 16)


@bomb("says that it holds 800,000,000 bytes, more than can be packed in it")
def nifti_gz_whose_numbers_have_no_bits(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return nifti(folder, valid, packed=True, dims=(3, 1000, 1000, 100, 1, 1, 1, 1), type=(64, 0))


@bomb("has more than 1,000 extensions")
def nifti_with_100000_extensions(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return nifti(folder, valid, packed=False, start=352 + 1_600_000, extensions=100_000)


# ---------------------------------------------------------------- TIFF


def tiff(folder: Path, entries: list[tuple[int, int, int, int]], *, following: int = 0, more: bytes = b"") -> Path:
    """A BigTIFF of one page, of tags (number, type, count, value); 16 bytes of data lie at byte 16."""
    head = b"II" + struct.pack("<HHHQ", 43, 8, 0, 32) + bytes(16)
    table = struct.pack("<Q", len(entries)) + b"".join(struct.pack("<HHQQ", *entry) for entry in sorted(entries))
    (folder / "a.tif").write_bytes(head + table + struct.pack("<Q", following) + more)
    return folder / "a.tif"


PAGE = {256: (4, 1, 4), 257: (4, 1, 4), 258: (3, 1, 8), 259: (3, 1, 1), 262: (3, 1, 1), 273: (16, 1, 16),
        277: (3, 1, 1), 278: (4, 1, 4), 279: (16, 1, 16)}  # fmt: skip


def page(**changes: tuple[int, int, int]) -> list[tuple[int, int, int, int]]:
    found = PAGE | {int(name[1:]): value for name, value in changes.items()}
    return [(tag, *value) for tag, value in found.items() if value[1]]


@bomb("a chain of pages without an end")
def tiff_with_a_ring_of_pages(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "tiff", "path": tiff(folder, page(), following=32)}


@bomb("a chain of pages without an end")
def tiff_with_a_ring_of_pages_below_pages(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "tiff", "path": tiff(folder, page(t330=(16, 1, 32)))}


@bomb("says that tag 270 has")
def tiff_with_a_tag_of_2_to_the_50_values(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "tiff", "path": tiff(folder, page(t270=(2, 2**50, 16)))}


@bomb("cut short|more than half")
def tiff_of_2_to_the_62_pixels(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    sides = {"t256": (4, 1, 2**31 - 1), "t257": (4, 1, 2**31 - 1), "t278": (4, 1, 2**31 - 1), "t259": (3, 1, 8)}
    return {"kind": "tiff", "path": tiff(folder, page(**sides))}


TILE = {"t273": (16, 0, 0), "t278": (4, 0, 0), "t279": (16, 0, 0), "t324": (16, 1, 16), "t325": (16, 1, 16)}


@bomb("says that it takes .* GiB at once")
def tiff_with_a_tile_of_2_to_the_40_pixels(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    tile = {"t322": (4, 1, 2**20), "t323": (4, 1, 2**20), "t259": (3, 1, 8)}
    return {"kind": "tiff", "path": tiff(folder, page(**TILE | tile))}


@bomb("cannot be read|GiB at once")
def geotiff_with_a_tile_of_2_to_the_40_pixels(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    tile = {"t322": (4, 1, 2**20), "t323": (4, 1, 2**20), "t259": (3, 1, 8)}
    return {"kind": "geotiff", "path": tiff(folder, page(**TILE | tile))}


@bomb("cut short")
def tiff_with_a_strip_of_2_to_the_50_bytes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "tiff", "path": tiff(folder, page(t279=(16, 1, 2**50), t259=(3, 1, 8)))}


@bomb("cannot be read")
def tiff_whose_tile_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    data = deflated(HUGE)
    entries = page(**TILE | {"t322": (4, 1, 16), "t323": (4, 1, 16), "t259": (3, 1, 8), "t325": (16, 1, len(data))})
    place = 32 + 8 + 20 * len(entries) + 8
    entries = [(t, k, n, place if t == 324 else v) for t, k, n, v in entries]
    return {"kind": "tiff", "path": tiff(folder, entries, more=data)}


@bomb("cannot be read")
def tiff_whose_jpeg_says_65500_x_65500(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    data = bytearray(valid["jpeg-tiff"].read_bytes())
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", 65500, 65500)
    (folder / "a.tif").write_bytes(data)
    return {"kind": "tiff", "path": folder / "a.tif"}


def ome(folder: Path, pixels: str = "", data: str = "", more: str = "") -> dict[str, Any]:
    import tifffile

    sizes = {"X": "12", "Y": "10", "Z": "1", "C": "1", "T": "1"} | ({pixels[0]: pixels[1:]} if pixels else {})
    shape = " ".join(f'Size{axis}="{size}"' for axis, size in sizes.items())
    text = (
        '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0">'
        f'<Pixels ID="P:0" DimensionOrder="XYZCT" Type="uint8" {shape}>'
        f'<TiffData IFD="0" {data}/></Pixels></Image>{more}</OME>'
    )
    tifffile.imwrite(folder / "a.ome.tif", VALUES[0], description=text, metadata=None)
    return {"kind": "tiff", "path": folder / "a.ome.tif"}


PLANES = "the list of planes of .* says that it takes .* GiB at once"


@bomb(PLANES)
def ome_tiff_of_10_to_the_12_planes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return ome(folder, pixels="Z1000000000000")


@bomb(PLANES)
def ome_tiff_of_10_to_the_12_columns(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return ome(folder, pixels="X1000000000000")


@bomb(PLANES)
def ome_tiff_that_counts_10_to_the_12_planes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return ome(folder, data='PlaneCount="1000000000000"')


@bomb(PLANES)
def ome_tiff_of_10_to_the_12_steps(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    along = '<ModuloAlongZ Type="phase" Start="0" End="1" Step="1e-12"/>'
    notes = f'<XMLAnnotation ID="A:0" Namespace="x/modulo"><Value><Modulo>{along}</Modulo></Value></XMLAnnotation>'
    return ome(folder, more=f"<StructuredAnnotations>{notes}</StructuredAnnotations>")


# ---------------------------------------------------------------- images


@bomb("60000 x 60000 pixels, more than max_pixels")
def png_of_60000_x_60000_pixels(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    data = bytearray(valid["image png"].read_bytes())
    data[16:24] = struct.pack(">II", 60000, 60000)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (folder / "a.png").write_bytes(data)
    return {"kind": "image_folder", "path": folder / "a.png"}


@bomb("65500 x 65500 pixels, more than max_pixels")
def jpeg_of_65500_x_65500_pixels(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    data = bytearray(valid["image jpg"].read_bytes())
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", 65500, 65500)
    (folder / "a.jpg").write_bytes(data)
    return {"kind": "image_folder", "path": folder / "a.jpg"}


@bomb("cannot be read as an image")
def png_with_a_text_that_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    data = valid["image png"].read_bytes()
    text = b"zTXtkey\0\0" + deflated(HUGE)
    chunk = struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))
    (folder / "a.png").write_bytes(data[:33] + chunk + data[33:])
    return {"kind": "image_folder", "path": folder / "a.png"}


@bomb("cut short")
def tar_with_an_npy_of_2_to_the_50_values(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "webdataset", "path": tar(folder, [("a.npy", npy(f"({2**25}, {2**25})") + bytes(9))])}


# ---------------------------------------------------------------- tar


def tar(
    folder: Path, members: list[tuple[str, bytes]], *, kind: bytes = tarfile.REGTYPE, size: bytes | None = None
) -> Path:
    """A tar file; the first member is of a kind, and its size is written as these 12 bytes."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as out:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    data = bytearray(held.getvalue())
    data[156:157] = kind
    if size is not None:
        data[124:136] = size
    data[148:156] = b" " * 8
    data[148:156] = f"{sum(data[:512]):06o}\0 ".encode()
    (folder / "a.tar").write_bytes(data)
    return folder / "a.tar"


def number(value: int) -> bytes:
    """As GNU tar writes what is too large for octal digits, or negative."""
    return (value + 256**12 if value < 0 else value | 0x80 << 88).to_bytes(12, "big")


def members(valid: dict[str, Path]) -> list[tuple[str, bytes]]:
    return [("a.png", valid["image png"].read_bytes()), ("b.png", valid["image png"].read_bytes())]


@bomb("says that it has 1,125,899,906,842,624 bytes")
def tar_with_a_member_of_2_to_the_50_bytes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "webdataset", "path": tar(folder, members(valid), size=number(2**50))}


@bomb("says that it has -512 bytes|is damaged")
def tar_with_a_member_of_minus_512_bytes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "webdataset", "path": tar(folder, members(valid), size=number(-512))}


@bomb("a header says that it has")
def tar_with_a_header_of_2_to_the_40_bytes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "webdataset", "path": tar(folder, members(valid), kind=b"x", size=number(2**40))}


@bomb("a header says that it has|is damaged")
def tar_with_a_header_of_minus_1024_bytes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "webdataset", "path": tar(folder, members(valid), kind=b"x", size=number(-1024))}


@bomb("a header says that it has")
def tar_with_a_name_of_2_to_the_40_bytes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "webdataset", "path": tar(folder, members(valid), kind=b"L", size=number(2**40))}


@bomb("stands for more than 100,000 shards")
def tar_pattern_of_10_to_the_15_shards(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "webdataset", "path": folder / "train-{000000000000000..999999999999999}.tar"}


# ---------------------------------------------------------------- parquet


@bomb("but becomes more than 67,108,864")
def parquet_whose_rows_are_one_image_again_and_again(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    large = valid["image png"].read_bytes() + bytes(1 << 20)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 8192, pa.int32()), pa.array([large], pa.binary()))
    pq.write_table(
        pa.table({"image": column}), folder / "a.parquet", store_schema=False, dictionary_pagesize_limit=1 << 30
    )
    return {"kind": "parquet", "path": folder / "a.parquet"}


def parquet_classes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    """Of 4096 rows, whose class is one word of a megabyte."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(value: Any, kind: Any) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int32()), pa.array([value], kind))

    table = pa.table(
        {"image": column(valid["image png"].read_bytes(), pa.binary()), "label": column("a" * (1 << 20), pa.string())}
    )
    pq.write_table(table, folder / "a.parquet", store_schema=False, dictionary_pagesize_limit=1 << 30)
    return {"kind": "parquet", "path": folder / "a.parquet"}


@bomb("keeps a column in the file")
def parquet_with_a_column_elsewhere(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import pyarrow.parquet as pq

    metadata = pq.read_metadata(valid["parquet"])
    metadata.set_file_path("../../elsewhere.parquet")
    metadata.write_metadata_file(folder / "a.parquet")
    return {"kind": "parquet", "path": folder / "a.parquet"}


# ---------------------------------------------------------------- HDF5 and netCDF


def hdf5(folder: Path, chunks: tuple[int, ...], data: bytes) -> Path:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        shape = tuple(max(8, side) for side in chunks)
        raw = file.create_dataset("raw", shape, "u1", chunks=chunks, compression="gzip")
        raw.id.write_direct_chunk((0,) * len(chunks), data)
    return folder / "a.h5"


@bomb("more than half of this machine's memory")
def hdf5_with_a_chunk_of_3_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "hdf5", "path": hdf5(folder, (3, 2**15, 2**15), zlib.compress(bytes(100)))}


@bomb("holds more than 512 bytes")
def hdf5_chunk_that_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return {"kind": "hdf5", "path": hdf5(folder, (8, 8, 8), deflated(HUGE))}


@bomb(r"packed by the HDF5 filters 'deflate' \(1\), 'deflate' \(1\)")
def hdf5_chunk_that_is_packed_again(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import h5py

    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((8, 8, 8))
    plist.set_deflate(9)
    plist.set_deflate(9)
    with h5py.File(folder / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((8, 8, 8))
        raw = h5py.h5d.create(file.id, b"raw", h5py.h5t.STD_U8LE, space, plist)
        raw.write_direct_chunk((0, 0, 0), zlib.compress(deflated(HUGE)))
    return {"kind": "hdf5", "path": folder / "a.h5"}


@bomb("holds more than 512 bytes")
def hdf5_chunk_with_a_checksum_that_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        raw = file.create_dataset("raw", (8, 8, 8), "u1", chunks=(8, 8, 8), compression="gzip", fletcher32=True)
        raw.id.write_direct_chunk((0, 0, 0), deflated(HUGE) + bytes(4))
    return {"kind": "hdf5", "path": folder / "a.h5"}


@bomb("a.h5::/raw: the chunk .* holds more than 512 bytes")
def hdf5_part_whose_chunk_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import h5py

    hdf5(folder, (8, 8, 8), deflated(HUGE))
    layout = h5py.VirtualLayout((8, 8, 8), "u1")
    layout[...] = h5py.VirtualSource("a.h5", "raw", (8, 8, 8))
    with h5py.File(folder / "b.h5", "w") as file:
        file.create_virtual_dataset("all", layout)
    return {"kind": "hdf5", "path": folder / "b.h5"}


def netcdf(folder: Path, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    import h5py

    with h5py.File(folder / "a.nc", "w") as file:
        file["t"] = np.zeros((8, 8), "u1")
        raw = file.create_dataset(name, shape, "u1", chunks=shape, compression="gzip")
        raw.id.write_direct_chunk((0,) * len(shape), deflated(HUGE))
    return {"kind": "netcdf", "path": folder / "a.nc", "keys": {"variables": [name if len(shape) > 1 else "t"]}}


@bomb("holds more than 64 bytes")
def netcdf_chunk_that_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return netcdf(folder, "u", (8, 8))


@bomb("holds more than 8 bytes")
def netcdf_coordinate_that_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return netcdf(folder, "x", (8,))


LONG = 4 << 20


def repeated(path: Path, count: int) -> Path:
    """A file with the words `LONG` and more short ones, of which all become the first: what says where it is kept."""
    data = bytearray(path.read_bytes())
    length, short = LONG.to_bytes(4, "little"), (8).to_bytes(4, "little")
    at = next(m.start() for m in re.finditer(re.escape(length), data) if data[m.start() + 16 :].startswith(short))
    data[at : at + 16 * count] = data[at : at + 16] * count
    path.write_bytes(data)
    return path


def words(count: int) -> list[str]:
    return ["a" * LONG, *(f"w{number:07d}" for number in range(count - 1))]


@bomb("the words of .*a.nc become more than 67,108,864 bytes, at .*a.nc::x, and it has")
def netcdf_coordinate_of_words_that_are_one(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import netCDF4

    with netCDF4.Dataset(folder / "a.nc", "w") as data:
        data.createDimension("x", 500)
        data.createDimension("y", 8)
        data.createVariable("x", str, ("x",), contiguous=True)[:] = np.array(words(500), object)
        data.createVariable("u", "f4", ("y", "x"))[:] = 0
    return {"kind": "netcdf", "path": repeated(folder / "a.nc", 500)}


@bomb("'told' of .*a.nc::u has 600 words, which may be the same")
def netcdf_attribute_of_words_that_are_one(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import h5py

    with h5py.File(folder / "a.nc", "w") as file:
        file["u"] = np.zeros((8, 8), "f4")
        file["u"].attrs.create("told", words(600), dtype=h5py.string_dtype())
    return {"kind": "netcdf", "path": repeated(folder / "a.nc", 600)}


@bomb("the words of .*a.nc become more than 67,108,864 bytes, at the attribute 'told'")
def netcdf_attribute_of_few_words_that_are_one(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import h5py

    with h5py.File(folder / "a.nc", "w") as file:
        file["u"] = np.zeros((8, 8), "f4")
        file["u"].attrs.create("told", words(60), dtype=h5py.string_dtype())
    return {"kind": "netcdf", "path": repeated(folder / "a.nc", 60)}


@bomb("::x says that it takes .* GiB at once")
def netcdf_coordinate_with_one_long_word(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import netCDF4

    with netCDF4.Dataset(folder / "a.nc", "w") as data:
        data.createDimension("x", 500)
        data.createDimension("y", 8)
        data.createVariable("x", str, ("x",))[:] = np.array(words(500), object)
        data.createVariable("u", "f4", ("y", "x"))[:] = 0
    return {"kind": "netcdf", "path": folder / "a.nc"}


@bomb("a.nc::x has values of no size inside others")
def netcdf_coordinate_of_lists_in_lists(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import h5py

    with h5py.File(folder / "a.nc", "w") as file:
        file["u"] = np.zeros((8, 8), "f4")
        inside = h5py.h5t.vlen_create(h5py.h5t.vlen_create(h5py.h5t.NATIVE_UINT8))
        h5py.h5d.create(file.id, b"x", inside, h5py.h5s.create_simple((8,)))
    return {"kind": "netcdf", "path": folder / "a.nc"}


def hdf5_words(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    """Of which the axes are 600 words that are one."""
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        file["raw"] = VALUES
        file["raw"].attrs.create("axes", words(600), dtype=h5py.string_dtype())
    return {"kind": "hdf5", "path": repeated(folder / "a.h5", 600)}


def hdf5_attribute(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import h5py

    with h5py.File(folder / "a.h5", "w", libver="latest") as file:
        file["raw"] = VALUES
        file["raw"].attrs.create("axes", np.zeros(1 << 20, "u1"))  # more than is looked at
    return {"kind": "hdf5", "path": folder / "a.h5"}


@bomb("more than half of this machine's memory")
def netcdf_with_a_chunk_of_3_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    import netCDF4

    with netCDF4.Dataset(folder / "a.nc", "w") as data:
        for name in "yx":
            data.createDimension(name, 56000)
        data.createVariable("t", "u1", ("y", "x"), zlib=True, chunksizes=(56000, 56000))
    return {"kind": "netcdf", "path": folder / "a.nc"}


# ---------------------------------------------------------------- zarr and N5


def zarr2(
    folder: Path, valid: dict[str, Path], codec: str, data: bytes | None = None, **changes: Any
) -> dict[str, Any]:
    top = copied(folder, valid[f"zarr2 {codec}"].parent)
    if data is not None:
        (top / "0.0.0").write_bytes(data)
    if changes:
        (top / ".zarray").write_text(json.dumps(json.loads((top / ".zarray").read_text()) | changes))
    return {"kind": "zarr", "path": top}


@bomb("holds more than 720 bytes")
def zarr_chunk_of_gzip_that_becomes_a_gigabyte(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return zarr2(folder, valid, "gzip", deflated(HUGE, 31)[: 1 << 20])  # of the whole, more than a file may have


@bomb("more than a chunk can need")
def zarr_chunk_whose_file_is_a_terabyte_of_holes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    found = zarr2(folder, valid, "gzip")
    with (found["path"] / "0.0.0").open("r+b") as file:
        file.truncate(1 << 40)
    return found


@bomb("more than 720 bytes|more than a chunk can need")
def zarr_chunk_of_bz2_that_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return zarr2(folder, valid, "bz2", bz2.compress(bytes(1 << 20)) * 8192)


@bomb("says that it holds 1099511627776 bytes instead of 720")
def zarr_chunk_of_zstd_that_says_2_to_the_40(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return zarr2(folder, valid, "zstd", zstd_frame(1 << 20, 2**40))


@bomb("cannot be read")
def zarr_chunk_of_zstd_without_a_size_that_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return zarr2(folder, valid, "zstd", zstd_frame(HUGE, None))


@bomb("instead of 720")
def zarr_chunk_of_blosc_that_says_2_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    data = bytearray((valid["zarr2 blosc"]).read_bytes())
    data[4:8] = struct.pack("<I", 2**31 - 32)
    return zarr2(folder, valid, "blosc", bytes(data))


@bomb("instead of 720")
def zarr_chunk_of_lz4_that_says_2_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    data = valid["zarr2 lz4"].read_bytes()
    return zarr2(folder, valid, "lz4", struct.pack("<I", 2**31 - 1) + data[4:])


@bomb("GiB at once")
def zarr_with_chunks_of_2_to_the_60(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return zarr2(folder, valid, "zstd", shape=[2**20] * 3, chunks=[2**20] * 3)


@bomb("is missing")
def zarr_of_2_to_the_180_voxels(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    found = zarr2(folder, valid, "zstd", shape=[2**60] * 3, chunks=[6, 10, 12])
    (found["path"] / "0.0.0").unlink()
    return found


@bomb("GiB at once")
def zarr_of_rank_40(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return zarr2(folder, valid, "zstd", shape=[4] * 40, chunks=[2] * 40)


def nested(depth: int = 100_000) -> str:
    return '{"a": ' * depth + "1" + "}" * depth


@bomb("nested too deep")
def zarr_metadata_nested_100000_deep(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    found = zarr2(folder, valid, "zstd")
    (found["path"] / ".zattrs").write_text(nested())
    return found


@bomb("nested too deep")
def n5_attributes_nested_100000_deep(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    top = copied(folder, valid["n5 attributes"].parent)
    (top / "attributes.json").write_text(nested())
    return {"kind": "n5", "path": top}


@bomb("nested too deep")
def dataset_json_nested_100000_deep(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    top = copied(folder, valid["dataset.json"].parent)
    (top / "dataset.json").write_text(nested())
    return {"kind": "tiff", "path": top}


@bomb("too deep|cannot be read")
def latents_index_nested_100000_deep(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    top = copied(folder, valid["latents index"].parent)
    (top / "index.json").write_text(nested())
    return {"kind": "latents", "path": top}


@bomb("is given twice")
def zarr_metadata_with_a_key_given_twice(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    found = zarr2(folder, valid, "zstd")
    (found["path"] / ".zattrs").write_text('{"axes": 1, "axes": 2}')
    return found


@bomb("17,179,869,184 bytes, more than")
def zarr_metadata_of_16_gib_of_holes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    found = zarr2(folder, valid, "zstd")
    with (found["path"] / ".zattrs").open("wb") as file:
        file.truncate(1 << 34)
    return found


def sharded(folder: Path, valid: dict[str, Path], offset: int, size: int) -> dict[str, Any]:
    top = copied(folder, valid["zarr3 zarr.json"].parent)
    place = top / "c" / "0" / "0" / "0"
    from google_crc32c import value

    data = place.read_bytes()
    index = bytearray(data[-4 - 16 * 8 : -4])  # eight chunks, then the checksum
    index[:16] = struct.pack("<QQ", offset, size)
    place.write_bytes(data[: -4 - 16 * 8] + index + struct.pack("<I", value(bytes(index))))
    return {"kind": "zarr", "path": top}


@bomb("bytes too early")
def shard_index_that_leads_beyond_the_file(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return sharded(folder, valid, 2**60, 100)


@bomb("bytes too early")
def shard_index_with_a_chunk_of_2_to_the_60_bytes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return sharded(folder, valid, 0, 2**60)


@bomb("the index of a shard of .* GiB at once")
def shard_of_2_to_the_60_chunks(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    top = copied(folder, valid["zarr3 zarr.json"].parent)
    facts = json.loads((top / "zarr.json").read_text())
    facts["shape"] = facts["chunk_grid"]["configuration"]["chunk_shape"] = [2**20] * 3
    facts["codecs"][0]["configuration"]["chunk_shape"] = [1, 1, 1]
    (top / "zarr.json").write_text(json.dumps(facts))
    return {"kind": "zarr", "path": top}


def n5(folder: Path, valid: dict[str, Path], data: bytes, **changes: Any) -> dict[str, Any]:
    top = copied(folder, valid["n5 attributes"].parent)
    (top / "0" / "0" / "0").write_bytes(data)
    facts = json.loads((top / "attributes.json").read_text()) | changes
    (top / "attributes.json").write_text(json.dumps(facts))
    return {"kind": "n5", "path": top}


N5_HEAD = struct.pack(">HH3I", 0, 3, 12, 10, 6)


@bomb("more than the .* of a block")
def n5_block_that_says_it_is_larger(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return n5(folder, valid, struct.pack(">HH3I", 0, 3, 2**32 - 1, 2**32 - 1, 6) + gzip.compress(bytes(720)))


@bomb("fewer than the array has there")
def n5_block_that_says_it_is_smaller(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return n5(folder, valid, struct.pack(">HH3I", 0, 3, 12, 10, 5) + gzip.compress(bytes(600)))


@bomb("holds more than 720 bytes|more than a chunk can need")
def n5_block_of_xz_that_becomes_8_gib(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    data = N5_HEAD + lzma.compress(bytes(1 << 20)) * 8192
    return n5(folder, valid, data, compression={"type": "xz", "preset": 6})


# ---------------------------------------------------------------- latents


def latents(folder: Path, valid: dict[str, Path], **changes: Any) -> dict[str, Any]:
    data = valid["latents shard"].read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["latents"] |= changes
    text = json.dumps(header).encode()
    (folder / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return {"kind": "latents", "path": folder / "a.safetensors"}


@bomb("cut short")
def safetensors_with_a_header_of_2_to_the_60_bytes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    (folder / "a.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
    return {"kind": "latents", "path": folder / "a.safetensors"}


@bomb("cut short")
def safetensors_whose_tensor_ends_at_2_to_the_60(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return latents(folder, valid, data_offsets=[0, 2**60], shape=[2**20, 2**20, 2**10, 2**8])


@bomb("not as many as their shape takes")
def safetensors_of_another_shape_than_their_bytes(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return latents(folder, valid, shape=[10**700] * 5)


@bomb("cut short")
def safetensors_whose_tensor_begins_before_the_file(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return latents(folder, valid, data_offsets=[-3072, 0])


@bomb("whole numbers above 0")
def safetensors_of_a_negative_shape(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return latents(folder, valid, shape=[-3, -4, 8, 8])


def labelled(folder: Path, labels: np.ndarray, kind: str) -> dict[str, Any]:
    rows = np.zeros((len(labels), 4, 2, 2), np.float32)
    sizes = [0, rows.nbytes, rows.nbytes + labels.nbytes]
    header = {
        "latents": {"dtype": "F32", "shape": rows.shape, "data_offsets": sizes[:2]},
        "labels": {"dtype": kind, "shape": labels.shape, "data_offsets": sizes[1:]},
    }
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + rows.tobytes() + labels.tobytes()
    (folder / "a.safetensors").write_bytes(content)
    return {"kind": "latents", "path": folder / "a.safetensors"}


@bomb("`labels` is 1000000000000, expected classes below 100,000")
def latents_of_a_class_of_10_to_the_12(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return labelled(folder, np.array([0, 10**12, 1]), "I64")


@bomb("`labels` is 'float32', expected whole numbers")
def latents_whose_class_is_no_number(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return labelled(folder, np.array([0, np.nan, 1], np.float32), "F32")


def latents_of_zarr(folder: Path, labels: np.ndarray) -> dict[str, Any]:
    import zarr

    group = zarr.create_group(folder / "a.zarr", attributes={"vitrail_latents": {"version": 1}})
    group.create_array("latents", data=np.zeros((3, 4, 2, 2), np.float32))
    group.create_array("labels", data=labels)
    return {"kind": "latents", "path": folder / "a.zarr"}


@bomb(r"has the shape \[4, 1\] for 3 rows")
def latents_of_zarr_with_other_labels_than_rows(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return latents_of_zarr(folder, np.zeros((4, 1), np.int64))


@bomb("expected classes below 100,000")
def latents_of_zarr_of_a_class_of_10_to_the_12(folder: Path, valid: dict[str, Path]) -> dict[str, Any]:
    return latents_of_zarr(folder, np.array([0, 10**12, 1]))


# ---------------------------------------------------------------- all of them, in one process


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    top = tmp_path_factory.mktemp("bombs")
    valid = _valid(top)
    cases = []
    made = {name: make for name, (make, _) in MADE.items()}
    others = {"hdf5_attribute": hdf5_attribute, "hdf5_words": hdf5_words, "parquet_classes": parquet_classes}
    for name, make in (others | made).items():
        folder = top / name
        folder.mkdir()
        case = make(folder, valid)
        cases.append(case | {"name": name, "path": str(case["path"])})
    found = run_cases(cases)
    for child in top.iterdir():
        shutil.rmtree(child, ignore_errors=True)
    return found


def _valid(top: Path) -> dict[str, Path]:
    """The untouched file of each format."""
    return {name: Path(make(top / "unused", [0])[0]["original"]) for name, make in originals(top / "valid").items()}


@pytest.mark.parametrize("name", MADE)
def test_what_is_larger_than_it_says_is_refused(outcomes: dict[str, str], name: str) -> None:
    kind = "error: " if re.search("nested|twice|pattern", name) and "latents" not in name else "refused: "
    assert outcomes[name].startswith(kind), outcomes[name]  # those that are refused, data.bad: skip leaves out
    assert re.search(MADE[name][1], outcomes[name]), outcomes[name]
    assert VALUES.nbytes == 720  # as sentences above say


def test_words_of_parquet_are_kept_once(outcomes: dict[str, str]) -> None:
    assert outcomes["parquet_classes"].startswith("array"), outcomes["parquet_classes"]


def test_a_large_attribute_of_hdf5_is_not_looked_at(outcomes: dict[str, str]) -> None:
    assert outcomes["hdf5_attribute"] == "array (1, 6, 8, 8) uint8"


def test_axes_of_hdf5_that_are_one_word_are_not_looked_at(outcomes: dict[str, str]) -> None:
    assert outcomes["hdf5_words"] == "array (1, 6, 8, 8) uint8"
