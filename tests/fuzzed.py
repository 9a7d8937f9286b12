"""One tiny valid file of each format, and how a changed copy of it is opened."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

Cases = list[dict[str, Any]]
VALUES = (np.arange(6 * 10 * 12).reshape(6, 10, 12) % 251).astype(np.uint8)


def originals(folder: Path) -> dict[str, Callable[[Path, Iterable[int]], Cases]]:
    """Format -> the cases of some seeds, in a folder of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, Callable[[Path, Iterable[int]], Cases]] = {}

    def add(name: str, kind: str, place: Path, top: Path | None = None, **keys: Any) -> None:
        """A file, or one file of a folder `top` that is copied with all else in it."""

        def cases(work: Path, seeds: Iterable[int]) -> Cases:
            shared: dict[str, Any] = {"kind": kind, "keys": keys, "original": str(place)}
            if top is None:
                shared |= {"path": str(work / place.name)}
            else:
                copy = work / top.name
                shutil.copytree(top, copy, dirs_exist_ok=True)
                shared |= {"path": str(copy / place.relative_to(top)), "folder": str(copy)}
            return [shared | {"name": f"{name}-{seed}", "mutate": seed} for seed in seeds]

        made[name] = cases

    _grids(folder, add)
    _stores(folder, add)
    _images(folder, add)
    return made


def _grids(folder: Path, add: Callable[..., None]) -> None:
    import h5py
    import netCDF4
    import nibabel
    import rasterio
    import tifffile

    np.save(folder / "a.npy", VALUES)
    add("npy", "numpy", folder / "a.npy")
    np.savez_compressed(folder / "a.npz", raw=VALUES)
    add("npz", "numpy", folder / "a.npz")
    for suffix in (".nii", ".nii.gz"):
        nibabel.save(nibabel.Nifti1Image(VALUES, np.eye(4)), folder / f"a{suffix}")
        add(f"nifti{suffix}", "nifti", folder / f"a{suffix}")
    tifffile.imwrite(folder / "a.tif", VALUES, tile=(16, 16), compression="zlib", metadata={"axes": "ZYX"}, ome=True)
    add("ome-tiff", "tiff", folder / "a.tif")
    tifffile.imwrite(folder / "b.tif", VALUES[0], bigtiff=True, compression="lzw", rowsperstrip=4)
    add("bigtiff", "tiff", folder / "b.tif")
    tifffile.imwrite(folder / "p.tif", np.repeat(VALUES[0, ..., None], 3, 2), compression="jpeg", tile=(16, 16))
    add("jpeg-tiff", "tiff", folder / "p.tif")
    with h5py.File(folder / "a.h5", "w") as file:
        raw = file.create_dataset("raw", data=VALUES, chunks=(3, 5, 6), compression="gzip", shuffle=True)
        raw.attrs["element_size_um"] = [1.0, 2.0, 3.0]
    add("hdf5", "hdf5", folder / "a.h5")
    with netCDF4.Dataset(folder / "a.nc", "w") as data:
        for name, size in zip("zyx", VALUES.shape, strict=True):
            data.createDimension(name, size)
        data.createVariable("t", "u1", ("z", "y", "x"), zlib=True)[:] = VALUES
    add("netcdf4", "netcdf", folder / "a.nc")
    with netCDF4.Dataset(folder / "c.nc", "w", format="NETCDF3_CLASSIC") as data:
        for name, size in zip("zyx", VALUES.shape, strict=True):
            data.createDimension(name, size)
        data.createVariable("t", "f4", ("z", "y", "x"))[:] = VALUES
    add("netcdf3", "netcdf", folder / "c.nc")
    shape: dict[str, Any] = {"width": 12, "height": 10, "count": 6, "dtype": "uint8"}
    with rasterio.open(folder / "g.tif", "w", driver="GTiff", compress="deflate", crs="EPSG:32633", **shape) as raster:
        raster.write(VALUES)
    add("geotiff", "geotiff", folder / "g.tif")


def _stores(folder: Path, add: Callable[..., None]) -> None:
    import numcodecs
    import tensorstore
    import zarr

    from vitrail.data.generate import Volume, write_ome_zarr

    codecs: dict[str, Any] = {
        "zstd": numcodecs.Zstd(),
        "blosc": numcodecs.Blosc(),
        "lz4": numcodecs.LZ4(),
        "gzip": numcodecs.GZip(),
        "bz2": numcodecs.BZ2(),
    }
    for name, codec in codecs.items():
        top = folder / f"{name}.zarr"
        array = zarr.create_array(top, shape=VALUES.shape, chunks=VALUES.shape, dtype="u1", zarr_format=2,
                                  compressors=codec, overwrite=True)  # fmt: skip
        array[:] = VALUES
        add(f"zarr2 {name}", "zarr", top / "0.0.0", top)
    add("zarr2 .zarray", "zarr", folder / "zstd.zarr" / ".zarray", folder / "zstd.zarr")
    top = folder / "sharded.zarr"
    array = zarr.create_array(top, shape=VALUES.shape, chunks=(3, 5, 6), shards=(6, 10, 12), dtype="u1", overwrite=True)
    array[:] = VALUES
    add("zarr3 shard", "zarr", top / "c" / "0" / "0" / "0", top)
    add("zarr3 zarr.json", "zarr", top / "zarr.json", top)
    top = folder / "ome.zarr"
    if not top.exists():
        write_ome_zarr(top, Volume(VALUES, VALUES), levels=1, chunk=8)
    add("ome_zarr", "ome_zarr", top / "zarr.json", top)
    top = folder / "a.n5"
    spec = {
        "driver": "n5",
        "kvstore": {"driver": "file", "path": f"{top}/"},
        "metadata": {
            "dimensions": [12, 10, 6], "blockSize": [12, 10, 6], "dataType": "uint8", "compression": {"type": "gzip"},
        },
    }  # fmt: skip
    tensorstore.open(spec, create=True, delete_existing=True).result().T.write(VALUES).result()
    add("n5 block", "n5", top / "0" / "0" / "0", top)
    add("n5 attributes", "n5", top / "attributes.json", top)


def _images(folder: Path, add: Callable[..., None]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    from vitrail.data.latents.store import write_latents

    colours = np.repeat(VALUES[0, ..., None], 3, 2)
    encoded = {}
    for name, form, pixels in (
        ("png", "PNG", colours),
        ("jpg", "JPEG", colours),
        ("webp", "WEBP", colours),
        ("tif", "TIFF", VALUES[0]),
    ):
        held = io.BytesIO()
        Image.fromarray(pixels).save(held, form)
        encoded[name] = held.getvalue()
        (folder / f"i.{name}").write_bytes(held.getvalue())
        add(f"image {name}", "image_folder", folder / f"i.{name}")
    deep = folder / "deep.png"
    import imagecodecs

    deep.write_bytes(imagecodecs.png_encode(colours.astype(np.uint16) * 257))
    add("image png of 16 bits", "image_folder", deep)
    rows = pa.table({"image": [{"bytes": encoded["png"], "path": "a"}] * 3, "label": [0, 1, 0]})
    pq.write_table(rows, folder / "a.parquet")
    add("parquet", "parquet", folder / "a.parquet")
    with tarfile.open(folder / "a.tar", "w") as tar:
        for name, content in (("a.png", encoded["png"]), ("a.cls", b"1"), ("b.png", encoded["png"]), ("b.cls", b"0")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    add("tar", "webdataset", folder / "a.tar")
    latents = np.random.default_rng(0).normal(size=(3, 4, 8, 8)).astype(np.float32)
    top = folder / "latents"
    if not top.exists():
        write_latents(top, iter([(latents, np.array([0, 1, 0]))]), classes=["a", "b"])
    shard = next(top.glob("*.safetensors"))
    add("latents shard", "latents", shard, top)
    add("latents index", "latents", top / "index.json", top)
    (folder / "layout" / "imagesTr").mkdir(parents=True, exist_ok=True)
    (folder / "layout" / "labelsTr").mkdir(exist_ok=True)
    import tifffile

    tifffile.imwrite(folder / "layout" / "imagesTr" / "a_0000.tif", VALUES)
    tifffile.imwrite(folder / "layout" / "labelsTr" / "a.tif", VALUES % 2)
    facts = {"channel_names": {"0": "em"}, "labels": {"background": 0, "cell": 1}, "file_ending": ".tif"}
    (folder / "layout" / "dataset.json").write_text(json.dumps(facts))
    add("dataset.json", "tiff", folder / "layout" / "dataset.json", folder / "layout")
