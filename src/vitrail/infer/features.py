"""Features of trained networks, and how far apart two sets of samples are by them.

Networks tell pooled features of images, and the class that they name. They compute in float32, on one device:

- a run of vitrail: of a `vit` the tokens as it pools them, before its head; of a `mae` the mean of its encoder's tokens
- values are normalised by that run's own statistics; sizes and channels must fit, nothing is resized
- Inception, as FID has it, where torch-fidelity is installed and its weights lie in PyTorch's folder of weights:
  nothing is ever downloaded

Distances are pure functions of features [N, D]. Whatever is a small difference of large sums is computed in float64:

- Fréchet distance of Gaussians, squared as FID is: means and covariances of two sets of features
- KID: the unbiased squared MMD with a cubic kernel; it may come out below 0 where the sets are alike
- precision and recall (Kynkäänniemi et al. 2019): the share of one set that lies within reach of the other, where an
  item reaches as far as its k-th neighbour in its own set
- sliced Wasserstein-2: of one-dimensional projections onto random directions, which is exact for each of them
- classes by the votes of nearest neighbours, by the cosine (as Caron et al. 2021 judge DINO)
- the Wilson interval of a share, which holds for few samples and for shares of 0 and 1
"""

import io
import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vitrail.data.batch import Statistics
from vitrail.data.normalize import Values
from vitrail.data.statistics import stored as stored_statistics
from vitrail.errors import UserError
from vitrail.layers.patches import per_axis
from vitrail.models.mae import MAE
from vitrail.models.model import Model, Side, make_inputs
from vitrail.models.vit import ViT
from vitrail.objectives.objective import normalise
from vitrail.recipe.kinds import remedy
from vitrail.recipe.normalize import ByVariable
from vitrail.weights.runs import find_checkpoint, load, stored_recipe

ROWS = 1000  # of a table of distances or kernels that are computed at once
KERNEL_POWER = 3
INCEPTION = "weights-inception-2015-12-05-6726825d.pth"  # as torch-fidelity and torchmetrics name it


class Seen(NamedTuple):
    """Features and classes of a batch."""

    features: Tensor  # [B, D] float32
    classes: Tensor | None  # [B], the likeliest; None where the network names none


class Network(Protocol):
    """A trained network that looks at images."""

    title: str
    frechet: str  # what the Fréchet distance of its features is called
    names: tuple[str, ...]  # of the classes that it tells apart; empty where it does not

    def check(self, shape: tuple[int, ...], channels: int, what: str) -> None:
        """Refuse samples [channels, *shape] that it cannot look at."""

    def __call__(self, values: Tensor) -> Seen:
        """Look at values [B, C, *S] in the data's units."""
        ...


class RunNetwork:
    """The network of a run, its averaged weights where it has them."""

    frechet = "frechet"

    def __init__(
        self,
        run: str | Path,
        *,
        device: torch.device | None = None,
        checkpoint: str | int | None = None,
        weights: str | None = None,
    ):
        path, manifest = find_checkpoint(run, checkpoint)
        recipe = stored_recipe(manifest)
        self.run, self.device = run, device or torch.device("cpu")
        model = load(run, checkpoint=int(path.name[5:]), weights=weights)
        if not isinstance(model, ViT | MAE):
            raise UserError(
                f"{run}: features are those of a trained vit or mae, not of {recipe.model.kind!r}; give such a run, "
                "such as one of configs/digits/vit.yaml"
            )
        self.statistics: Statistics = stored_statistics(manifest["statistics"])
        names = [f"channel {number}" for number in range(len(self.statistics.mean))]
        self.values = Values(recipe.data.normalize, names, self.statistics, ["not bytes"])
        if len(names) != model.config.channels or isinstance(recipe.data.normalize, ByVariable):
            raise UserError(f"{run}: its entries have variables of their own, so samples cannot be told apart by it")
        self.model: Model = model.to(self.device)
        self.head: nn.Module | None = None
        if isinstance(model, ViT) and model.config.classes:
            head, model.head = model.head, nn.Identity()
            if model.config.pool != "tokens":  # those have a class each, and an image none
                self.head = head
        self.names: tuple[str, ...] = tuple(getattr(recipe.objective, "names", None) or ()) if self.head else ()
        if self.head is not None and not self.names:
            self.names = tuple(f"class {number}" for number in range(model.config.classes))
        self.title = f"{recipe.model.kind} of {run}, step {manifest['step']}"

    def check(self, shape: tuple[int, ...], channels: int, what: str) -> None:
        c = self.model.config
        expected = None if c.shape is None else per_axis(c.shape, c.ndim)
        if (expected is not None and shape != expected) or len(shape) != c.ndim:
            wanted = "x".join(map(str, expected or ["?"] * c.ndim))
            raise UserError(
                f"{what} is {'x'.join(map(str, shape))}, but {self.run} was trained on {wanted}; nothing is resized, "
                "since that changes what is compared: train it on data.crop of that size, or leave it out"
            )
        if channels != c.channels:
            raise UserError(
                f"{what} has {channels} channels, but {self.run} was trained on {c.channels}; give a run that was "
                "trained on the same variables"
            )

    @torch.no_grad()
    def __call__(self, values: Tensor) -> Seen:
        values = values.to(self.device)
        values = self.values.change(values)
        images, sources = normalise(values, self.statistics), [0] * len(values)
        # Trees grow as in the run's training: bytes are taken as they are, others by its statistics.
        span = self.values.span(sources, (), None, values.device)
        inputs, _ = make_inputs(self.model.config, images, scored=values, span=span)
        if isinstance(self.model, MAE):
            return Seen(pooled(self.model, *encode(self.model, inputs)), None)
        features = self.model(**inputs).float()
        if features.ndim == 3:  # not pooled
            features = features.mean(dim=1)
        return Seen(features, None if self.head is None else self.head(features).argmax(dim=1))


def encode(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Side]:
    """Run the encoder of a model alone; return its last tokens [B, prefix + N, D], and the side inputs.

    Inputs are those of the whole model, of which masks have no part: every token is seen.
    """
    side = model.encoder.derive({name: value for name, value in inputs.items() if name != "x"})
    x: Tensor = inputs["x"]
    for stage in model.encoder.stages():
        x = stage.run(x, side)
    return x, side


def pooled(model: Any, x: Tensor, side: Side) -> Tensor:
    """Return the feature [B, D] of whole samples: what a vit's head would see, else the mean of the tokens."""
    if isinstance(model, ViT) and model.config.pool != "tokens":
        return model.pool_tokens(x, side)
    tokens, valid = x[:, model.encoder.prefix :], side.get("valid")
    if valid is None:
        return tokens.mean(dim=1)
    return torch.where(valid.unsqueeze(-1), tokens, 0).sum(dim=1) / valid.sum(dim=1, keepdim=True).clamp(min=1)


class Inception:
    """The network of FID, as torch-fidelity has it, with weights that are already here."""

    title, frechet = "Inception", "fid"
    names: tuple[str, ...] = ()

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.device = model.to(device).eval(), device

    def check(self, shape: tuple[int, ...], channels: int, what: str) -> None:
        if len(shape) != 2 or channels not in (1, 3):
            raise UserError(f"{what} is no grey or colour image, which Inception looks at")

    @torch.no_grad()
    def __call__(self, values: Tensor) -> Seen:
        if values.shape[1] == 1:
            values = values.expand(-1, 3, -1, -1)
        if values.dtype != torch.uint8:  # images of 8 bits that a recipe makes smaller; samples are rounded, too
            values = values.round().clamp(0, 255).to(torch.uint8)
        return Seen(self.model(values.to(self.device))[0].float(), None)


def find_inception(dtypes: Iterable[Any], device: torch.device) -> tuple[Inception | None, str]:
    """Open Inception for samples and real data of some types, or tell why not."""
    others = sorted({str(dtype) for dtype in dtypes} - {"uint8"})
    if others:
        return None, f"FID is of images of 8 bits, and these are {', '.join(others)}"
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except ModuleNotFoundError as error:
        return None, f"FID needs {error.name}, which is not installed; {remedy(error.name or 'torch_fidelity')}"
    except Exception as error:  # torchvision, which it imports, may not fit this PyTorch
        return None, f"FID needs torch-fidelity, which cannot be imported here ({' '.join(str(error).split())})"
    weights = Path(torch.hub.get_dir()) / "checkpoints" / INCEPTION
    if not weights.is_file():
        return (
            None,
            f"FID needs the weights of Inception, which are never downloaded; put {INCEPTION} into {weights.parent}",
        )
    try:
        # It would unpickle the file, which may run code; so it gets a copy that was read as tensors and nothing else.
        copy = io.BytesIO()
        torch.save(torch.load(weights, map_location="cpu", weights_only=True), copy)
        copy.seek(0)
        model = FeatureExtractorInceptionV3("inception-v3-compat", ["2048"], feature_extractor_weights_path=copy)
    except Exception as error:
        return None, f"FID: {weights} cannot be used ({' '.join(str(error).split())}); restore the file"
    return Inception(model, device), ""


class Estimate(NamedTuple):
    value: float
    spread: float  # standard deviation over subsets


class Share(NamedTuple):
    value: float
    low: float
    high: float


class Cloud:
    """A set of features [N, D], with what is found once where it is compared with several others."""

    def __init__(self, features: Tensor):
        self.features = features.double()
        self._reach: dict[int, Tensor] = {}

    @cached_property
    def gaussian(self) -> "Gaussian":
        mean = self.features.mean(dim=0)
        centred = self.features - mean
        return Gaussian.of(mean, centred.T @ centred / (len(centred) - 1))

    @cached_property
    def alike(self) -> float:
        """Return the mean kernel of two different items."""
        number = len(self.features)
        return _kernel_sum(self.features, self.features, same=True) / (number * (number - 1))

    def reach(self, neighbours: int) -> Tensor:
        """Return the squared distance of each to its k-th neighbour."""
        if neighbours not in self._reach:
            self._reach[neighbours] = _reach(self.features, neighbours)
        return self._reach[neighbours]


def _clouds(first: Tensor | Cloud, second: Tensor | Cloud, *, least: int) -> tuple[Cloud, Cloud]:
    one, other = (each if isinstance(each, Cloud) else Cloud(each) for each in (first, second))
    _check(one.features, other.features, least=least)
    return one, other


class Gaussian(NamedTuple):
    mean: Tensor
    variance: Tensor  # of all directions together: the trace of the covariance
    root: Tensor  # of the covariance

    @classmethod
    def of(cls, mean: Tensor, covariance: Tensor) -> "Gaussian":
        covariance = covariance.double()
        return cls(mean.double(), covariance.trace(), _root(covariance))


def frechet(first: Tensor | Cloud, second: Tensor | Cloud) -> float:
    """Return the distance of the Gaussians with the moments of two sets of features, [N, D] and [M, D]."""
    one, other = _clouds(first, second, least=2)
    return apart(one.gaussian, other.gaussian)


def apart(first: Gaussian, second: Gaussian) -> float:
    """Return |m - m'|^2 + tr(S) + tr(S') - 2 tr((S^1/2 S' S^1/2)^1/2).

    The last trace is the sum of the singular values of S^1/2 S'^1/2: nothing has to be divided or inverted, so that
    covariances of fewer samples than features will do.
    """
    shared = torch.linalg.svdvals(first.root @ second.root).sum()
    return max(0.0, float((first.mean - second.mean).square().sum() + first.variance + second.variance - 2 * shared))


def _root(covariance: Tensor) -> Tensor:
    """Return the symmetric root; directions without variance are 0 rather than what rounding left there."""
    values, vectors = torch.linalg.eigh((covariance + covariance.T) / 2)
    noise = values.max().clamp(min=0) * len(values) * torch.finfo(values.dtype).eps
    values = torch.where(values > noise, values, 0.0)
    return (vectors * values.sqrt()) @ vectors.T


def kid(first: Tensor, second: Tensor, *, subsets: int = 100, size: int = 1000, seed: int = 0) -> Estimate:
    """Return the squared MMD of all features, and its spread over random subsets of `size` (at most half) of each."""
    _check(first, second, least=2)
    first, second = first.double(), second.double()
    value = squared_mmd(first, second)
    size = min(size, len(first) // 2, len(second) // 2)
    if size < 2:
        return Estimate(value, math.nan)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(subsets):
        rows = (torch.randperm(len(each), generator=generator)[:size].to(each.device) for each in (first, second))
        found.append(squared_mmd(*(each[chosen] for each, chosen in zip((first, second), rows, strict=True))))
    return Estimate(value, float(torch.tensor(found).std()))


def squared_mmd(first: Tensor | Cloud, second: Tensor | Cloud) -> float:
    """Return the unbiased squared MMD: no item is compared with itself."""
    one, other = _clouds(first, second, least=2)
    pairs = len(one.features) * len(other.features)
    return one.alike + other.alike - 2 * _kernel_sum(one.features, other.features, same=False) / pairs


def _kernel_sum(first: Tensor, second: Tensor, *, same: bool) -> float:
    width, total = first.shape[1], 0.0
    for rows in first.split(ROWS):
        total += float((rows @ second.T / width + 1).pow(KERNEL_POWER).sum())
    if same:
        total -= float((first.square().sum(dim=1) / width + 1).pow(KERNEL_POWER).sum())
    return total


def precision_recall(samples: Tensor | Cloud, real: Tensor | Cloud, *, neighbours: int = 3) -> tuple[float, float]:
    """Return the share of the samples within reach of real data, and of real data within reach of the samples."""
    one, other = _clouds(samples, real, least=neighbours + 1)
    return (
        _covered(one.features, other.features, other.reach(neighbours)),
        _covered(other.features, one.features, one.reach(neighbours)),
    )


def _reach(features: Tensor, neighbours: int) -> Tensor:
    found = []
    for first, rows in zip(range(0, len(features), ROWS), features.split(ROWS), strict=True):
        table = _squared(rows, features)
        here = torch.arange(len(rows), device=table.device)
        table[here, first + here] = torch.inf  # itself
        found.append(table.kthvalue(neighbours, dim=1).values)
    return torch.cat(found)


def _covered(features: Tensor, centres: Tensor, reach: Tensor) -> float:
    inside = [(_squared(rows, centres) <= reach).any(dim=1) for rows in features.split(ROWS)]
    return float(torch.cat(inside).double().mean())


def _squared(rows: Tensor, others: Tensor) -> Tensor:
    squares = rows.square().sum(dim=1, keepdim=True) + others.square().sum(dim=1)
    return (squares - 2 * rows @ others.T).clamp(min=0)


def nearest_classes(
    bank: Tensor, classes: Tensor, queries: Tensor, *, neighbours: int = 20, temperature: float = 0.07
) -> Tensor:
    """Return the class of each of queries [M, D] by the votes of its nearest in bank [N, D], whose classes are [N].

    Near is a large cosine c, and a vote weighs exp(c / temperature).
    """
    found = []
    for weights, places in _nearest(bank, queries, neighbours, temperature):
        votes = torch.zeros(len(weights), int(classes.max()) + 1, device=bank.device)
        votes.scatter_add_(1, classes[places], weights)
        found.append(votes.argmax(dim=1))
    return torch.cat(found)


def nearest_shares(
    bank: Tensor, shares: Tensor, queries: Tensor, *, neighbours: int = 20, temperature: float = 0.07
) -> Tensor:
    """Return how much of each class queries [M, D] are by the same votes, where the bank's own shares are [N, K]."""
    found = []
    for weights, places in _nearest(bank, queries, neighbours, temperature):
        weights = weights / weights.sum(dim=1, keepdim=True)
        found.append(torch.einsum("mn,mnk->mk", weights, shares[places]))
    return torch.cat(found)


def _nearest(bank: Tensor, queries: Tensor, neighbours: int, temperature: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the votes of the nearest in the bank weigh [m, n], and their places, for some queries at a time."""
    _check(bank, queries, least=1)
    bank, queries = (nn.functional.normalize(each.float(), dim=1) for each in (bank, queries))
    for rows in queries.split(max(1, ROWS * ROWS * 100 // len(bank))):
        near = (rows @ bank.T).topk(min(neighbours, len(bank)), dim=1)
        yield torch.exp(near.values / temperature), near.indices


def directions(voxels: int, number: int, *, seed: int) -> Tensor:
    """Draw random directions of length 1, [voxels, number], the same for the same seed everywhere."""
    drawn = torch.randn(number, voxels, generator=torch.Generator().manual_seed(seed))
    return (drawn / drawn.norm(dim=1, keepdim=True)).T.contiguous()


def sliced_wasserstein(first: Tensor, second: Tensor) -> float:
    """Return the root of the mean square over all P directions of projections [N, P] and [M, P]."""
    _check(first, second, least=1)
    n, m = len(first), len(second)
    first, second = (each.double().sort(dim=0).values for each in (first, second))
    # Quantile functions are steps; between two edges (in units of 1 / nm) both stay as they are.
    edges = torch.cat([torch.arange(n + 1) * m, torch.arange(m + 1) * n]).unique().to(first.device)
    start, length = edges[:-1], edges.diff().double()
    apart = (first[start // m] - second[start // n]).square()  # [edges, P]
    return float((length / (n * m)) @ apart.mean(dim=1)) ** 0.5


def wilson(right: int, number: int, *, z: float = 1.96) -> Share:
    """Return a share and its interval, of 95 % unless z says otherwise."""
    if not 0 <= right <= number or number < 1:
        raise ValueError(f"{right} of {number} is no share; give a number of at least 1 and no more hits than that")
    share, rest = right / number, z**2 / number
    middle = (share + rest / 2) / (1 + rest)
    half = z / (1 + rest) * math.sqrt(share * (1 - share) / number + rest / (4 * number))
    return Share(share, max(0.0, middle - half), min(1.0, middle + half))


def _check(first: Tensor, second: Tensor, *, least: int) -> None:
    for features in (first, second):
        if features.ndim != 2 or features.shape[1] != first.shape[1]:
            raise ValueError(f"features {list(first.shape)} and {list(second.shape)} must be [N, D] with the same D")
        if len(features) < least:
            raise ValueError(f"{len(features)} samples are too few to compare; give at least {least} of each")
        if not features.isfinite().all():
            raise ValueError(
                "features hold values that are not finite, so no distance can be told; look at the samples"
            )
