"""Scores: edges equal OpenCV's in 2-D and a plain reference in 3-D; gradient and variance equal their definitions."""

import itertools
import math

import numpy as np
import pytest
import torch

from vitrail.data.generate import generate_em
from vitrail.layers import scores
from vitrail.layers.scores import CannyScore, GradientScore, VarianceScore, blur, canny_edges, hash_noise
from vitrail.layers.trees import build_trees

KINDS = [CannyScore(), GradientScore(), VarianceScore()]


@pytest.fixture(scope="module")
def tissue() -> torch.Tensor:
    """A real-looking volume, [1, 1, 24, 64, 64] bytes."""
    return torch.from_numpy(generate_em((24, 64, 64), seed=0).image)[None, None]


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of a few rows, so that small images have several."""
    monkeypatch.setattr(scores, "_SLAB", 300)


def drawn(rng: np.random.Generator, case: int, tissue: torch.Tensor) -> np.ndarray:
    """Noise, smooth noise of strong contrast, and tissue; [H, W, C]."""
    height, width, channels = *rng.integers(1, 60, 2), int(rng.choice([1, 1, 3, 4, 7]))
    image = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    if case % 3 == 1:
        wide = torch.from_numpy(image).permute(2, 0, 1)[None]
        for _ in range(2):
            wide = blur(wide, 5)
        smooth = wide[0].permute(1, 2, 0).numpy().astype(int)
        image = ((smooth - 128) * 6 + 128).clip(0, 255).astype(np.uint8)
    if case % 3 == 2:
        planes = tissue[0, 0, rng.integers(0, 24, channels)].numpy()
        image = np.ascontiguousarray(planes.transpose(1, 2, 0))
    return image


@pytest.mark.usefixtures("small_slabs")
def test_2d_edges_are_those_of_opencv(tissue: torch.Tensor) -> None:
    cv2 = pytest.importorskip("cv2", reason='OpenCV is the reference here: pip install "vitrail[adaptive]"')
    rng, edges = np.random.default_rng(0), 0
    for case in range(60):
        image = drawn(rng, case, tissue)
        tensor = torch.from_numpy(image).permute(2, 0, 1)[None].contiguous()
        low = float(rng.integers(0, 150))
        high = low + float(rng.choice([0, 50, 120.5, 300]))
        for size in (1, 3, 5):
            theirs = cv2.GaussianBlur(image, (size, size), 0).reshape(image.shape) if size > 1 else image
            ours = blur(tensor, size)
            np.testing.assert_array_equal(ours[0].permute(1, 2, 0).numpy(), theirs)
            expected = cv2.Canny(np.ascontiguousarray(theirs), low, high) > 0
            np.testing.assert_array_equal(canny_edges(ours, low, high)[0].numpy(), expected)
            edges += expected.sum()
    assert edges > 10_000


def test_without_opencv_the_score_is_the_same(tissue: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cv2", reason='OpenCV is the reference here: pip install "vitrail[adaptive]"')
    images = tissue[0, 0, :6].unflatten(0, (2, 3))  # [2, 3, 64, 64]
    noise = torch.tensor([[0.6, 0.3, 0.5], [0.9, 0.99, 0.5]])
    for kind, given in (
        (CannyScore(), None),
        (CannyScore(smooth=1, low=80, high=200), None),
        (CannyScore(random=True), noise),
    ):
        with_opencv = kind.score(images, given)
        with monkeypatch.context() as patch:
            patch.setattr(scores, "_opencv", lambda: None)
            without = kind.score(images, given)
        assert torch.equal(with_opencv, without)
        assert with_opencv.dtype == torch.float32
        assert with_opencv.unique().tolist() == [0, 1]


# ---------------------------------------------------------------- three dimensions


def plain_canny_3d(image: np.ndarray, low: int, high: int) -> np.ndarray:
    """The definition, voxel by voxel."""
    x = np.pad(image.astype(int), 1, mode="edge")
    gradients = []
    for axis in range(3):
        g = x
        for other in range(3):
            a, b, c = (np.take(g, range(k, g.shape[other] - 2 + k), other) for k in range(3))
            g = c - a if other == axis else a + 2 * b + c
        gradients.append(g)
    steep = np.pad(sum(np.abs(g) for g in gradients), 1)
    state = np.zeros_like(steep)
    for place in itertools.product(*(range(n) for n in image.shape)):
        g = np.array([axis[place] for axis in gradients])
        largest = np.abs(g).max()
        step = np.where(5 * np.abs(g) >= 2 * largest, np.sign(g), 0)
        first = step[np.nonzero(step)[0][0]] if largest else 1
        at = np.array(place) + 1
        here = steep[tuple(at)]
        if here > 4 * low and here > steep[tuple(at - first * step)] and here >= steep[tuple(at + first * step)]:
            state[tuple(at)] = 2 if here > 4 * high else 1
    stack = [tuple(p) for p in np.argwhere(state == 2)]
    while stack:
        place = stack.pop()
        for step in itertools.product((-1, 0, 1), repeat=3):
            near = tuple(p + s for p, s in zip(place, step, strict=True))
            if state[near] == 1:
                state[near] = 2
                stack.append(near)
    return state[1:-1, 1:-1, 1:-1] == 2


@pytest.mark.usefixtures("small_slabs")
def test_3d_edges_are_those_of_the_definition(tissue: torch.Tensor) -> None:
    rng = np.random.default_rng(0)
    noise = torch.from_numpy(rng.integers(0, 256, (1, 1, 9, 11, 7), dtype=np.uint8))
    cases = [(noise, 100, 400), (noise, 300, 420), (blur(noise, 5), 20, 60), (tissue[..., :12, :20, :20], 50, 250)]
    for image, low, high in cases:
        expected = plain_canny_3d(image[0, 0].numpy(), low, high)
        assert 0 < expected.sum() < expected.size / 2
        assert expected.sum() > plain_canny_3d(image[0, 0].numpy(), high, high).sum()  # hysteresis has work to do
        np.testing.assert_array_equal(canny_edges(image, low, high)[0].numpy(), expected)
    both = torch.cat([noise, 255 - noise])
    together = canny_edges(both, 100, 400)
    assert torch.equal(together[1:], canny_edges(both[1:], 100, 400))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_edges_across_every_axis_are_found(axis: int) -> None:
    """A step along one axis: one layer of voxels, wherever it lies. Slices along that axis alone show nothing."""
    volume = torch.zeros(1, 1, 12, 12, 12, dtype=torch.uint8)
    volume.narrow(2 + axis, 6, 6)[...] = 60
    edges = CannyScore().score(volume)[0].movedim(axis, 0)
    assert edges.sum() == 12 * 12
    assert edges[5].all()  # the first of the two equal layers
    # The same step in an image has the same length against the thresholds.
    for low in (239, 240):
        kind = CannyScore(smooth=1, low=low, high=low)
        flat = torch.zeros(1, 1, 12, 12, dtype=torch.uint8)
        flat[..., 6:] = 60
        assert kind.score(volume).any() == kind.score(flat).any() == (low < 240)


def test_a_ball_has_a_thin_closed_surface() -> None:
    grid = torch.stack(torch.meshgrid(*[torch.arange(32.0)] * 3, indexing="ij")) - 15.5
    ball = (grid.square().sum(0).sqrt() < 10).float()[None, None]
    edges = CannyScore().score(ball)[0]
    distance = grid.square().sum(0).sqrt()[edges > 0]
    assert float(distance.min()) > 8
    assert float(distance.max()) < 12
    assert 4 * math.pi * 100 * 0.6 < float(edges.sum()) < 4 * math.pi * 100 * 2


def test_long_weak_chains_are_followed() -> None:
    """A spiral of weak edge that is strong at one end only."""
    state = torch.zeros(1, 41, 41, dtype=torch.uint8)
    row, column, step, turns = 1, 1, (0, 1), 0
    state[0, row, column] = 2
    while turns < 2:
        ahead = (row + step[0], column + step[1])
        beyond = (ahead[0] + step[0], ahead[1] + step[1])
        free = 0 < ahead[0] < 40 and 0 < ahead[1] < 40 and not state[0, ahead[0], ahead[1]]
        if free and (not (0 <= beyond[0] <= 40 and 0 <= beyond[1] <= 40) or not state[0, beyond[0], beyond[1]]):
            (row, column), turns = ahead, 0
            state[0, row, column] = 1
        else:
            step, turns = (step[1], -step[0]), turns + 1
    lonely = state.clone()
    lonely[0, 1, 1] = 1
    length = int((state > 0).sum())
    assert length > 700
    scores._follow(state)
    scores._follow(lonely)
    assert int((state == 2).sum()) == length
    assert not (lonely == 2).any()


@pytest.mark.parametrize("kind", KINDS)
def test_slabs_change_nothing(kind: CannyScore, tissue: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch at once, as a GPU takes it, gives the same as one image after the other in slabs."""
    monkeypatch.setattr(scores, "_opencv", lambda: None)
    for images in (torch.cat([tissue, tissue.flip(2)]), tissue[0, 0, :6].unflatten(0, (2, 3))):
        monkeypatch.setattr(scores, "_SLAB", 3000)
        in_slabs = kind.score(images)
        with monkeypatch.context() as patch:
            patch.setattr(scores, "_ranges", lambda batch, height, *_: iter([(slice(0, batch), slice(0, height))]))
            assert torch.equal(kind.score(images), in_slabs)


# ---------------------------------------------------------------- settings


def test_random_settings() -> None:
    kind = CannyScore(random=True)
    noise = torch.tensor([[0.0, 0.0, 0.25], [0.25, 0.0, 0.0], [0.5, 0.5, 0.0], [0.999, 0.999, 0.0], [0.1, 0.9, 0.75]])
    rows = kind._settings(5, noise)
    assert [row[:3] for row in rows[1:4]] == [(1, 50, 100), (3, 75, 125), (5, 99, 149)]
    assert [row[0] for row in rows] == [0, 1, 3, 5, 0]
    images = torch.randint(0, 256, (5, 1, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = kind.score(images, noise)
    for i in (1, 2, 3):
        smooth, low, high = rows[i][:3]
        alone = CannyScore(smooth=smooth, low=low, high=high)  # type: ignore[arg-type]
        assert torch.equal(out[i : i + 1], alone.score(images[i : i + 1]))
    assert not torch.equal(out[0], out[4])
    for i in (0, 4):  # a quarter of the samples: uniform noise
        assert len(out[i].unique()) > 1000
        assert float(out[i].min()) >= 0
        assert float(out[i].max()) < 1
    assert torch.equal(kind.score(images), CannyScore().score(images))  # evaluating: fixed settings
    with pytest.raises(ValueError, match=r"noise \[2, 3\] must be \[5, 3\]"):
        kind.score(images, noise[:2])


def test_hashed_noise_is_uniform_and_fixed() -> None:
    field = hash_noise(7, (256, 256), torch.device("cpu"))
    assert torch.equal(field, hash_noise(7, (256, 256), torch.device("cpu")))
    assert float(field.mean()) == pytest.approx(0.5, abs=0.005)
    assert float(field.var()) == pytest.approx(1 / 12, abs=0.002)
    other = hash_noise(8, (256, 256), torch.device("cpu"))
    for shifted in (other, field.roll(1, 0), field.roll(1, 1)):
        assert abs(float(torch.corrcoef(torch.stack([field.flatten(), shifted.flatten()]))[0, 1])) < 0.02


def test_images_that_are_not_bytes_are_stretched() -> None:
    grey = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    grey[:, 0, 0, :2] = torch.tensor([0, 255])
    expected = CannyScore().score(grey.byte())
    for images in (grey / 255, grey.double() * 40 - 7, grey.to(torch.int32) * 100):
        assert torch.equal(CannyScore().score(images), expected)
    holes = grey / 255
    holes[0, 1, 5, 5], holes[1, 2, 3, 3], holes[1, 2, 8, 8] = math.nan, math.inf, -math.inf
    filled = grey.clone()
    filled[0, 1, 5, 5] = filled[1, 2, 3, 3] = filled[1, 2, 8, 8] = 0
    assert torch.equal(CannyScore().score(holes), CannyScore().score(filled.byte()))


def test_noise_in_a_flat_crop_is_no_edge() -> None:
    """Of a volume of int16 with structures 1,000 high; by the crop's own range, its noise is all edges."""
    noise = torch.randint(-3, 4, (1, 1, 64, 64), generator=torch.Generator().manual_seed(0)).short()
    span = torch.full((1, 1), -1500.0), torch.full((1, 1), 1500.0)
    assert CannyScore(scale="crop").score(noise, span=span).sum() > 300
    assert torch.equal(CannyScore(scale="crop").score(noise), CannyScore().score(noise))  # where nothing is known
    assert not CannyScore().score(noise, span=span).any()
    step = noise.clone()
    step[..., 32:] += 1000
    assert CannyScore().score(step, span=span).sum() == 64
    assert CannyScore(scale=(-1500, 1500)).score(step).equal(CannyScore().score(step, span=span))
    as_bytes = torch.randint(0, 256, (1, 2, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for kind in KINDS:  # bytes are taken as they are
        both = torch.zeros(1, 2), torch.ones(1, 2)
        assert kind.score(as_bytes, span=both).equal(kind.score(as_bytes))


@pytest.mark.parametrize("kind", KINDS)
def test_variables_of_small_units_have_edges(kind: CannyScore) -> None:
    """A step of a specific humidity beside a pressure: each is seen by the spread of its own."""
    images = torch.zeros(1, 2, 32, 32)
    images[:, 0] = 1e5 + torch.linspace(-50, 50, 32)
    images[:, 1, 16:] = 0.01
    span = torch.tensor([[97000.0, -0.015]]), torch.tensor([[103000.0, 0.015]])
    score = kind.score(images, span=span)[0]
    assert score[15:17, 1:-1].amax(0).min() > 10 * score[2:14].max()
    assert not type(kind)(scale="crop").score(images)[0, 15:17].amax() > 10 * kind.score(images)[0, 2:14].max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": (1, 1)}, r"scale \[1, 1\] must be data, crop, or two values that rise"),
        ({"smooth": 2}, "smooth 2 must be"),
        ({"low": 100, "high": 50}, "low <= high"),
        ({"low": -1}, "low <= high"),
    ],
)
def test_bad_settings_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CannyScore(**settings)


def test_bad_images_are_refused() -> None:
    with pytest.raises(ValueError, match="2 and 3 dimensions, not 1"):
        CannyScore().score(torch.zeros(1, 1, 8))
    for kind in KINDS:
        with pytest.raises(ValueError, match="at least one voxel"):
            kind.score(torch.zeros(4, 4))


# ---------------------------------------------------------------- gradient and variance


@pytest.mark.usefixtures("small_slabs")
@pytest.mark.parametrize("shape", [(30,), (20, 31), (9, 8, 10), (4, 5, 6, 7), (1, 1)])
def test_gradient_and_variance_by_definition(shape: tuple[int, ...]) -> None:
    images = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ndim = len(shape)
    padded = np.pad(images.numpy().astype(float), [(0, 0)] * 2 + [(1, 1)] * ndim, mode="edge")

    def at(*step: int) -> np.ndarray:
        return padded[:, :, *(slice(1 + s, 1 + s + n) for s, n in zip(step, shape, strict=True))]

    units = [tuple(int(a == axis) for a in range(ndim)) for axis in range(ndim)]
    squares = sum(((at(*unit) - at(*(-u for u in unit))) / 2) ** 2 for unit in units)
    gradient = GradientScore().score(images)
    np.testing.assert_allclose(gradient.numpy(), np.sqrt(squares).max(1), rtol=1e-5)
    window = np.stack([at(*step) for step in itertools.product((-1, 0, 1), repeat=ndim)])
    variance = VarianceScore().score(images)
    np.testing.assert_allclose(variance.numpy(), window.var(0).sum(1), rtol=1e-3, atol=0.05)
    assert gradient.dtype == variance.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(40, 24), (12, 20, 9)])
def test_every_score_makes_a_tree(kind: CannyScore | GradientScore | VarianceScore, shape: tuple[int, ...]) -> None:
    images = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0)) * 100 + 1e4
    images[0, 0].flatten()[5] = math.nan
    images[1, 0].flatten()[7] = -math.inf
    score = kind.score(images)
    assert score.shape == (2, *shape)
    assert bool(score.isfinite().all())
    assert float(score.min()) >= 0
    assert build_trees(score, length=29 if len(shape) == 3 else 28, patch=2).valid[:, :8].all()
    flat = kind.score(torch.full((1, 1, *shape), 7.0))
    torch.testing.assert_close(flat, torch.zeros_like(flat))


# ---------------------------------------------------------------- GPU


@pytest.mark.gpu
def test_the_gpu_finds_the_same(tissue: torch.Tensor) -> None:
    for images in (tissue, tissue[0, 0, :6].unflatten(0, (2, 3)), tissue.float() / 255):
        noise = torch.tensor([[0.6, 0.3, 0.5], [0.1, 0.99, 0.5]])[: images.shape[0]]
        for kind in (CannyScore(), CannyScore(random=True), CannyScore(smooth=5, low=20, high=300)):
            assert torch.equal(kind.score(images.cuda(), noise).cpu(), kind.score(images, noise))
        for kind in KINDS[1:]:
            torch.testing.assert_close(kind.score(images.cuda()).cpu(), kind.score(images), rtol=1e-4, atol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(17, 40), (1, 1), (300, 150), (5, 7, 9), (24, 64, 64)])
def test_kernels_find_what_torch_finds(
    shape: tuple[int, ...], tissue: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, with borders, channels and a batch; low thresholds make long chains of weak edge."""
    images = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images = torch.cat([images, blur(images, 5)])
    if shape == tuple(tissue.shape[2:]):
        images[0, 0] = tissue[0, 0]
    images = images.cuda()
    assert scores.adaptive_kernels("edges", images) is not None
    holes = images.float() * 0.37
    holes.view(-1)[0], holes.view(-1)[-1] = math.nan, -math.inf
    settings = [(1, 300, 500), (3, 20, 60), (5, 0, 200), (5, 10, 10)]
    work: list[tuple] = [(CannyScore(smooth=s, low=a, high=b), images) for s, a, b in settings]  # type: ignore[arg-type]
    work += [(GradientScore(), x) for x in (images, holes, images.bfloat16())]
    found = [kind.score(x) for kind, x in work]
    monkeypatch.setattr(scores, "adaptive_kernels", lambda *_: None)
    for ours, (kind, x) in zip(found, work, strict=True):
        assert torch.equal(ours, kind.score(x))
        assert ours.dtype == torch.float32
