"""Adaptive trees: the leaves are those of greedy splitting; tokens and images go back and forth exactly."""

import heapq
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from vitrail.layers import trees
from vitrail.layers.kernels import adaptive_kernels
from vitrail.layers.tokens import patchify
from vitrail.layers.trees import Tree, build_trees, check_length, is_full
from vitrail.report.panels import tree_picture
from vitrail.report.views import LINES

SHAPES = [(32, 32), (16, 16, 16), (24, 40), (33, 7), (9, 20, 13), (64,), (4, 8, 8, 4)]  # powers of two, and others


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def whole_scores(*shape: int, most: int = 1000, seed: int = 0) -> torch.Tensor:
    """Scores whose sums are exact in fp32."""
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(seed)).float()


def random_tree(shape: tuple[int, ...], *, leaves: int = 64, patch: int = 4, batch: int = 2, min_leaf: int = 2) -> Tree:
    gain = 2 ** len(shape) - 1
    score = draw(batch, *shape) ** 8  # uneven, so that leaves have many sizes
    return build_trees(score, length=leaves // gain * gain + 1, patch=patch, min_leaf=min_leaf)


def greedy(score: torch.Tensor, length: int, min_leaf: int, *, fill: bool = True) -> list[tuple[tuple[int, ...], int]]:
    """Split the best leaf again and again with a heap; corners and sides depth-first."""
    values, shape = score.double().numpy(), tuple(score.shape)
    ndim, root = len(shape), 1 << (max(shape) - 1).bit_length()

    def entry(corner: tuple[int, ...], side: int) -> tuple:
        total = values[tuple(slice(c, c + side) for c in corner)].sum()
        return -total, -side, corner, side  # equal scores: the coarser, then the first row-major

    heap, split, count = [entry((0,) * ndim, root)], set(), 1
    while heap:
        value, _, corner, side = heapq.heappop(heap)
        if side <= min_leaf:
            continue
        steps = itertools.product((0, side // 2), repeat=ndim)
        corners = [tuple(c + s for c, s in zip(corner, step, strict=True)) for step in steps]
        children = [c for c in corners if all(x < n for x, n in zip(c, shape, strict=True))]
        if count + len(children) - 1 > length or (value == 0 and not fill):
            break
        count += len(children) - 1
        split.add((corner, side))
        for child in children:
            heapq.heappush(heap, entry(child, side // 2))

    def walk(corner: tuple[int, ...], side: int) -> list[tuple[tuple[int, ...], int]]:
        if (corner, side) not in split:
            return [(corner, side)] if all(x < n for x, n in zip(corner, shape, strict=True)) else []
        steps = itertools.product((0, side // 2), repeat=ndim)
        return [leaf for step in steps for leaf in walk(tuple(map(sum, zip(corner, step, strict=True))), side // 2)]

    return walk((0,) * ndim, root)


def leaves_of(tree: Tree, sample: int) -> list[tuple[tuple[int, ...], int]]:
    valid = tree.valid[sample]
    assert torch.equal(valid, valid.sort(descending=True).values)  # padding at the end
    return list(zip(map(tuple, tree.corner[sample][valid].tolist()), tree.side[sample][valid].tolist(), strict=True))


def compare(images: int, volumes: int, largest: tuple[int, int]) -> None:
    """Random sizes, lengths and smallest leaves, with few and with many equal scores."""
    rng = torch.Generator().manual_seed(1)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=rng))

    for ndim, count, limit in ((2, images, largest[0]), (3, volumes, largest[1])):
        for case in range(count):
            shape = (2 ** pick(2, limit.bit_length() - 1),) * ndim
            if case % 3 == 2:
                shape = tuple(pick(1, limit) for _ in range(ndim))
            most = (1000, 1000, 2)[case % 3] if case % 2 else 4
            score = whole_scores(1, *shape, most=most, seed=case)
            length = (2**ndim - 1) * pick(0, 60) + 1
            min_leaf, fill = 2 ** pick(0, 2), bool(pick(0, 1))
            tree = build_trees(score, length=length, patch=2, min_leaf=min_leaf, fill=fill)
            assert leaves_of(tree, 0) == greedy(score[0], length, min_leaf, fill=fill), (shape, length, min_leaf, fill)


def test_leaves_are_those_of_greedy_splitting() -> None:
    compare(100, 20, (64, 16))


@pytest.mark.slow
def test_leaves_are_those_of_greedy_splitting_in_full_numbers() -> None:
    compare(1000, 200, (128, 32))


def test_scores_without_equals_are_split_as_greedily() -> None:
    """Real numbers, whose sums round: the order is that of the exact sums."""
    for seed in range(20):
        score = draw(1, 32, 32, seed=seed)
        assert leaves_of(build_trees(score, length=100, patch=2), 0) == greedy(score[0], 100, 2)


def test_a_batch_is_its_images() -> None:
    score = whole_scores(3, 16, 16, 16)
    together = build_trees(score, length=71, patch=2)
    for i in range(3):
        alone = build_trees(score[i : i + 1], length=71, patch=2)
        assert torch.equal(together.corner[i], alone.corner[0])
        assert torch.equal(together[i : i + 1].side, alone.side)
    assert len(together) == 3
    assert torch.equal(together[torch.tensor([2])].side, together.side[2:])


@pytest.mark.parametrize("shape", SHAPES)
def test_leaves_tile_the_image(shape: tuple[int, ...]) -> None:
    tree = random_tree(shape, leaves=31)
    for sample in range(2):
        count = torch.zeros(shape)
        for corner, side in leaves_of(tree, sample):
            count[tuple(slice(c, c + side) for c in corner)] += 1
        assert bool((count == 1).all())
    cube = len(set(shape)) == 1 and shape[0] & (shape[0] - 1) == 0
    missing = tree.length - tree.valid.sum(1)
    assert int(missing.max()) < (1 if cube else 2 ** len(shape) - 1)  # the length is used up to less than one split


def test_small_leaves_do_not_stop_the_others() -> None:
    """The best node may be as small as allowed; splitting goes on with the next."""
    score = torch.zeros(1, 16, 16)
    score[0, 0, 0] = 100
    score[0, 15, 15] = 1
    tree = build_trees(score, length=25, patch=2, min_leaf=2)
    assert leaves_of(tree, 0)[0] == ((0, 0), 2)
    assert leaves_of(tree, 0)[-1] == ((14, 14), 2)


@pytest.mark.parametrize("shape", [(16, 16), (8, 8, 8), (12, 20)])
def test_an_image_without_edges(shape: tuple[int, ...]) -> None:
    length = 4 * (2 ** len(shape) - 1) + 1
    whole = build_trees(torch.zeros(1, *shape), length=length, patch=4, fill=False)
    assert leaves_of(whole, 0) == [((0,) * len(shape), 2 ** (max(shape) - 1).bit_length())]
    full = build_trees(torch.zeros(1, *shape), length=length, patch=4)
    assert length - int(full.valid.sum()) < 2 ** len(shape) - 1
    assert len(set(full.side[full.valid].tolist())) <= 2  # as even as the length allows
    x = torch.full((1, 2, *shape), 3.5)
    for tree in (whole, full):
        assert torch.equal(tree.paint(tree.serialise(x)), x)


def test_an_image_with_few_nodes_is_padded() -> None:
    tree = build_trees(draw(2, 8, 8), length=100, patch=2, min_leaf=4)
    assert tree.side.tolist() == [[4] * 4 + [0] * 96] * 2
    assert not tree.valid[:, 4:].any()
    assert torch.equal(tree.coordinates[0, :5], torch.tensor([[2.0, 2], [2, 6], [6, 2], [6, 6], [0, 0]]))
    assert torch.equal(tree.sizes[0, 3:5], torch.tensor([[4.0, 4], [0, 0]]))
    assert tree.coordinates.dtype == tree.sizes.dtype == torch.float32
    tokens = tree.serialise(draw(2, 1, 8, 8) + 1)
    assert (tokens[:, :4] > 0).all()
    assert not tokens[:, 4:].any()
    for length, min_leaf in ((1, 2), (4, 8), (4, 16)):
        assert build_trees(draw(1, 8, 8), length=length, patch=2, min_leaf=min_leaf).side[0, 0] == 8


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 8), (8, 12), (6, 6), (1, 1), (16, 8)])
@pytest.mark.parametrize("min_leaf", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("fill", [True, False])
def test_full_trees_are_known_by_their_shape(shape: tuple[int, ...], min_leaf: int, fill: bool) -> None:
    """What is called full has no padding whatever is scored; an image that fills is called so up to its last split."""
    gain, side = 2 ** len(shape) - 1, max(shape)
    cubic = shape in ((8, 8), (8, 8, 8), (1, 1))
    most = max(1, side // min_leaf) ** len(shape)  # leaves of a cube when all has been split
    told = []
    for length in sorted({1, gain + 1, most - gain, most, most + gain}):
        if length < 1:
            continue
        told.append((length, is_full(shape, length=length, min_leaf=min_leaf, fill=fill)))
        if told[-1][1]:
            for score in (torch.zeros(2, *shape), draw(2, *shape)):
                assert build_trees(score, length=length, patch=2, min_leaf=min_leaf, fill=fill).valid.all()
    assert told == [(length, fill and cubic and length <= most) for length, _ in told]


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("patch", [1, 2, 8])
def test_round_trips(shape: tuple[int, ...], patch: int) -> None:
    tree = random_tree(shape, patch=patch)
    x = draw(2, 3, *shape)
    tokens = tree.serialise(x)
    assert tokens.shape == (2, tree.length, patch ** len(shape) * 3)
    painted = tree.paint(tokens)
    again = tree.serialise(painted)
    torch.testing.assert_close(again, tokens, rtol=0, atol=0)  # a projection, bit for bit
    assert torch.equal(tree.paint(again), painted)
    # Painting keeps the mean of every leaf, so that of the image, too.
    torch.testing.assert_close(painted.mean(), x.mean(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_painting_any_tokens_is_undone(shape: tuple[int, ...]) -> None:
    """Tokens that are constant in every leaf give a piecewise constant image, and come back exactly."""
    tree = random_tree(shape)
    values = draw(2, tree.length, 1, seed=3) * tree.valid.unsqueeze(-1)
    tokens = values.expand(-1, -1, tree.num_voxels * 2).contiguous()
    painted = tree.paint(tokens)
    assert torch.equal(tree.serialise(painted), tokens)
    for corner, side in leaves_of(tree, 1)[:5]:
        box = painted[1, :, *(slice(c, c + side) for c in corner)]
        assert bool((box == box.flatten()[0]).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_is_its_leaf_channel_by_channel(shape: tuple[int, ...]) -> None:
    """Token t's channel c is the crop of channel c: averaged, repeated or as it is."""
    patch, ndim = 4, len(shape)
    tree = random_tree(shape, patch=patch)
    x = draw(2, 3, *shape)
    tokens = tree.serialise(x).unflatten(2, (*(patch,) * ndim, 3))
    inside = 0
    for t, (corner, side) in enumerate(leaves_of(tree, 1)):
        if any(c + side > n for c, n in zip(corner, shape, strict=True)):
            continue
        inside += 1
        for channel in range(3):
            crop = x[1, channel, *(slice(c, c + side) for c in corner)]
            for axis in range(ndim):
                if side >= patch:
                    crop = crop.unflatten(axis, (patch, side // patch)).mean(axis + 1)
                else:
                    crop = crop.repeat_interleave(patch // side, dim=axis)
            torch.testing.assert_close(tokens[1, t, ..., channel], crop, rtol=1e-5, atol=1e-6)
    assert inside


def test_equal_leaves_are_patches() -> None:
    """A tree whose leaves are all tokens is patchify, in another order."""
    x = draw(2, 3, 16, 16)
    tree = build_trees(torch.zeros(2, 16, 16), length=16, patch=4, min_leaf=4)
    assert torch.equal(tree.side, torch.full((2, 16), 4))
    order = (tree.corner[0] // 4 @ torch.tensor([4, 1])).tolist()
    assert order[:5] == [0, 1, 4, 5, 2]  # depth-first
    assert torch.equal(tree.serialise(x), patchify(x, (4, 4))[:, order])


def test_overhanging_leaves_average_what_is_inside() -> None:
    x = torch.arange(15.0).reshape(1, 1, 3, 5)
    tree = build_trees(torch.zeros(1, 3, 5), length=1, patch=2)
    assert tree.side.tolist() == [[8]]
    # Token voxels cover 4 x 4: the first has 3 x 4 voxels inside, the second 3 x 1, the lower ones none.
    first, second = x[..., :4].mean(), x[..., 4:].mean()
    torch.testing.assert_close(tree.serialise(x)[0, 0], torch.stack([first, second, first, second]))
    painted = tree.paint(torch.tensor([[[1.0, 2, 3, 4]]]))
    assert painted[0, 0].tolist() == [[1, 1, 1, 1, 2]] * 3


@pytest.mark.parametrize("shape", [(32, 32), (16, 16, 16)])
def test_linear_interpolates_each_leaf(shape: tuple[int, ...]) -> None:
    patch, ndim = 8, len(shape)
    tree = random_tree(shape, patch=patch)
    x = draw(2, 2, *shape)
    tokens = tree.serialise(x, resample="linear").unflatten(2, (*(patch,) * ndim, 2)).movedim(-1, 2)
    mode = "bilinear" if ndim == 2 else "trilinear"
    for t, (corner, side) in enumerate(leaves_of(tree, 0)):
        crop = x[:1, :, *(slice(c, c + side) for c in corner)]
        expected = functional.interpolate(crop, size=(patch,) * ndim, mode=mode, align_corners=False)
        torch.testing.assert_close(tokens[0, t], expected[0])
    odd = random_tree((9, 13), patch=patch)
    assert odd.serialise(torch.ones(2, 1, 9, 13), resample="linear").unique().tolist() in ([1.0], [0.0, 1.0])


def test_levels_that_no_leaf_needs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU makes all levels of the pyramid, since it would have to wait to know which are needed."""
    for shape in SHAPES:
        tree, x = random_tree(shape, patch=2), draw(2, 2, *shape)
        tokens = tree.serialise(x)
        with monkeypatch.context() as patch:
            patch.setattr(Tree, "_num_levels", lambda self: max(1, (max(self.shape) - 1).bit_length()))
            assert torch.equal(tree.serialise(x), tokens)
            painted = tree.paint(tokens)
        assert torch.equal(tree.paint(tokens), painted)


def test_bytes_and_booleans_are_averaged_as_numbers() -> None:
    x = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    tree = random_tree((32, 32))
    assert torch.equal(tree.serialise(x), tree.serialise(x.float()))
    assert tree.serialise(x, resample="linear").dtype == tree.serialise(x.bfloat16()).dtype == torch.float32


# ---------------------------------------------------------------- grids and gradients


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("patch", [2, 4, 64])
def test_to_grid_is_the_mean_of_what_is_painted(shape: tuple[int, ...], patch: int) -> None:
    tree = random_tree(shape)
    features = draw(2, tree.length, 5)
    grid = tree.to_grid(features, patch)
    assert grid.shape == (2, *(-(-n // patch) for n in shape), 5)
    voxels = features.unsqueeze(2).expand(-1, -1, tree.num_voxels, -1).flatten(2)
    painted = tree.paint(voxels)  # [2, 5, *S]
    for cell in list(itertools.product(*(range(n) for n in grid.shape[1:-1])))[:: 1 + grid[0].numel() // 200]:
        crop = painted[:, :, *(slice(c * patch, (c + 1) * patch) for c in cell)]
        torch.testing.assert_close(grid[:, *cell], crop.flatten(2).mean(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (4, 4, 4), (3, 5, 4)])
def test_gradients(shape: tuple[int, ...]) -> None:
    tree = random_tree(shape, leaves=16, patch=2, batch=2, min_leaf=1)
    assert len(set(tree.side[tree.valid].tolist())) > 1
    tokens = draw(2, tree.length, tree.num_voxels * 2).double().requires_grad_()
    assert torch.autograd.gradcheck(tree.paint, tokens, fast_mode=True)
    assert torch.autograd.gradcheck(lambda x: tree.to_grid(x, 2), tokens, fast_mode=True)
    images = draw(2, 1, *shape).double().requires_grad_()
    assert torch.autograd.gradcheck(tree.serialise, images, fast_mode=True)


def test_painting_bf16_keeps_its_type() -> None:
    tree = random_tree((16, 16))
    tokens = draw(2, tree.length, tree.num_voxels).bfloat16().requires_grad_()
    painted = tree.paint(tokens)
    painted.float().sum().backward()
    assert painted.dtype == torch.bfloat16
    assert tokens.grad is not None
    assert float(tokens.grad.float().sum()) == pytest.approx(2 * 256, rel=1e-2)


def test_a_stored_tree_is_rebuilt() -> None:
    tree = random_tree((16, 16, 16))
    again = Tree(tree.corner.clone(), tree.side.clone(), (16, 16, 16), 4)
    x = draw(2, 1, 16, 16, 16)
    assert torch.equal(again.serialise(x), tree.serialise(x))
    assert torch.equal(again.to("cpu").valid, tree.valid)


# ---------------------------------------------------------------- refusals


def test_lengths_that_no_tree_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"length 200 must be 3n\+1 in 2-D \(for example 199 or 202\)"):
        build_trees(torch.zeros(1, 8, 8), length=200, patch=2)
    with pytest.raises(ValueError, match=r"fixed_length 4095 must be 7n\+1 in 3-D \(for example 4089 or 4096\)"):
        check_length(4095, 3, name="fixed_length")
    with pytest.raises(ValueError, match=r"length 0 must be .*for example 1 or 4"):
        check_length(0, 2)
    check_length(16384, 2)
    check_length(4096, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch": 3}, "patch 3 must be a power of two, such as 4"),
        ({"min_leaf": 0}, "min_leaf 0 must be a power of two, such as 1"),
        ({"score": torch.zeros(4)}, r"score \[4\] must be"),
        ({"score": torch.zeros(0, 4, 4)}, "at least one image"),
        ({"score": torch.full((1, 4, 4), -1.0)}, "not negative"),
        ({"score": torch.full((1, 4, 4), math.nan)}, "finite"),
        ({"score": torch.full((1, 4, 4), math.inf)}, "finite"),
    ],
)
def test_bad_settings_are_refused(change: dict, message: str) -> None:
    settings = {"score": torch.zeros(1, 4, 4), "length": 4, "patch": 2} | change
    with pytest.raises(ValueError, match=message):
        build_trees(settings.pop("score"), **settings)


def test_tensors_that_do_not_fit_are_refused() -> None:
    tree = random_tree((8, 8), leaves=16, patch=2)
    for images in (draw(2, 3, 8, 9), draw(1, 3, 8, 8), draw(2, 8, 8)):
        with pytest.raises(ValueError, match="do not fit the tree"):
            tree.serialise(images)
    with pytest.raises(ValueError, match="do not fit the tree"):
        tree.paint(draw(2, tree.length, 5))
    with pytest.raises(ValueError, match="do not fit the tree"):
        tree.to_grid(draw(2, 5, 5), 2)
    with pytest.raises(ValueError, match="power of two"):
        tree.to_grid(draw(2, tree.length, 5), 6)
    with pytest.raises(ValueError, match="choose mean or linear"):
        tree.serialise(draw(2, 3, 8, 8), resample="cubic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be \[B, L, 2\]"):
        Tree(tree.corner[..., :1], tree.side, (8, 8), 2)


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize(("shape", "channels"), [((64, 48), 3), ((16, 24, 32), 1), ((16, 16, 16), 5)])
def test_a_tree_is_drawn(shape: tuple[int, ...], channels: int, tmp_path: Path) -> None:
    tree = random_tree(shape)
    path = tree_picture(tmp_path / "deep" / "tree.png", draw(channels, *shape), tree, 1, title="a $tree", spacing=shape)
    with Image.open(path) as picture:
        assert min(picture.size) > 200
        colours = np.asarray(picture.convert("RGB")).reshape(-1, 3).astype(int)
    assert (np.abs(colours - 255 * np.array(LINES)).max(1) < 60).sum() > 500
    with pytest.raises(ValueError, match="does not fit"):
        tree_picture(tmp_path / "tree.png", draw(channels, *shape[1:]), tree)
    with pytest.raises(ValueError, match="index 2"):
        tree_picture(tmp_path / "tree.png", draw(channels, *shape), tree, 2)


# ---------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gpu_builds_the_same_tree(shape: tuple[int, ...]) -> None:
    gain = 2 ** len(shape) - 1
    score = whole_scores(2, *shape, most=50)
    here = build_trees(score, length=12 * gain + 1, patch=4)
    there = build_trees(score.cuda(), length=12 * gain + 1, patch=4)
    assert torch.equal(here.corner, there.corner.cpu())
    assert torch.equal(here.side, there.side.cpu())
    x = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8)
    tokens = here.serialise(x)
    torch.testing.assert_close(there.serialise(x.cuda()).cpu(), tokens)
    assert torch.equal(there.paint(tokens.cuda()).cpu(), here.paint(tokens))
    torch.testing.assert_close(there.to_grid(tokens.cuda(), 2).cpu(), here.to_grid(tokens, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64,), (256, 256), (32, 32, 32), (32, 64)])
def test_kernels_and_torch_agree(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: sums that round, equal scores, no scores, what is not finite; all lengths and kinds of images."""
    gain = 2 ** len(shape) - 1
    spoilt = whole_scores(2, *shape, most=4)
    spoilt.view(-1)[:3] = torch.tensor([math.inf, -3.0, math.nan])
    fields = [draw(2, *shape) ** 4, whole_scores(2, *shape, most=2), torch.zeros(2, *shape), spoilt]
    grey = torch.randint(0, 256, (2, 3, *shape), generator=torch.Generator().manual_seed(0)).cuda()

    def build() -> list[torch.Tensor]:
        out = []
        for field, splits, fill in itertools.product(fields, (1, 5, 200), (True, False)):
            for min_leaf in (1, 2, 4):
                tree = build_trees(field.cuda(), length=splits * gain + 1, patch=4, min_leaf=min_leaf, fill=fill)
                out += [tree.corner, tree.side]
            out += [tree.serialise(images) for images in (grey.byte(), grey * 0.3, grey > 99, grey[:, :1].bfloat16())]
        return out

    ours = build()
    monkeypatch.setattr(trees, "adaptive_kernels", lambda *_: None)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, build(), strict=True))


def test_the_cpu_has_no_kernels() -> None:
    assert adaptive_kernels("nodes", torch.zeros(1)) is None
