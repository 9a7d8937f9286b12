"""Classify and segment: losses that add up, metrics over whole sets, dropout as data, errors that say what to do."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.errors import UserError
from vitrail.layers.tokens import AdaptiveTokens
from vitrail.layers.variables import VariablesConfig
from vitrail.models.config import EncoderConfig
from vitrail.models.mae import MAEConfig
from vitrail.models.sap import SAPConfig
from vitrail.models.vit import ViTConfig
from vitrail.objectives.classify import Classify, ClassifyConfig
from vitrail.objectives.objective import Objective, check_prepare, normalise
from vitrail.objectives.reconstruct import ReconstructConfig
from vitrail.objectives.segment import Segment, SegmentConfig, Targets, confusion, segmentation_loss

GREY = Statistics((10.0,), (4.0,))


def vit(**changes: Any) -> ViTConfig:
    settings = {"width": 16, "depth": 1, "heads": 2, "patch": 4, "channels": 1, "classes": 3, "shape": 8}
    return ViTConfig(**(settings | changes))


def sap(ndim: int = 2, classes: int = 3, size: int = 8, **encoder: Any) -> SAPConfig:
    settings = {"width": 16, "depth": 1, "heads": 2, "patch": 4} | encoder
    return SAPConfig(ndim=ndim, channels=1, classes=classes, features=4, shape=size, encoder=EncoderConfig(**settings))


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def labels_like(seed: int, classes: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, classes, shape))


def image_batch(labels: torch.Tensor | None, *, number: int = 4, ndim: int = 2, size: int = 8) -> Batch:
    return Batch(list(range(number)), numbers(1, number, 1, *[size] * ndim) * 4 + 10, labels, ("grey",))


# ---------------------------------------------------------------- classify


def test_values_are_normalised_by_mean_and_std() -> None:
    values = torch.tensor([2.0, 10.0, 18.0]).view(1, 1, 3)
    assert normalise(values, GREY).flatten().tolist() == [-2.0, 0.0, 2.0]
    own = torch.tensor([[2.0]]), torch.tensor([[8.0]])
    assert normalise(values, own).flatten().tolist() == [0.0, 1.0, 2.0]


def test_classify_gives_the_cross_entropy() -> None:
    objective = ClassifyConfig(smoothing=0.2).build(vit(), GREY)
    batch = image_batch(torch.tensor([0, 2, 1, 2]))
    inputs, targets = objective.prepare(batch, Draws(0, batch.counters))
    assert torch.equal(inputs["x"].flatten().sort().values, normalise(batch.values, GREY).flatten().sort().values)
    output = vit().build()(**inputs).detach()
    assert output.shape == (4, 3)
    loss = objective.loss(output, targets)
    wanted = functional.cross_entropy(output, targets, label_smoothing=0.2)
    assert torch.isclose(loss.sum / loss.count, wanted)
    metrics = objective.summarise({k: float(v) for k, v in objective.measure(output, targets).items()})
    assert set(metrics) == set(objective.metrics) == {"loss", "accuracy"}
    assert math.isclose(metrics["loss"], functional.cross_entropy(output, targets).item(), rel_tol=1e-6)
    assert metrics["accuracy"] == (output.argmax(1) == targets).float().mean().item()
    assert objective.best_metric in objective.larger_is_better
    assert objective.tokens_per_sample() == 4


def test_the_sums_of_parts_are_those_of_the_whole() -> None:
    """So micro-batches and ranks change nothing."""
    batch = image_batch(torch.tensor([0, 2, 1, 2]))
    segment = SegmentConfig().build(sap(), GREY)
    voxels = image_batch(labels_like(0, 3, 4, 8, 8))
    for objective, whole, model in (
        (ClassifyConfig().build(vit(), GREY), batch, vit().build()),
        (segment, voxels, sap().build()),
    ):
        totals = []
        for parts in ([whole], [whole.narrow(0, 1), whole.narrow(1, 4)]):
            prepared = [objective.prepare(part, Draws(0, part.counters)) for part in parts]
            outputs = [(model(**inputs).detach(), targets) for inputs, targets in prepared]
            losses = [objective.loss(output, targets) for output, targets in outputs]
            sums = [objective.measure(output, targets) for output, targets in outputs]
            total = {name: sum(float(s[name]) for s in sums) for name in sums[0]}
            totals.append([float(sum(x.sum for x in losses)), float(sum(x.count for x in losses)), *total.values()])
            assert set(objective.summarise(total)) == set(objective.metrics)
        np.testing.assert_allclose(*totals, rtol=1e-5)


def test_top5_is_measured_where_there_are_more_classes() -> None:
    objective = ClassifyConfig().build(vit(classes=7), GREY)
    assert objective.metrics == ("loss", "accuracy", "top5")
    logits = -torch.arange(7.0).expand(7, 7)
    metrics = objective.summarise({k: float(v) for k, v in objective.measure(logits, torch.arange(7)).items()})
    assert metrics["top5"] == pytest.approx(5 / 7)
    assert metrics["accuracy"] == pytest.approx(1 / 7)


def test_head_dropout_is_data() -> None:
    model = vit(head_dropout=0.25)
    objective = ClassifyConfig().build(model, GREY)
    batch = image_batch(torch.tensor([0, 2, 1, 2]))
    table = objective.prepare(batch, Draws(0, batch.counters))[0]["head_dropout"]
    assert table.shape == (4, 16)
    assert set(table.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    part = batch.narrow(2, 4)
    assert torch.equal(objective.prepare(part, Draws(0, part.counters))[0]["head_dropout"], table[2:])
    assert "head_dropout" not in objective.prepare(batch, Draws(0, batch.counters), evaluating=True)[0]
    assert "head_dropout" not in ClassifyConfig().build(vit(), GREY).prepare(batch, Draws(0, batch.counters))[0]
    many = Batch(list(range(500)), batch.values[:1].expand(500, -1, -1, -1), torch.zeros(500).long())
    mean = objective.prepare(many, Draws(0, many.counters))[0]["head_dropout"].mean()
    assert abs(mean.item() - 1) < 0.03


def test_classify_refuses_what_cannot_be() -> None:
    batch = image_batch(torch.tensor([0, 3, 1, 2]))
    objective = ClassifyConfig().build(vit(), GREY)
    with pytest.raises(UserError, match="labels: 3 is not the number of a class; there are 3"):
        objective.prepare(batch, Draws(0, batch.counters))
    with pytest.raises(ValueError, match="no labels"):
        objective.prepare(image_batch(None), Draws(0, batch.counters))
    with pytest.raises(UserError, match="'classify' trains models that name classes, such as 'vit', not 'sap'"):
        ClassifyConfig().build(sap(), GREY)
    with pytest.raises(UserError, match=r"model.classes"):
        ClassifyConfig().build(vit(classes=0), GREY)
    with pytest.raises(UserError, match=r"model.pool"):
        ClassifyConfig().build(vit(pool="tokens"), GREY)
    for wrong in ({"smoothing": 1.0}, {"smoothing": -0.1}, {"names": ("a", "a")}, {"names": ("a",)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ClassifyConfig(**wrong)


def test_classify_learns(tmp_path: Path) -> None:
    """Bright from dark, in 2-D and 3-D; and its picture is a picture."""
    for ndim in (2, 3):
        model = vit(ndim=ndim, classes=2)
        objective, network = ClassifyConfig(names=("dark", "bright")).build(model, GREY), model.build()
        truth = torch.arange(8) % 2
        values = numbers(0, 8, 1, *[8] * ndim) + 8 + 4 * truth.view(-1, 1, *[1] * ndim)
        batch = Batch(list(range(8)), values, truth)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
        inputs, targets = objective.prepare(batch, Draws(0, batch.counters))
        for _ in range(20):
            loss = objective.loss(network(**inputs), targets)
            optimizer.zero_grad()
            (loss.sum / loss.count).backward()
            optimizer.step()
        output = network(**inputs).detach()
        assert (
            objective.summarise({k: float(v) for k, v in objective.measure(output, targets).items()})["accuracy"] == 1
        )
        path = tmp_path / f"{ndim}.png"
        caption = objective.draw(path, objective.rows(batch, output, targets), step=20, held_out=True)
        assert caption == "step 20: 8 of these 8 held-out samples right"
        assert Image.open(path).width > 400


# ---------------------------------------------------------------- segment


@pytest.mark.parametrize("shape", [(9, 7), (5, 6, 4)])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("smooth", [(0.0, 1e-6), (1e-5, 1e-5)])
def test_the_loss_is_monais(shape: tuple[int, ...], squared: bool, smooth: tuple[float, float]) -> None:
    losses = pytest.importorskip("monai.losses", reason="MONAI is the reference here: pip install monai")
    logits, labels = numbers(0, 3, 4, *shape).requires_grad_(), labels_like(1, 3, 3, *shape)  # class 3 never occurs
    options = {"softmax": True, "to_onehot_y": True}
    settings = options | {"squared_pred": squared, "smooth_nr": smooth[0], "smooth_dr": smooth[1]}
    dice = losses.DiceLoss(**settings | {"softmax": False, "sigmoid": True})
    theirs = {
        "dice_ce": losses.DiceCELoss(**settings),
        "dice": losses.DiceLoss(**settings),
        "ce": losses.DiceCELoss(**settings, lambda_dice=0.0),
        "dice_bce": lambda logits, labels: (
            dice(logits, labels) + losses.FocalLoss(gamma=0, to_onehot_y=True)(logits, labels)
        ),
        "focal": losses.FocalLoss(to_onehot_y=True, gamma=1.5),
    }
    for kind, criterion in theirs.items():
        wanted = criterion(logits, labels[:, None])
        (gradient,) = torch.autograd.grad(wanted, logits)
        each = segmentation_loss(logits, labels, SegmentConfig(loss=kind, squared=squared, smooth=smooth, gamma=1.5))
        assert each.shape == (3,)
        (ours,) = torch.autograd.grad(each.mean(), logits)
        torch.testing.assert_close(each.mean(), wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("squared", [True, False])
def test_dice_is_smoothed_as_the_recipe_says(squared: bool) -> None:
    """Where a class hardly occurs it is the smoothing that decides."""
    logits, labels = numbers(0, 2, 3, 2, 2), torch.tensor([[[0, 0], [0, 0]], [[0, 1], [1, 1]]])
    share = np.exp(logits.double().numpy())
    share /= share.sum(1, keepdims=True)
    true = np.eye(3)[labels.numpy()].transpose(0, 3, 1, 2)
    above, below = 0.5, 3.0
    both, each = (share * true).sum((2, 3)), (share**2 if squared else share).sum((2, 3)) + true.sum((2, 3))
    expected = (1 - (2 * both + above) / (each + below)).mean(1)
    objective = SegmentConfig(loss="dice", squared=squared, smooth=(above, below)).build(sap(), GREY)
    objective.model = _Pixels(classes=3)
    tokens: Any = None
    loss = objective.loss(logits, Targets(labels, tokens))
    assert (float(loss.sum), float(loss.count)) == (pytest.approx(expected.sum()), 2)


@pytest.mark.parametrize("ignore", [255, -1, 0])
def test_ignored_voxels_change_nothing(ignore: int) -> None:
    """A sample with voxels left out has the loss of the voxels that stay."""
    logits, labels = numbers(0, 2, 3, 6, 4), labels_like(1, 2, 2, 6, 4) + 1
    cut = labels.clone()
    cut[:, 3:] = ignore
    other = logits.clone()
    other[:, :, 3:] = 50.0 * numbers(2, 2, 3, 3, 4)
    for kind in ("dice_ce", "dice", "ce", "dice_bce", "focal"):
        part = segmentation_loss(logits[:, :, :3], labels[:, :3], SegmentConfig(loss=kind))
        c = SegmentConfig(loss=kind, ignore=ignore)
        for given in (logits, other):
            whole = segmentation_loss(given, cut, c)
            torch.testing.assert_close(whole, part)
        given = logits.clone().requires_grad_()
        segmentation_loss(given, cut, c).sum().backward()
        assert given.grad is not None
        assert given.grad[:, :, 3:].abs().max() == 0
        assert given.grad[:, :, :3].abs().max() > 0
        nothing = segmentation_loss(logits, torch.full_like(labels, ignore), c)
        assert nothing.tolist() == [0.0, 0.0]
    assert int(confusion(logits.argmax(1), cut, 3, ignore).sum()) == 2 * 3 * 4


def test_metrics_count_voxels_over_the_whole_set() -> None:
    """Dice of all voxels together, not a mean over samples: the confusion matrix says what it must be."""
    objective = SegmentConfig(names=("nothing", "one", "two", "never")).build(sap(classes=4), GREY)
    objective.model = _Pixels(classes=4)
    total: dict[str, float] = {}
    everything = torch.zeros(4, 4)
    for seed in range(5):
        logits, labels = numbers(seed, 2, 4, 6, 6), labels_like(seed, 3, 2, 6, 6)
        logits[:, 3] = -100
        tokens: Any = None
        for name, value in objective.measure(logits, Targets(labels, tokens)).items():
            assert value.dtype == torch.float64
            assert value.ndim == 0
            total[name] = total.get(name, 0.0) + float(value)
        for true, guess in zip(labels.flatten().tolist(), logits.argmax(1).flatten().tolist(), strict=True):
            everything[true, guess] += 1
    metrics = objective.summarise(total)
    assert tuple(metrics) == objective.metrics
    dice = [2 * everything[i, i] / (everything[i].sum() + everything[:, i].sum()) for i in range(3)]
    for name, wanted in zip(("nothing", "one", "two"), dice, strict=True):
        assert metrics[f"dice_{name}"] == pytest.approx(float(wanted))
        assert metrics[f"iou_{name}"] == pytest.approx(float(wanted / (2 - wanted)))
    assert math.isnan(metrics["dice_never"])
    assert math.isnan(metrics["iou_never"])
    assert metrics["mean_iou"] == pytest.approx(float(sum(d / (2 - d) for d in dice[1:]) / 2))
    assert metrics["mean_dice"] == pytest.approx(float(sum(dice[1:]) / 2))
    assert metrics["accuracy"] == pytest.approx(float(everything.trace() / everything.sum()))
    objective.config = SegmentConfig(background=True)
    assert objective.summarise(total)["mean_dice"] == pytest.approx(float(sum(dice) / 3))
    assert {"accuracy", "mean_dice", "dice_one", "mean_iou", "iou_one"} <= objective.larger_is_better
    assert "loss" not in objective.larger_is_better


@pytest.mark.parametrize("background", [False, True])
def test_an_ignored_class_is_not_scored(background: bool, tmp_path: Path) -> None:
    """Its number stays, so that those of the others do; a model that names it is wrong there."""
    settings: dict[str, Any] = {"ignore": 1, "names": ("nothing", "void", "cell"), "background": background}
    objective = SegmentConfig(**settings).build(sap(), GREY)
    each = ("dice_nothing", "dice_cell", "iou_nothing", "iou_cell")
    assert objective.metrics == ("loss", "accuracy", "mean_dice", "mean_iou", *each)
    objective.model = _Pixels(classes=3)
    labels = torch.tensor([[[0, 0, 1, 1, 2, 2, 2, 2]]])
    guess = torch.tensor([[[0, 0, 0, 2, 2, 2, 2, 1]]])
    logits = 20.0 * functional.one_hot(guess, 3).movedim(-1, 1)
    tokens: Any = None
    targets = Targets(labels, tokens)
    metrics = objective.summarise({k: float(v) for k, v in objective.measure(logits, targets).items()})
    assert tuple(metrics) == objective.metrics
    assert metrics["dice_nothing"] == 1
    assert metrics["dice_cell"] == pytest.approx(6 / 7)
    assert metrics["mean_dice"] == pytest.approx((1 + 6 / 7) / 2 if background else 6 / 7)
    assert metrics["accuracy"] == pytest.approx(5 / 6)
    batch = Batch([0], numbers(0, 1, 1, 1, 8), labels)
    caption = objective.draw(tmp_path / "a.png", objective.rows(batch, logits, targets), step=1, held_out=True)
    assert "cell 0.86" in caption
    assert "void" not in caption


@pytest.mark.parametrize(
    ("settings", "scored"),
    [
        ({"names": ("membrane", "cell")}, ["membrane", "cell"]),
        ({"names": ("background", "cell")}, ["cell"]),
        ({"names": ("membrane", "cell"), "background": False}, ["cell"]),
        ({"names": ("background", "cell"), "background": True}, ["background", "cell"]),
        ({"names": ("a", "b", "c")}, ["b", "c"]),
        ({}, ["class 1"]),
    ],
)
def test_two_named_classes_are_both_scored(settings: dict[str, Any], scored: list[str]) -> None:
    """Of membranes and cells, the mean was that of the cells alone, whose Dice is high in any case."""
    number = len(settings.get("names", "ab"))
    objective = SegmentConfig(**settings).build(sap(classes=number), GREY)
    sums = {"loss": 0.0, "samples": 1.0, "voxels": 10.0}
    for place in range(number):
        sums |= {f"both_{place}": 1.0 + place, f"either_{place}": 10.0}
    metrics = objective.summarise(sums)
    assert metrics["mean_dice"] == pytest.approx(sum(metrics[f"dice_{name}"] for name in scored) / len(scored))


class _Pixels:
    """A model that gives voxels, as UNETR does."""

    output = "pixels"

    def __init__(self, classes: int):
        self.classes = classes


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("ndim", [2, 3])
def test_segment_learns(ndim: int, adaptive: bool, tmp_path: Path) -> None:
    """Tokens are painted to voxels: labels that follow from brightness alone are learnt."""
    tokens = {"tokens": AdaptiveTokens(length=141 if ndim == 3 else 31, fill=False)} if adaptive else {}
    model = sap(ndim, 2, 16, positions="sincos", **tokens)
    objective = SegmentConfig(names=("dark", "bright"), loss="dice_ce").build(model, GREY)
    values = torch.full((4, 1, *[16] * ndim), 8.0)
    for number in range(4):
        corner = 4 * (number % 2)
        values[(number, 0, *[slice(corner, corner + 8)] * ndim)] = 14.0
    batch = Batch(list(range(4)), values, (values[:, 0] > 11).long())
    network = model.build()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    inputs, targets = objective.prepare(batch, Draws(0, batch.counters))
    assert objective.tokens_per_sample() == inputs["x"].shape[1]
    for _ in range(25):
        loss = objective.loss(network(**inputs), targets)
        optimizer.zero_grad()
        (loss.sum / loss.count).backward()
        optimizer.step()
    output = network(**inputs).detach()
    metrics = objective.summarise({k: float(v) for k, v in objective.measure(output, targets).items()})
    assert metrics["mean_dice"] > 0.9
    path = tmp_path / "a.png"
    caption = objective.draw(path, objective.rows(batch, output, targets), step=25, held_out=False)
    assert caption.startswith("step 25: training samples; Dice of these: dark ")
    assert Image.open(path).width > 400


def test_segment_refuses_what_cannot_be() -> None:
    labels = labels_like(0, 3, 4, 8, 8)
    labels[0, 0, 0] = 255
    batch = image_batch(labels)
    with pytest.raises(UserError, match=r"labels: 255 is not the number of a class; .*objective.ignore"):
        SegmentConfig().build(sap(), GREY).prepare(batch, Draws(0, batch.counters))
    SegmentConfig(ignore=255).build(sap(), GREY).prepare(batch, Draws(0, batch.counters))
    for model in (vit(), MAEConfig(encoder=EncoderConfig(width=16, depth=1, heads=2, patch=4), ndim=2, channels=1)):
        with pytest.raises(UserError, match=f"such as 'unetr', not '{model.kind}'"):
            SegmentConfig().build(model, GREY)
    with pytest.raises(UserError, match=r"model.classes: 1; .* at least 2"):
        SegmentConfig().build(sap(classes=1), GREY)
    with pytest.raises(UserError, match=r"objective.ignore: 1 leaves no class .* objective.background: true"):
        SegmentConfig(ignore=1).build(sap(classes=2), GREY)
    SegmentConfig(ignore=1, background=True).build(sap(classes=2), GREY)
    for wrong in ({"smooth": (0.0, 0.0)}, {"smooth": (-1.0, 1.0)}, {"names": ("a", "a")}, {"gamma": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SegmentConfig(**wrong)


def test_what_objectives_say_they_need() -> None:
    assert ClassifyConfig.labels == "item"
    assert SegmentConfig.labels == "voxel"
    assert isinstance(ClassifyConfig().build(vit(), GREY), Classify)
    assert isinstance(SegmentConfig().build(sap(), GREY), Segment)


def test_a_prepare_that_cannot_be_called_is_refused() -> None:
    class Short(Classify):
        def prepare(self, batch: Any, draws: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    class Parted(Classify):
        def prepare(self, batch: Any, draws: Any, *, evaluating: bool = False, depth: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    class Own(Classify):  # what it may be given besides has a default
        def prepare(self, batch: Any, draws: Any, *, evaluating: bool = False, wide: bool = False) -> Any:
            raise AssertionError

    class Earlier(Classify):  # ignored, it would be wrong where ranks share samples
        needs_whole = True

        def prepare(
            self, batch: Any, draws: Any, *, evaluating: bool = False, part: Any = None, exchange: Any = None
        ) -> Any:
            raise AssertionError

    class Open(Classify):
        def prepare(self, batch: Any, draws: Any, **options: Any) -> Any:
            raise AssertionError

    for kind, problem in (
        (Short, "unexpected keyword argument 'evaluating'"),
        (Parted, "missing a required .*'depth'"),
    ):
        with pytest.raises(
            UserError, match=rf"{kind.__name__}.prepare\(\) cannot be called \(.*{problem}.*; write it as"
        ):
            check_prepare(kind.__new__(kind))
    with pytest.raises(UserError, match=r"Earlier has part, exchange, needs_whole, which .*; write prepare\("):
        check_prepare(Earlier.__new__(Earlier))
    for kind in (Own, Open, Classify):
        check_prepare(kind.__new__(kind))


def test_an_objective_whose_pictures_are_made_as_before_is_refused() -> None:
    def draw(self: Any, path: Any, batch: Any, output: Any, targets: Any, *, step: int, held_out: bool) -> str:
        raise AssertionError

    def example(self: Any, batch: Any, draws: Any, run: Any, *, size: int = 1, tick: Any = None) -> Any:
        raise AssertionError

    for base in (Classify, Objective):
        for own in (draw, example):
            with pytest.raises(UserError, match=r"the pictures of Before cannot be made \(.*; write what one shows"):
                type("Before", (base,), {own.__name__: own})


# ---------------------------------------------------------------- reconstruct


@pytest.mark.parametrize("aggregate", [None, "none", "attention"])
def test_variables_of_other_units_are_scored_alike(aggregate: str | None) -> None:
    """Predicting nothing scores 1, however much larger the numbers of one variable are, and however well others do."""
    known = VariablesConfig(known=("a", "height"), aggregate=aggregate) if aggregate else None  # type: ignore[arg-type]
    encoder = EncoderConfig(width=24, depth=1, heads=2, patch=4, variables=known)
    model = MAEConfig(encoder=encoder, ndim=2, channels=None if known else 2, shape=16)
    objective = ReconstructConfig().build(model, Statistics((0.0, 5000.0), (1.0, 1000.0)))
    values = numbers(3, 4, 2, 16, 16)
    values[:, 1] = values[:, 1] * 1000 + 5000
    batch = Batch(list(range(4)), values, variables=("a", "height"))
    _, targets = objective.prepare(batch, Draws(0, batch.counters), evaluating=True)

    def score(output: torch.Tensor) -> dict[str, float]:
        return objective.summarise({k: float(v) for k, v in objective.measure(output, targets).items()})

    assert score(torch.zeros_like(targets.values))["mse_over_variance"] == pytest.approx(1, abs=0.02)
    assert score(targets.values)["mse_over_variance"] == 0
    half = targets.values.clone()  # one of two variables is predicted, the other is not
    if aggregate == "none":
        half[targets.variables == 0] = 0
    else:
        half[..., targets.variables == 0] = 0
    found = score(half)
    assert found["mse_over_variance"] == pytest.approx(0.5, abs=0.03)
    assert found["mse"] == pytest.approx(found["loss"], rel=1e-5)
