"""What the page is told: each layer as an OME-Zarr that exists only while it is asked for, and the state of the view.

The client of neuroglancer reads multi-scale Zarr by itself and asks for the chunks that it draws, no others. So the
server answers as if each layer were such a store, of uncompressed chunks; nothing of it lies on disk.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from vitrail.report.views import label_colour
from vitrail.view.layers import HIGHEST, MIXED, Layer

METERS = {
    "angstrom": 1e-10, "nanometer": 1e-9, "micrometer": 1e-6, "millimeter": 1e-3, "centimeter": 1e-2, "meter": 1.0,
    "kilometer": 1e3, "inch": 0.0254,
}  # fmt: skip
COLOURS = ("#ff3b3b", "#33dd55", "#4488ff", "#ffd23f", "#e455e4", "#35d0d0", "#ff8c2b", "#ffffff")  # of channels
RGB = {"red": "#ff0000", "green": "#00ff00", "blue": "#0000ff"}
PIXELS = {"x": 560, "y": 350, "z": 350}  # along the sides of one of the views, about
LARGE = 2**28  # voxels


def group_metadata(layer: Layer) -> dict[str, Any]:
    """Return zarr.json of a layer: a group with the levels of one image."""
    unit = {"unit": layer.unit} if layer.unit in METERS else {}
    axes: list[dict[str, Any]] = [{"name": axis, "type": "space", **unit} for axis in layer.axes]
    if layer.channel_axis:  # as all at once (c^), or one at a time (c'), in the words of the client
        axes.insert(0, {"name": "c^" if layer.channel_chunks == 1 else "c'"})
    datasets = []
    for number, level in enumerate(layer.levels):
        scale, shift = list(level.spacing), list(level.origin)
        if layer.channel_axis:  # channels have no half
            scale, shift = [1.0, *scale], [0.5, *shift]
        transforms = [{"type": "scale", "scale": scale}, {"type": "translation", "translation": shift}]
        datasets.append({"path": str(number), "coordinateTransformations": transforms})
    image = {"name": layer.name, "axes": axes, "datasets": datasets}
    return {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"ome": {"version": "0.5", "multiscales": [image]}},
    }


def array_metadata(layer: Layer, number: int) -> dict[str, Any]:
    """Return zarr.json of one level."""
    level = layer.levels[number]
    shape, chunk, names = list(level.shape), list(level.chunk), list(layer.axes)
    if layer.channel_axis:
        count = len(layer.channels)
        shape, chunk, names = [count, *shape], [1 if layer.channel_chunks > 1 else count, *chunk], ["c", *names]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": layer.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "dimension_names": names,
        "attributes": {},
    }


def class_names(layer: Layer) -> dict[str, Any]:
    """Return the names of classes as the client wants them: properties of segments."""
    label = {"id": "name", "type": "label", "values": [name_of(layer, number) for number in layer.classes]}
    ids = [str(number) for number in layer.classes]
    return {"@type": "neuroglancer_segment_properties", "inline": {"ids": ids, "properties": [label]}}


def name_of(layer: Layer, number: int) -> str:
    return layer.names.get(number, f"class {number}")


def colour_of(number: int) -> str:
    """Return the colour that a class has in all pictures."""
    return "#" + "".join(f"{round(255 * float(part)):02x}" for part in label_colour(number))


def state(layers: Sequence[Layer], root: str) -> dict[str, Any]:
    """Return the state in which the page opens: all layers, their middle, their colours and contrasts."""
    first = max(layers, key=lambda layer: len(layer.axes))
    shown = [axis for axis in "xyz" if any(axis in layer.axes for layer in layers)]
    level, meters = first.levels[0], METERS.get(first.unit or "", 0.0)
    sizes = dict(zip(first.axes, level.spacing, strict=True))
    dimensions = {axis: [sizes.get(axis, 1.0) * (meters or 1.0), "m" if meters else ""] for axis in shown}
    middle = {
        axis: origin / size + (n - 1) / 2 + 0.5
        for axis, origin, size, n in zip(first.axes, level.origin, level.spacing, level.shape, strict=True)
    }
    finest = min(sizes.values())
    longest = max(n * size / finest for n, size in zip(level.shape, level.spacing, strict=True))
    # Of data without coarse levels all that is shown is read as it is: no more than a screen of it at first.
    few = len(first.levels) > 1 or math.prod(level.shape) < LARGE
    zoom = max(n * sizes[axis] / finest / PIXELS[axis] for axis, n in zip(first.axes, level.shape, strict=True))
    zoom = zoom if few else min(zoom, 1.0)
    described = [_layer(layer, f"{root}/data/{number}", root, number) for number, layer in enumerate(layers)]
    return {
        "title": f"{layers[0].name} - vitrail",
        "dimensions": dimensions,
        "displayDimensions": shown,
        "position": [math.floor(middle.get(axis, 0.0)) + 0.5 for axis in shown],
        "crossSectionScale": max(zoom, 0.05),
        "projectionScale": 1.6 * longest,
        "layers": described,
        "layout": "4panel" if len(shown) == 3 else "xy",
        "showAxisLines": len(shown) == 3,
        "gpuMemoryLimit": 1 << 30,
        "systemMemoryLimit": 2 << 30,
    }


def _layer(layer: Layer, place: str, root: str, number: int) -> dict[str, Any]:
    source = f"zarr3://{place}/"
    if layer.kind == "labels":
        made: dict[str, Any] = {
            "type": "segmentation",
            "name": layer.name,
            "source": [source],
            "selectedAlpha": 0.55,
            "notSelectedAlpha": 0,
            "hideSegmentZero": True,
        }
        if layer.classes:
            made["source"].append(f"precomputed://{root}/names/{number}/")
            made["segments"] = [str(each) for each in layer.classes]
        if layer.few:
            made["segmentColors"] = {str(each): colour_of(each) for each in layer.classes or range(1, HIGHEST + 1)}
        return made
    made = {"type": "image", "name": layer.name, "source": source, "opacity": 1.0}
    if layer.channel_axis and layer.channel_chunks > 1:
        low, high = min(a for a, _ in layer.ranges), max(b for _, b in layer.ranges)
        made["localDimensions"] = {"c'": [1, ""]}
        made["localPosition"] = [0]
        return made | {"shader": _one(low, high)}
    if layer.channel_axis:
        return made | {"shader": _mixed(layer), "blend": "additive"}
    return made | {"shader": _one(*layer.ranges[0])}


def _one(low: float, high: float) -> str:
    window = f"#uicontrol invlerp contrast(range={json.dumps([low, high])})"
    return f"{window}\nvoid main() {{\n  emitGrayscale(contrast());\n}}\n"


def _mixed(layer: Layer) -> str:
    """Write the program that draws several channels over each other, each in its colour and with its own contrast."""
    controls, sums = [], []
    for number in range(min(len(layer.channels), MIXED)):
        colour = RGB.get(layer.channels[number], COLOURS[number % len(COLOURS)])
        window = json.dumps(list(layer.ranges[number]))
        controls += [
            f"#uicontrol invlerp contrast{number}(range={window}, channel={number})",
            f'#uicontrol vec3 colour{number} color(default="{colour}")',
        ]
        sums.append(f"contrast{number}() * colour{number}")
    return "\n".join(controls) + "\nvoid main() {\n  emitRGB(" + " + ".join(sums) + ");\n}\n"
