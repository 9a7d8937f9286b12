"""Whether a flipped bit in stored data would be noticed: which checksums they carry that are compared on reading.

Those of compressed streams count (gzip, zlib, bz2, PNG, zip), of HDF5 (fletcher32), of zarr (crc32c) and of zstd
frames, where the first chunk has one. Where nothing is known there is nothing to rely on.
"""

from pathlib import Path
from typing import Any

from vitrail.data.chunks import ChunkReader
from vitrail.data.places import read_facts

CHECKED = ("crc32c", "fletcher32", "crc32", "adler32", "gzip", "zlib", "bz2", "bzip2")  # codecs of zarr and N5
FILES = {".png": "png", ".npz": "zip", ".gz": "gzip"}
NONE = "none: a flipped bit in these files would go unnoticed"


def checksums_of(source: Any) -> str:
    """The checksum of a source's values in a word, or a sentence that they have none."""
    try:
        return _find(source) or NONE
    except Exception:  # whatever a library says: nothing is known, and reading tells what is wrong
        return NONE


def _find(source: Any) -> str | None:
    rows = getattr(source, "shards", None)
    if rows:  # of latents
        return rows[0].checksum
    entries = getattr(source, "entries", ())
    arrays = [stored for entry in entries[:1] for stored in (*entry.images, entry.labels) if stored is not None]
    if not arrays:
        return FILES.get(Path(source.items[0].name).suffix.lower())
    found = [_of_array(stored) for stored in arrays]
    return None if None in found else ", ".join(dict.fromkeys(str(each) for each in found))


def _of_array(stored: Any) -> str | None:
    if stored.chunk_reader is not None:
        return of_chunks(stored.chunk_reader)
    path, _, key = stored.name.partition("::")
    suffix = Path(path).suffix.lower()
    if suffix in (".tif", ".tiff"):
        import tifffile

        with tifffile.TiffFile(path) as file:
            return "deflate" if file.pages[0].compression in (8, 32946) else None
    if suffix in (".h5", ".hdf5", ".hdf", ".nc") and key:
        import h5py

        with h5py.File(path, "r", locking="best-effort") as opened:
            dataset = opened[key]
            return "fletcher32" if dataset.fletcher32 else "gzip" if dataset.compression == "gzip" else None
    return FILES.get(suffix)


def of_chunks(reader: ChunkReader) -> str | None:
    """The checksum that the chunks of an array carry."""
    names = _codecs(reader)
    if (checked := next((name for name in names if name in CHECKED), None)) is not None:
        return checked
    if names[-1:] != ["zstd"]:
        return None
    first = (0,) * len(reader.grid)
    path = reader._path(reader.layout.name(first))
    if reader.layout.shards is None:
        data = reader._fetch(path, most=reader._most)
    else:
        data = reader._read_inside(path, first) or b""
    start = data.find(b"\x28\xb5\x2f\xfd", 0, 64)  # of its frame, behind the header of a block in N5
    return "zstd" if start >= 0 and data[start + 4] & 4 else None


def _codecs(reader: ChunkReader) -> list[str]:
    """Names of codecs in the order in which a writer applies them."""
    for name in ("zarr.json", ".zarray", "attributes.json"):
        if (reader.array / name).is_file():
            document = read_facts(reader.array / name)
            if name == "zarr.json":
                codecs = document["codecs"]
                if codecs[0]["name"] == "sharding_indexed":
                    codecs = codecs[0]["configuration"]["codecs"]
                return [str(codec["name"]).removeprefix("numcodecs.") for codec in codecs]
            if name == ".zarray":
                each = [*(document.get("filters") or ()), document.get("compressor")]
                return [codec["id"] for codec in each if codec]
            return [(document.get("compression") or {"type": document.get("compressionType")})["type"]]
    return []
