"""Probes: small functions that read classes from frozen features, and how far their scores can be trusted.

- targets are shares of classes [N, K]: of an item 1 for its class, of a patch what part of its voxels has each class
- linear: multinomial regression of standardised features by L-BFGS; how much weights are held back is chosen on a fifth
  of the training samples, then all are fitted
- attentive: attention over all tokens of a sample, by one learned query for the class of the whole, by the tokens
  themselves for the classes of patches, and a linear layer (Bardes et al. 2024 probe so); AdamW
- classes of voxels come from those of patches by linear interpolation, as linear probes of DINOv2 do
- the interval of a mean Dice is that of crops drawn anew (bootstrap)

All is computed in float32 and follows from the seed.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vitrail.layers.patches import per_axis

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1)  # of holding weights back
USUAL = 1e-3  # where there are too few samples to choose
FOLDS = 5
ITERATIONS = 100
RATE, DECAY = 0.03, 1e-2  # of the attentive probe; the rate is divided by the root of the width
TOKENS = 8192  # of a step of it
DRAWS = 1000  # of a bootstrap
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


class Scaler(NamedTuple):
    """Mean and deviation of training features."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, features: Tensor) -> "Scaler":
        return cls(features.mean(dim=0), features.std(dim=0, correction=0).clamp(min=1e-6))

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.std


def linear(features: Tensor, shares: Tensor, groups: Tensor, queries: Tensor, *, seed: int) -> Tensor:
    """Return logits [M, K] of queries [M, D], by features [N, D] with shares [N, K].

    `groups` [N] are the samples that features are of: those of one are never on both sides where strength is chosen.
    """
    scaler = Scaler.of(features)
    features, queries = scaler(features), scaler(queries)
    each = groups.unique()
    strength = USUAL
    if len(each) >= FOLDS:
        order = torch.randperm(len(each), generator=torch.Generator().manual_seed(seed)).to(each.device)
        apart = torch.isin(groups, each[order[: len(each) // FOLDS]])
        losses = []
        for tried in STRENGTHS:
            layer = _fit(features[~apart], shares[~apart], tried)
            losses.append(_surprise(layer(features[apart]), shares[apart]).item())
        strength = STRENGTHS[losses.index(min(losses))]
    with torch.no_grad():
        return _fit(features, shares, strength)(queries)


@torch.enable_grad()
def _fit(features: Tensor, shares: Tensor, strength: float) -> nn.Linear:
    layer = nn.Linear(features.shape[1], shares.shape[1], device=features.device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    optimizer = torch.optim.LBFGS(
        layer.parameters(), max_iter=ITERATIONS, history_size=10, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = _surprise(layer(features), shares) + strength * layer.weight.square().sum() / 2
        value.backward()
        return value

    optimizer.step(loss)
    return layer.requires_grad_(False)


def _surprise(logits: Tensor, shares: Tensor) -> Tensor:
    return -(shares * logits.log_softmax(dim=-1)).sum(dim=-1).mean()


class Attentive(nn.Module):
    """Tokens [B, T, D] to logits [B, K] of the whole, or [B, T, K] of each."""

    def __init__(self, width: int, classes: int, heads: int, *, each: bool):
        super().__init__()
        self.query = None if each else nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        queries = tokens if self.query is None else self.query.expand(len(tokens), -1, -1)
        seen = self.attention(queries, tokens, tokens, need_weights=False)[0]
        if self.query is None:
            return self.head(self.norm(tokens + seen))
        return self.head(self.norm(seen)).squeeze(1)


def attentive(tokens: Tensor, shares: Tensor, queries: Tensor, *, heads: int, steps: int, seed: int) -> Tensor:
    """Return logits of queries [M, T, D]: [M, K] where shares are [N, K], [M, T, K] where they are of each token.

    Shares of a token that are all 0 say nothing of it.
    """
    device, width = tokens.device, tokens.shape[-1]
    scaler = Scaler.of(tokens.flatten(0, 1))
    heads = math.gcd(heads, width)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        probe = Attentive(width, shares.shape[-1], heads, each=shares.ndim == 3).to(device)
        rate = RATE / math.sqrt(width)
        optimizer = torch.optim.AdamW(probe.parameters(), lr=rate, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
        generator, order, at = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long), 0
        size = max(1, min(len(tokens), TOKENS // tokens.shape[1]))
        for _ in range(steps):
            if at + size > len(order):
                order, at = torch.randperm(len(tokens), generator=generator), 0
            rows = order[at : at + size].to(device)
            at += size
            optimizer.zero_grad()
            _surprise(probe(scaler(tokens[rows])), shares[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return torch.cat([probe(scaler(some)) for some in queries.split(size)])


# ---------------------------------------------------------------- classes of voxels


def shares_of(labels: Tensor, patch: int | tuple[int, ...], classes: int) -> Tensor:
    """Return what part of the scored voxels of each patch has each class, [B, T, K]; labels below 0 are not scored."""
    ndim = labels.ndim - 1
    patch = per_axis(patch, ndim)
    found = []
    for one in labels:
        for axis, side in enumerate(patch):
            one = one.unfold(axis, side, side)  # [*grid, *patch]
        cells = one.reshape(-1, math.prod(patch)).long()
        counts = functional.one_hot(cells.clamp(min=0), classes).mul(cells.unsqueeze(-1) >= 0).sum(dim=1).float()
        found.append(counts / counts.sum(dim=1, keepdim=True).clamp(min=1))
    return torch.stack(found)


def to_voxels(values: Tensor, grid: tuple[int, ...], patch: int | tuple[int, ...]) -> Tensor:
    """Bring logits or shares of patches [B, T, K] to classes of voxels [B, *S]."""
    size = tuple(n * side for n, side in zip(grid, per_axis(patch, len(grid)), strict=True))
    found = []
    for one in values.split(1):
        table = one.transpose(1, 2).unflatten(2, grid)
        found.append(functional.interpolate(table, size=size, mode=MODES[len(grid)]).argmax(dim=1).to(torch.int16))
    return torch.cat(found)


def count(predicted: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Return voxels of each sample and class that are right, and those that are true or predicted, [B, K] float64."""
    both, either = [], []
    for guess, truth in zip(predicted.long(), labels.long(), strict=True):
        scored = truth >= 0
        guess, truth = guess[scored], truth[scored]
        both.append(truth[guess == truth].bincount(minlength=classes)[:classes])
        either.append(truth.bincount(minlength=classes)[:classes] + guess.bincount(minlength=classes)[:classes])
    return torch.stack(both).double(), torch.stack(either).double()


def dice(both: Tensor, either: Tensor) -> Tensor:
    """Return Dice [..., K] of counts; NaN of a class that is neither there nor predicted."""
    return 2 * both / torch.where(either > 0, either, torch.nan)


def mean_dice_interval(both: Tensor, either: Tensor, *, seed: int) -> tuple[float, float] | None:
    """Return the interval of 95 % of the mean Dice over crops [B, K] drawn anew; None for a single crop."""
    number = len(both)
    if number < 2:
        return None
    drawn = torch.randint(number, (DRAWS, number), generator=torch.Generator().manual_seed(seed))
    weights = torch.zeros(DRAWS, number, dtype=torch.float64).scatter_add_(1, drawn, torch.ones_like(drawn).double())
    means = dice(weights @ both.cpu(), weights @ either.cpu()).nanmean(dim=1)
    low, high = torch.nanquantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


# ---------------------------------------------------------------- pictures


def principal_colours(tokens: Tensor, shown: Tensor) -> Tensor:
    """Return colours [B, T, 3] from 0 to 1 of shown tokens [B, T, D]: their first components among tokens [N, D]."""
    mean = tokens.double().mean(dim=0)
    centred = tokens.double() - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    vectors = vectors[:, values.argsort(descending=True)[:3]]
    signs = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)).sign()  # eigh gives either
    found = (shown.double() - mean) @ (vectors * signs)
    found = functional.pad(found, (0, 3 - found.shape[-1]))
    limits = torch.tensor([0.02, 0.98], dtype=found.dtype, device=found.device)
    low, high = found.flatten(0, -2).quantile(limits, dim=0)
    return ((found - low) / (high - low).clamp(min=1e-9)).clamp(0, 1).float()
