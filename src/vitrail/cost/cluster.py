"""Clusters and what they can do: one file each, read by the planner and written by `vitrail doctor --calibrate`.

- A curve is a list of points (x, y) with x rising; between points y is interpolated over the logarithm of x, beyond the
  ends it stays flat.
- Rates are shares of a peak, so that the file says both what is promised and what is reached.
- A cluster is known by its name (a file of `clusters/` in this package) or by the path of a YAML file.
- A file may leave out what has a default here; unknown keys are errors.
- A plan is for a number of GPUs, or a range, in whole nodes.

No torch is imported here: what is wrong is told at once.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vitrail import disk
from vitrail.errors import UserError
from vitrail.recipe import yaml
from vitrail.recipe.kinds import nearest
from vitrail.recipe.yaml import dotted, show

if TYPE_CHECKING:
    from pydantic import TypeAdapter


Curve = tuple[tuple[float, float], ...]

# How a kernel that is bound by bandwidth goes through memory: straight on; with gaps, turns or repeats; as a norm of
# tokens, forward and backward; as a sum over rows; as a norm of maps, each on its own.
Walk = Literal["dense", "strided", "norm", "norm_backward", "sum", "maps"]
WALKS: tuple[Walk, ...] = get_args(Walk)
MOST_CHANNELS = 1e5
TYPES = ("bf16", "fp32", "float8")  # that have a peak
FOLDER = Path(__file__).with_name("clusters")
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")  # as pydantic calls keys that no class has
GIVEN = {  # what a type of a field asks for, in words
    "str": "text",
    "int": "a whole number",
    "Device": "the keys of a device (name, memory_gib ...)",
    "Link": "{latency_us: ..., gb_s: ...}",
    "Curve": "points [[x, share], ...]",
    "tuple[int, ...]": "a list of whole numbers",
    "tuple[float, ...]": "a list of numbers",
    "tuple[Checked, ...]": "a list of {strategy: ..., parameters: ..., gpus: [...], errors: [...]}",
    "dict[str, float]": "peaks by type, {bf16: ...}",
    "dict[str, Curve]": "a curve for each kind, {NAME: [[x, share], ...], ...}, as `vitrail doctor --calibrate` writes",
}
_STRICT = {"extra": "forbid"}  # what pydantic reads from __pydantic_config__


def at(curve: Curve, x: float) -> float:
    """Return the curve's y at x: interpolated over log x, flat beyond the ends."""
    if x <= curve[0][0]:
        return curve[0][1]
    for (left, low), (right, high) in itertools.pairwise(curve):
        if x <= right:
            share = math.log(x / left) / math.log(right / left)
            return low + share * (high - low)
    return curve[-1][1]


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    __pydantic_config__ = _STRICT
    name: str  # as torch names it, e.g. "NVIDIA H200"
    memory_gib: float  # that PyTorch can use
    tflops: dict[str, float]  # dense peaks by type: bf16, fp32, float8
    bandwidth_gb_s: float  # of its memory; bytes read and bytes written both count
    gemm: Curve  # x: FLOPs of one product, y: share of the bf16 peak
    gemm_fp32: Curve  # the same for fp32, of its own peak
    attention: dict[str, Curve]  # forward and backward; x: tokens of the keys, y: share of the bf16 peak, heads 64..128
    convolution: Curve  # x: channels, the geometric mean of those in and out, y: share of the bf16 peak
    launch_us: float  # host time of one kernel of a training, with the Python between it and the next
    reserve_gib: float  # context and library workspaces, which the allocator does not see
    fragmentation: float = 1.0  # reserved over allocated at the peak
    launch_compiled_us: float | None = None  # host time in compiled blocks; launch_us where it is not known
    gemm_odd: float = 1.0  # share of its rate that a product in 16 bits keeps where one of its sizes is odd
    kernel_us: float = 0.0  # that the device needs for a kernel with next to nothing to do
    # All else, by how it goes through memory (Walk); x: bytes that a kernel moves, or how many maps there are,
    # y: share of the bandwidth. All of it where there is no curve.
    elementwise: dict[str, Curve] = field(default_factory=dict)
    attention_tile: int = 1  # tokens; attention computes whole tiles of so many

    def __post_init__(self) -> None:
        _positive(self, "device", "memory_gib", "bandwidth_gb_s", "attention_tile")
        _positive(self, "device", "launch_us", "reserve_gib", "kernel_us", zero=True)
        if self.launch_compiled_us is not None:
            _positive(self, "device", "launch_compiled_us", zero=True)
        if not self.fragmentation >= 1:
            raise ValueError(f"device.fragmentation: expected 1 or more, got {self.fragmentation}")
        if not 0 < self.gemm_odd <= 1:
            raise ValueError(f"device.gemm_odd: expected a share above 0 up to 1, got {self.gemm_odd}")
        finite = all(0 < peak < math.inf for peak in self.tflops.values())
        if "bf16" not in self.tflops or not finite or not set(self.tflops) <= set(TYPES):
            raise ValueError(
                f"device.tflops: expected peaks above 0, of bf16 and of any of {', '.join(TYPES[1:])}, "
                f"got {self.tflops}"
            )
        if set(self.attention) != {"forward", "backward"}:
            raise ValueError(f"device.attention: expected forward and backward, got {', '.join(self.attention)}")
        if (most := max((x for x, _ in self.convolution), default=0)) > MOST_CHANNELS:
            raise ValueError(
                f"device.convolution: expected points [channels, share], got {most:g} channels; if these are "
                "FLOPs, as in earlier files, calibrate again"
            )
        if not set(self.elementwise) <= set(WALKS):
            got = ", ".join(self.elementwise)
            raise ValueError(f"device.elementwise: expected curves of any of {', '.join(WALKS)}, got {got}")
        for name in ("gemm", "gemm_fp32", "convolution"):
            _check_curve(f"device.{name}", getattr(self, name))
        for name in ("elementwise", "attention"):
            for kind, curve in getattr(self, name).items():
                _check_curve(f"device.{name}.{kind}", curve)

    def __hash__(self) -> int:  # of what can be hashed, so that results can be cached by device
        return hash((self.name, self.memory_gib, self.gemm))

    @property
    def compiled_us(self) -> float:
        return self.launch_us if self.launch_compiled_us is None else self.launch_compiled_us

    def peak(self, compute: str) -> float:
        """Return FLOP/s of a type; of bf16 where the file has none for it, of half as much for fp32."""
        bf16 = self.tflops["bf16"]
        return 1e12 * self.tflops.get(compute, bf16 / 2 if compute == "fp32" else bf16)


@dataclass(frozen=True)
class Link:
    """The way from one GPU to another of the same group, in one direction."""

    __pydantic_config__ = _STRICT
    latency_us: float
    gb_s: float

    def __post_init__(self) -> None:
        _positive(self, "link", "gb_s")
        _positive(self, "link", "latency_us", zero=True)


@dataclass(frozen=True)
class Checked:
    """The errors of plans of one model under one strategy, by how many GPUs had it."""

    __pydantic_config__ = _STRICT
    strategy: str
    parameters: float
    gpus: tuple[int, ...]
    errors: tuple[float, ...]  # samples/s planned over measured, less 1

    def __post_init__(self) -> None:
        _positive(self, "checked", "parameters")
        if len(self.gpus) != len(self.errors) or not all(gpus > 0 for gpus in self.gpus):
            raise ValueError(
                f"checked: expected an error for each number of GPUs, got gpus {list(self.gpus)} and "
                f"errors {list(self.errors)}"
            )


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs."""

    __pydantic_config__ = _STRICT
    name: str
    device: Device
    gpus_per_node: int
    nodes: int
    inside: Link  # between GPUs of a node
    between: Link  # a GPU's share of the network between nodes
    source: str  # where the numbers come from
    congestion: Curve = ((1.0, 1.0),)  # x: nodes, y: share of the bytes a second of `between` left at that many
    hop_congestion: Curve = ((1.0, 1.0),)  # the same of the speed of a hop: its latency is divided by it
    overlap: float = 0.9  # share of hidden communication that is free
    overlap_reduce: float | None = None  # the same of what adds up (all-reduce, reduce-scatter), where it differs
    price: float | None = None  # of a GPU hour
    currency: str = "USD"
    measured: dict[str, str] = field(default_factory=dict)  # facts of a calibration: date, versions
    checked: tuple[Checked, ...] = ()  # what its plans were compared with

    def __post_init__(self) -> None:
        _positive(self, "cluster", "gpus_per_node", "nodes")
        for name in ("congestion", "hop_congestion"):
            _check_curve(name, getattr(self, name))
        for name, share in (("overlap", self.overlap), ("overlap_reduce", self.overlap_of_sums)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name}: expected a share from 0 to 1, got {share}")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ValueError(f"price: expected a number of 0 or more, got {self.price}")

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.nodes, self.inside, self.between))

    @property
    def overlap_of_sums(self) -> float:
        return self.overlap if self.overlap_reduce is None else self.overlap_reduce

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def _positive(owner: Any, prefix: str, *names: str, zero: bool = False) -> None:
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            raise ValueError(f"{prefix}.{name}: expected a number {'of 0 or more' if zero else 'above 0'}, got {value}")


def _check_curve(name: str, curve: Curve) -> None:
    xs = [x for x, _ in curve]
    sound = bool(xs) and xs[0] > 0 and xs[-1] < math.inf and xs == sorted(set(xs))
    if not sound or not all(0 < share <= 1 for _, share in curve):
        raise ValueError(
            f"{name}: expected points [x, share] with x above 0 and rising and shares above 0 up to 1, "
            f"got {[list(point) for point in curve]}"
        )


def list_clusters() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def known_cluster(device: str | None) -> Cluster | None:
    """Return a cluster of this package with such a device; a CPU is like no other."""
    clusters = (load_cluster(name) for name in list_clusters())
    return None if device == "cpu" else next((one for one in clusters if one.device.name == device), None)


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Read a cluster of this package by its name, or of a YAML file by its path."""
    text = str(name_or_path)
    if text in list_clusters():
        return _read(FOLDER / f"{text}.yaml")
    if "/" in text or text.endswith((".yaml", ".yml")):
        return _read(Path(text))
    near = nearest(text, list_clusters())
    hint = f"did you mean {near!r}? " if near else ""
    raise UserError(
        f"cluster {text!r}: there is none of this name; {hint}known are {', '.join(list_clusters())}, or give the path "
        "of a YAML file such as `vitrail doctor --calibrate` writes"
    )


def write_cluster(cluster: Cluster, path: str | Path) -> None:
    path = Path(path)
    disk.publish(disk.write_whole(disk.draft_of(path), yaml.dump(asdict(cluster))), path)  # never over another


def _read(path: Path) -> Cluster:
    tree = yaml.read(path)
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected the keys of a cluster (name, device, nodes ...), got {show(tree)}")
    from pydantic import ValidationError

    try:
        return _adapter().validate_python(tree)
    except ValidationError as error:
        raise UserError(f"{path}: {_sentence(error.errors(include_url=False))}") from error


def _sentence(faults: list[Any]) -> str:
    """Say the first problem: unknown keys before missing ones, as a misspelt key is both."""
    first = next((fault for fault in faults if fault["type"] in UNKNOWN), faults[0])
    *path, key = first["loc"] or ("",)
    where = dotted(first["loc"])
    owners = {"device": Device, "inside": Link, "between": Link, "checked": Checked}
    owner = owners.get(str(path[0]) if path else "", Cluster)
    if first["type"] in UNKNOWN:
        keys = [one.name for one in fields(owner)]
        near = nearest(str(key), keys)
        return f"{where}: unknown key{f'; did you mean {near!r}?' if near else ''} (keys here: {', '.join(keys)})"
    if first["type"] == "missing":
        return f"{where} is missing: give {_given(owner, key)}"
    words = first["msg"].removeprefix("Value error, ")
    # Checks of a whole section name their own key; links stand under two names.
    if first["type"] == "value_error":
        return words.replace("link.", f"{where}.", 1) if where in ("inside", "between") else words
    whole = first["type"] in ("dataclass_type", "dict_type")
    asked = f"expected {_given(owner, key)}" if whole else words.split(",")[0]
    return f"{where}: {asked.replace('Input should be', 'expected')}, got {show(first['input'])}"


def _given(owner: type, key: Any) -> str:
    """Say what to give for a key."""
    return next((GIVEN.get(str(one.type), "a number") for one in fields(owner) if one.name == key), "a number")


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Cluster]:
    from pydantic import TypeAdapter

    return TypeAdapter(Cluster)


def check_gpus(cluster: Cluster, gpus: int) -> None:
    """Refuse a number of GPUs that the cluster cannot give, in whole nodes."""
    per_node = cluster.gpus_per_node
    if not 1 <= gpus <= cluster.gpus:
        many = f"{cluster.gpus:,} GPUs ({cluster.nodes:,} nodes of {per_node}); choose 1 to {cluster.gpus}"
        has = many if cluster.gpus > 1 else "one GPU; choose 1"
        raise UserError(f"--gpus {gpus}: cluster {cluster.name} has {has}")
    if gpus > per_node and gpus % per_node:
        below = gpus // per_node * per_node
        raise UserError(
            f"--gpus {gpus}: nodes of cluster {cluster.name} have {per_node} GPUs each; choose {below} or "
            f"{min(below + per_node, cluster.gpus)}"
        )


def read_gpus(text: str, cluster: Cluster) -> list[int]:
    """Read a number, or a range: its ends and the powers of two times a node's GPUs between them."""
    found = re.fullmatch(r"([0-9]{1,9})(?:\.\.([0-9]{1,9}))?", text.strip())
    if not found or (found[2] and int(found[2]) < int(found[1])):
        raise UserError(f"--gpus {text}: expected a number such as 64, or a range from less to more such as 8..512")
    first, last = int(found[1]), int(found[2] or found[1])
    for number in (first, last):
        check_gpus(cluster, number)
    sizes = (cluster.gpus_per_node * 2**power for power in range(-10, 31))
    between = {int(size) for size in sizes if size == int(size) and first < size < last}
    return sorted({first, last} | between)


def more_gpus(cluster: Cluster, gpus: int) -> Iterator[int]:
    """Yield this number and larger ones: powers of two in a node, then of whole nodes, in the end all GPUs."""
    yield gpus
    inside = (2**power for power in range(cluster.gpus_per_node.bit_length()))
    nodes = (cluster.gpus_per_node * 2**power for power in range(cluster.nodes.bit_length()))
    for number in sorted({*inside, *nodes, cluster.gpus}):
        if number > gpus:
            yield number
