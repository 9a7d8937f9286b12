"""The kinds of `data.normalize`: how values become what a model sees.

    normalize: fit                                  # the default, {kind: standard}; none leaves values as they are
    normalize: {kind: minmax, to: [0, 1]}           # with data.statistics: volume as UCF-VIT has it
    normalize: {kind: window, window: [-1000, 400]} # CT
    normalize: {kind: variables, of: {tp: {kind: log, scale: 1.0e-5}}}

A kind says of one variable how values change one by one before augmentation (`change`, and back), what is measured of
them (over all entries together, of each entry, or of each volume, as data.statistics says), and which of the normalised
values are the ends of its range: black and white to scores of adaptive trees.
"""

from dataclasses import field
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from vitrail.recipe import config

Pair = tuple[float, float]


class Looked(Protocol):
    """Measurements of a variable."""

    mean: float
    std: float
    low: float
    high: float

    def percentiles(self, pair: Pair) -> Pair: ...


class Plain:
    """The common part of kinds, but for what they say otherwise."""

    measured: ClassVar[bool] = True

    @property
    def ends(self) -> Pair | None:
        """Return the normalised values that are black and white: 3 standard deviations, where nothing tells more."""
        return -3.0, 3.0

    @property
    def clips(self) -> bool:
        """Tell whether values beyond the ends are clipped to them."""
        return False

    def change(self, values: Any) -> Any:
        """Return a tensor of values as they are normalised and augmented."""
        return values

    def restore(self, values: Any) -> Any:
        """Take back what change() does."""
        return values

    def pair(self, looked: Looked) -> Pair:
        """Return mean and std of what was measured."""
        return looked.mean, looked.std


def between(low: float, high: float, to: Pair) -> Pair:
    """Return the mean and std by which two values become the ends of a range."""
    std = (high - low) / (to[1] - to[0])
    return low - to[0] * std, std


def _check_rise(name: str, pair: Pair) -> None:
    if not pair[0] < pair[1]:
        raise ValueError(f"{name}: {list(pair)} must rise; give the smaller number first")


class Ranged(Plain):
    """The common part of kinds that make two values the ends of a range."""

    to: Pair

    def __post_init__(self) -> None:
        _check_rise("to", self.to)

    @property
    def ends(self) -> Pair:
        return self.to

    @property
    def clips(self) -> bool:
        return True


@config
class Standard(Plain):
    """Mean 0 and variance 1, as measured."""

    kind: Literal["standard"] = "standard"


@config
class AsRead(Plain):
    """Values as they were read."""

    kind: Literal["none"] = "none"

    measured: ClassVar[bool] = False

    @property
    def ends(self) -> None:
        return None

    def pair(self, looked: Looked | None = None) -> Pair:
        return 0.0, 1.0


@config
class Given(Plain):
    """Normalisation by a mean and a standard deviation that are known."""

    kind: Literal["given"] = "given"
    mean: tuple[float, ...]  # of each variable
    std: tuple[Annotated[float, Field(gt=0)], ...]  # of each variable

    measured: ClassVar[bool] = False

    def pair(self, looked: Looked | None = None) -> Pair:
        return self.mean[0], self.std[0]


@config
class Percentiles(Ranged):
    """Two percentiles become the ends of a range: for data with rare extremes."""

    kind: Literal["percentiles"] = "percentiles"
    percentiles: Pair = (1.0, 99.0)  # the lower and the upper one
    to: Pair = (-1.0, 1.0)  # what they become
    clip: bool = False  # whether values beyond them become the same

    def __post_init__(self) -> None:
        low, high = self.percentiles
        if not 0 <= low < high <= 100:
            raise ValueError(f"percentiles: {[low, high]} must rise from 0 or more to 100 or less")
        super().__post_init__()

    @property
    def clips(self) -> bool:
        return self.clip

    def pair(self, looked: Looked) -> Pair:
        return between(*looked.percentiles(self.percentiles), self.to)


@config
class MinMax(Ranged):
    """The smallest and the largest value become the ends of a range; what lies beyond those measured is clipped."""

    kind: Literal["minmax"] = "minmax"
    to: Pair = (-1.0, 1.0)  # what they become

    def pair(self, looked: Looked) -> Pair:
        return between(looked.low, looked.high, self.to)


@config
class Window(Ranged):
    """Two values become the ends of a range, and what lies beyond them is clipped: windows of CT, in its units."""

    kind: Literal["window"] = "window"
    window: Pair  # values in the data's units, such as [-1000, 400]
    to: Pair = (-1.0, 1.0)  # what they become

    measured: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_rise("window", self.window)
        super().__post_init__()

    def pair(self, looked: Looked | None = None) -> Pair:
        return between(*self.window, self.to)


@config
class Logarithm(Plain):
    """Mean 0 and variance 1 of log(1 + x / scale); of values below 0, minus that of their size."""

    kind: Literal["log"] = "log"
    scale: Annotated[float, Field(gt=0)] = 1.0  # values far below it change as they are, far above it by their log

    def change(self, values: Any) -> Any:
        return (values.abs() / self.scale).log1p().copysign(values)

    def restore(self, values: Any) -> Any:
        return (values.abs().expm1() * self.scale).copysign(values)


Way = Standard | AsRead | Given | Percentiles | MinMax | Window | Logarithm
OfVariable = Annotated[Way, Field(discriminator="kind")]


@config
class ByVariable:
    """Each variable in a way of its own."""

    kind: Literal["variables"] = "variables"
    of: dict[str, OfVariable]  # by the name of the variable
    others: OfVariable = field(default_factory=Standard)  # of those that are not named

    def __post_init__(self) -> None:
        for name, kind in {**self.of, "others": self.others}.items():
            if isinstance(kind, Given) and (len(kind.mean), len(kind.std)) != (1, 1):
                raise ValueError(f"{name}: give one mean and one std, [...] of one number each")


Kind = Annotated[Way | ByVariable, Field(discriminator="kind")]


def spelt(value: Any) -> Any:
    """Return `normalize` in today's words: a mapping without a kind is of mean and std, or of percentiles."""
    if not isinstance(value, dict):
        return value
    if "kind" not in value:
        value = {name: part for name, part in value.items() if part not in (None, [], ())}  # as older runs stored it
        if set(value) not in ({"mean", "std"}, {"percentiles"}):
            raise ValueError("give mean and std, or percentiles such as [1, 99], or a kind")
        value = {"kind": "percentiles" if "percentiles" in value else "given", **value}
    return _as_tuples(value)


def _as_tuples(value: Any) -> Any:
    """Lists as tuples, since pydantic takes only these for pairs once a validator of ours has seen them."""
    if isinstance(value, dict):
        return {name: _as_tuples(part) for name, part in value.items()}
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def kind_of(normalize: Any, name: str) -> Any:
    """Return the kind of a variable."""
    if isinstance(normalize, ByVariable):
        return normalize.of.get(name, normalize.others)
    return {"fit": Standard(), "none": AsRead()}.get(normalize, normalize) if isinstance(normalize, str) else normalize
