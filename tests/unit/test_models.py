"""ViT and MAE: golden sizes, behaviour, FLOPs."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vitrail.data.batch import Batch, Statistics
from vitrail.draws import Draws
from vitrail.layers.backends import use_backend
from vitrail.layers.init import init_rules, initialise
from vitrail.layers.scores import GradientScore
from vitrail.layers.tokens import AdaptiveTokens, grid_coordinates, patchify
from vitrail.models import MAE, DecoderConfig, EncoderConfig, MAEConfig, ViT, ViTConfig
from vitrail.models.encoder import PixelPlaces
from vitrail.models.mae import RandomMask
from vitrail.models.model import Model
from vitrail.objectives.objective import drop_path_table
from vitrail.objectives.reconstruct import ReconstructConfig

SMALL = EncoderConfig(width=24, depth=2, heads=2, patch=4, positions="rope")


def make(config: MAEConfig | ViTConfig, seed: int = 0) -> Model:
    """As the trainer does it: on the meta device first, initialised afterwards."""
    with torch.device("meta"):
        model = config.build()
    rules = init_rules(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))  # whatever initialisation forgets will show
    initialise(model, rules, seed)
    return model


def small_mae(**changes: object) -> MAEConfig:
    defaults = {
        "encoder": SMALL,
        "decoder": DecoderConfig(kind="self", width=16, depth=1, heads=2),
        "ndim": 3,
        "channels": 1,
        "shape": 16,
    }
    return MAEConfig(**(defaults | changes))  # type: ignore[arg-type]


def count(config: MAEConfig | ViTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in config.build().parameters())


def prepared(config: MAEConfig, *, on: str = "hidden", target: str = "raw", evaluating: bool = False, batch: int = 2):
    objective = ReconstructConfig(on=on, target=target).build(config, Statistics((100.0,), (50.0,)))  # type: ignore[arg-type]
    values = torch.randint(0, 256, (batch, 1, *config.size), dtype=torch.uint8, generator=torch.manual_seed(0))
    one = Batch(list(range(batch)), values)
    return objective, one, *objective.prepare(one, Draws(0, one.counters), evaluating=evaluating)


# ---------------------------------------------------------------- golden sizes


def seed_2b(**changes: object) -> MAEConfig:
    encoder = EncoderConfig(
        width=3072,
        depth=16,
        heads=32,
        kv_heads=8,
        patch=8,
        mlp="swiglu",
        hidden=11264,
        norm="rms",
        bias=False,
        positions="rope",
    )
    decoder = DecoderConfig(kind="self", width=512, depth=4, heads=32, hidden=1536)
    return MAEConfig(**({"encoder": encoder, "decoder": decoder, "ndim": 3, "channels": 1, "shape": 512} | changes))  # type: ignore[arg-type]


def test_seed_2b_parameters_and_tokens() -> None:
    assert count(seed_2b()) == 2_055_577_600
    assert seed_2b(mask=RandomMask(ratio=0.95)).token_counts() == (13107, 262144 - 13107)
    assert seed_2b(mask=RandomMask(ratio=0.01)).token_counts()[0] == 259522


def test_ucf_mae_b_parameters() -> None:
    config = MAEConfig(
        encoder=EncoderConfig(size="B/16", positions="learned"),
        decoder=DecoderConfig(kind="self", width=512, depth=8, heads=16),
        channels=3,
        shape=256,
    )
    assert count(config) == 111_982_592


def test_seed_2b_flops() -> None:
    """The honest count of the seed's step at 95 % mask: 1,977 TFLOP (its own formula says 730)."""
    with torch.device("meta"):
        model = seed_2b(mask=RandomMask(ratio=0.95)).build()
    assert model.flops().training / 1e12 == pytest.approx(1977, rel=0.005)


def test_named_sizes_and_overrides() -> None:
    config = EncoderConfig(size="L/16")
    assert (config.width, config.depth, config.heads, config.patch) == (1024, 24, 16, 16)
    assert EncoderConfig(size="L/16", depth=3, patch=8).depth == 3
    assert EncoderConfig(size="L/16", patch=8).patch == 8
    with pytest.raises(ValueError, match="'X/16' is unknown"):
        EncoderConfig(size="X/16")
    with pytest.raises(ValueError, match="patch is missing"):
        EncoderConfig(size="B")
    with pytest.raises(ValueError, match="multiple of heads"):
        EncoderConfig(width=10, depth=1, heads=3, patch=2)


# ---------------------------------------------------------------- behaviour


@pytest.mark.parametrize("kind", ["self", "cross", "linear"])
@pytest.mark.parametrize("positions", ["sincos", "learned", "rope", "none"])
@pytest.mark.parametrize("cls_token", [False, True])
def test_mae_runs_in_every_make(kind: str, positions: str, cls_token: bool) -> None:
    encoder = replace(SMALL, positions=positions, cls_token=cls_token, registers=int(cls_token))
    config = small_mae(encoder=encoder, decoder=DecoderConfig(kind=kind, width=16, depth=2, heads=2))
    model = make(config)
    for on in ("all",) if kind == "linear" else ("hidden", "all"):
        objective, _, inputs, targets = prepared(config, on=on)
        output = model(**inputs)
        assert output.shape == targets.values.shape == (2, 64 if on == "all" else 48, 64)
        objective.loss(output, targets).sum.backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None]
    assert unused == [], unused


def test_two_dimensions_many_channels_other_shapes() -> None:
    encoder = EncoderConfig(
        width=32,
        depth=2,
        heads=4,
        kv_heads=2,
        patch=(4, 2),
        mlp="swiglu",
        norm="rms",
        qk_norm=True,
        layer_scale=0.1,
        bias=False,
        positions="rope",
    )
    config = MAEConfig(encoder=encoder, decoder=DecoderConfig(width=16, depth=1, heads=2), channels=20, shape=(16, 24))
    objective = ReconstructConfig().build(config, Statistics((0.0,) * 20, (1.0,) * 20))
    batch = Batch([0], torch.randn(1, 20, 16, 24))
    inputs, targets = objective.prepare(batch, Draws(0, [0]))
    assert inputs["x"].shape == (1, 12, 4 * 2 * 20)
    assert make(config)(**inputs).shape == targets.values.shape


def test_visible_tokens_keep_their_coordinates() -> None:
    config = small_mae()
    _, batch, inputs, _ = prepared(config)
    everything = grid_coordinates((16, 16, 16), (4, 4, 4))
    patches = (patchify(batch.values, (4, 4, 4)).float() - 100) / 50
    for sample in range(2):
        for token, where in zip(inputs["x"][sample], inputs["coordinates"][sample], strict=True):
            index = (everything == where).all(dim=1).nonzero().item()
            assert torch.equal(token, patches[sample, index])


def test_only_visible_patches_reach_the_model() -> None:
    """Changing hidden voxels changes targets and nothing that goes in."""
    config = small_mae()
    objective, batch, inputs, targets = prepared(config)
    voxels = patchify(batch.values, (4, 4, 4))
    hidden = targets.index[..., None].expand(-1, -1, 64)
    from vitrail.layers.tokens import unpatchify

    other = Batch(batch.counters, unpatchify(voxels.scatter(1, hidden, 7), (4, 4, 4), (16, 16, 16)))
    again, changed = objective.prepare(other, Draws(0, batch.counters))
    assert all(torch.equal(inputs[key], again[key]) for key in inputs)
    assert not torch.equal(targets.values, changed.values)


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_the_order_of_tokens_means_nothing(kind: str) -> None:
    config = small_mae(decoder=DecoderConfig(kind=kind, width=16, depth=2, heads=2))
    model = make(config).eval()
    _, _, inputs, _ = prepared(config)
    shuffle = torch.randperm(inputs["x"].shape[1])
    moved = inputs | {"x": inputs["x"][:, shuffle], "coordinates": inputs["coordinates"][:, shuffle]}
    assert torch.allclose(model(**moved), model(**inputs), atol=1e-5)
    queries = torch.randperm(inputs["queries"].shape[1])
    asked = model(**(inputs | {"queries": inputs["queries"][:, queries]}))
    assert torch.allclose(asked, model(**inputs)[:, queries], atol=1e-5)


def test_partial_decoding_predicts_a_part_the_same_way() -> None:
    full = small_mae(decoder=DecoderConfig(kind="cross", width=16, depth=2, heads=2))
    part = replace(full, decoder=replace(full.decoder, decode_ratio=0.25))
    _, _, inputs, all_targets = prepared(full)
    _, _, few_inputs, few_targets = prepared(part)
    assert few_targets.values.shape[1] == 12
    assert torch.equal(inputs["x"], few_inputs["x"])
    model = make(full).eval()
    everything = dict(zip(all_targets.index[0].tolist(), model(**inputs)[0], strict=True))
    for index, value in zip(few_targets.index[0].tolist(), model(**few_inputs)[0], strict=True):
        assert torch.allclose(everything[index], value, atol=1e-5)
    assert prepared(part, evaluating=True)[3].values.shape[1] == 48


def test_positions_survive_meta_initialisation() -> None:
    """Tables are functions, not buffers; a learned table starts as the sin-cos one."""
    learned = make(small_mae(encoder=replace(SMALL, positions="learned")))
    fixed = make(small_mae(encoder=replace(SMALL, positions="sincos")))
    assert not list(learned.buffers())
    assert not list(fixed.buffers())
    _, _, inputs, _ = prepared(small_mae())
    assert torch.allclose(learned(**inputs), fixed(**inputs), atol=1e-6)
    assert torch.isfinite(learned(**inputs)).all()


def test_bf16_compute_does_not_move_tokens() -> None:
    config = small_mae()
    model = make(config).eval()
    _, _, inputs, _ = prepared(config)
    side = model.derive(dict(inputs))
    expected = side["encoder_rope"]
    model.bfloat16()
    assert torch.equal(model.derive(dict(inputs))["encoder_rope"], expected)
    assert expected.dtype == torch.float32
    assert model(**inputs).dtype == torch.bfloat16


def test_targets() -> None:
    config = small_mae()
    objective, batch, _, raw = prepared(config)
    truth = patchify(batch.values, (4, 4, 4)).float().gather(1, raw.index[..., None].expand(-1, -1, 64))
    mean, std = objective.scales(raw.tokens, raw.index, raw.statistics)
    assert torch.allclose(raw.values * std + mean, truth, atol=1e-3)
    objective, _, _, patch = prepared(config, target="patch")
    mean, std = objective.scales(patch.tokens, patch.index, patch.statistics)
    assert torch.allclose(patch.values.mean(dim=-1), torch.zeros(2, 48), atol=1e-5)
    assert torch.allclose(patch.values.var(dim=-1), torch.ones(2, 48), atol=1e-3)
    assert torch.allclose(patch.values * std + mean, truth, atol=1e-3)


def test_metrics_of_the_mean_are_the_variance() -> None:
    config = small_mae()
    objective, _, _, targets = prepared(config, evaluating=True)
    mean = (targets.values * 1.0).mean()
    sums = objective.measure(mean.expand_as(targets.values), targets)
    metrics = objective.summarise({key: float(value) for key, value in sums.items()})
    assert metrics["mse_over_variance"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["variance"] == pytest.approx(metrics["loss"] * 50**2, rel=1e-3)


def test_drop_path_is_a_table_of_the_sample() -> None:
    config = small_mae(encoder=replace(SMALL, drop_path=0.5))
    model = make(config)
    rates = model.drop_path_rates()
    assert rates == [0.0, 0.5, 0.0]
    table = drop_path_table(Draws(0, range(400)), rates)
    assert table is not None
    assert table.shape == (400, 3, 2)
    assert set(table[:, 1].unique().tolist()) == {0.0, 2.0}
    assert table[:, 1].mean() == pytest.approx(1.0, abs=0.15)
    assert torch.equal(drop_path_table(Draws(0, [7]), rates)[0], table[7])  # type: ignore[index]
    assert drop_path_table(Draws(0, [7]), [0.0, 0.0]) is None
    _, _, inputs, _ = prepared(config)
    dropped = torch.ones(2, 3, 2)
    dropped[:, :, :] = 0.0
    blocks_off = model(**inputs, drop_path=dropped)
    assert not torch.allclose(blocks_off, model(**inputs))
    assert torch.equal(model(**inputs, drop_path=torch.ones(2, 3, 2)), model(**inputs))


@pytest.mark.parametrize("kind", ["self", "cross", "linear"])
def test_stages_say_what_they_need(kind: str) -> None:
    """What a pipeline will do: each stage gets only the side inputs that it names."""
    config = small_mae(decoder=DecoderConfig(kind=kind, width=16, depth=1, heads=2, drop_path=0.1))  # type: ignore[arg-type]
    model = make(config)
    _, _, inputs, _ = prepared(config, on="all")
    side = {key: value for key, value in inputs.items() if key != "x"} | {"drop_path": torch.ones(2, 3, 2)}
    x = inputs["x"]
    for stage in model.stages():
        x = stage.run(x, model.derive({key: side[key] for key in {"coordinates", *stage.needs} if key in side}))
    assert torch.equal(x, model(**inputs, drop_path=side["drop_path"]))


def test_positions_need_room() -> None:
    with pytest.raises(ValueError, match="head width 4 has no room for rope positions on 3 axes; use at least 6"):
        small_mae(decoder=DecoderConfig(kind="cross", width=16, depth=1, heads=4)).check()


def test_a_patch_target_is_scored_within_patches() -> None:
    """Predicting each patch's mean scores 1, although its mean and spread are known."""
    objective, _, _, targets = prepared(small_mae(), target="patch", evaluating=True)
    sums = objective.measure(torch.zeros_like(targets.values), targets)
    assert objective.summarise({k: float(v) for k, v in sums.items()})["mse_over_variance"] == pytest.approx(
        1, abs=1e-3
    )


def test_a_model_overfits_one_batch() -> None:
    config = small_mae(decoder=DecoderConfig(kind="cross", width=24, depth=2, heads=2))
    model = make(config)
    objective = ReconstructConfig().build(config, Statistics((0.0,), (1.0,)))
    axis = torch.linspace(0, 6, 16)
    waves = axis.sin()[:, None, None] + (2 * axis).cos()[None, :, None] + axis.sin()[None, None, :]
    inputs, targets = objective.prepare(Batch([0], waves[None, None]), Draws(0, [0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    first = last = 0.0
    for _ in range(120):
        loss = objective.loss(model(**inputs), targets)
        optimizer.zero_grad()
        (loss.sum / loss.count).backward()
        optimizer.step()
        last = (loss.sum / loss.count).item()
        first = first or last
    assert last < 0.05 * first


def test_vit_pools() -> None:
    for pool in ("cls", "mean", "tokens"):
        config = ViTConfig(size="Ti/16", depth=1, cls_token=pool == "cls", registers=2, pool=pool, channels=3)  # type: ignore[arg-type]
        x = torch.randn(2, 3, 32, 48)
        coordinates = grid_coordinates((32, 48), (16, 16)).expand(2, -1, -1)
        out = make(config)(patchify(x, (16, 16)), coordinates=coordinates)
        assert out.shape == ((2, 6, 192) if pool == "tokens" else (2, 192))
    classifier = make(ViTConfig(size="Ti/16", depth=1, classes=10, channels=3))
    assert classifier(patchify(x, (16, 16)), coordinates=coordinates).shape == (2, 10)
    assert isinstance(classifier, ViT)
    with pytest.raises(ValueError, match="cls_token: true"):
        ViTConfig(size="Ti/16", pool="cls")


# ---------------------------------------------------------------- FLOPs


@pytest.mark.parametrize("kind", ["self", "cross", "linear"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("on", ["hidden", "all"])
def test_flops_equal_what_pytorch_counts(kind: str, mlp: str, on: str) -> None:
    if kind == "linear" and on == "hidden":
        pytest.skip("a linear decoder sees no context, so this pair is refused")
    encoder = EncoderConfig(width=48, depth=3, heads=4, kv_heads=2, patch=4, mlp=mlp, positions="sincos")  # type: ignore[arg-type]
    decoder = DecoderConfig(kind=kind, width=32, depth=2, heads=2, decode_ratio=0.5)  # type: ignore[arg-type]
    config = small_mae(encoder=encoder, decoder=decoder)
    model = make(config)
    assert isinstance(model, MAE)
    objective, _, inputs, targets = prepared(config, batch=1, on=on)
    # The counter knows no CPU flash attention; as plain products it is counted, forward and (twice) backward.
    with use_backend("math"):
        with FlopCounterMode(display=False) as counter:
            loss = objective.loss(model(**inputs), targets)
        flops = objective.flops(model)
        assert counter.get_total_flops() == pytest.approx(flops.forward, rel=1e-6)
        with FlopCounterMode(display=False) as counter:
            loss.sum.backward()
    # The input needs no gradient, so the first layer's backward is one product less than 2 x forward.
    first = 2 * inputs["x"].shape[1] * 64 * 48
    assert counter.get_total_flops() == pytest.approx(flops.training - flops.forward - first, rel=1e-6)
    assert flops.hardware(recompute=False) == flops.training + 0.5 * flops.attention
    # Nothing reads what the last layer of a block gave, so that it is not computed again.
    again = flops.linear - flops.last + flops.attention
    assert flops.hardware(recompute=True) == flops.hardware(recompute=False) + again


# ---------------------------------------------------------------- decoders and starts of their own


@pytest.mark.parametrize("kind", ["self", "cross"])
def test_a_decoder_has_key_value_heads_and_theta_of_its_own(kind: str) -> None:
    decoder = DecoderConfig(kind=kind, width=32, depth=1, heads=2, kv_heads=1, theta=7.0)  # type: ignore[arg-type]
    config = small_mae(decoder=decoder)
    model = make(config)
    attention = model.decoder.blocks[0].attn
    rows = attention.qkv.out_features - 32 if kind == "self" else attention.kv.out_features
    assert rows == 2 * 16  # a key and a value of one head
    coordinates = grid_coordinates((8, 8, 8), (4, 4, 4)).expand(1, -1, -1)
    turns = {
        theta: make(small_mae(decoder=replace(decoder, theta=theta))).decoder.turn(coordinates, 0)
        for theta in (7, None)
    }
    alike = small_mae(encoder=replace(SMALL, theta=7.0), decoder=replace(decoder, theta=None))
    own = make(alike).decoder.turn(coordinates, 0)
    assert torch.equal(turns[7], own)
    assert not torch.equal(turns[7], turns[None])

    objective, _, inputs, targets = prepared(config)
    with use_backend("math"), FlopCounterMode(display=False) as counter:
        output = model(**inputs)
    assert counter.get_total_flops() == 2 * objective.flops(model).forward
    objective.loss(output, targets).sum.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.decoder.parameters())
    with pytest.raises(ValueError, match="heads 2 must be a multiple of kv_heads 3"):
        replace(decoder, kv_heads=3)
    with pytest.raises(ValueError, match=r"theta 0\.0 must be above 0"):
        replace(decoder, theta=0.0)


def test_blocks_start_scaled_by_their_depth() -> None:
    """As in torchtitan: 0.02, and 0.02 / sqrt(2 n) for what is written to the stream, and SwiGLU's value."""
    encoder = EncoderConfig(width=96, depth=3, heads=2, patch=4, mlp="swiglu", hidden=256, init="depth_scaled")
    model = make(
        small_mae(encoder=encoder, decoder=DecoderConfig(kind="cross", width=96, depth=2, heads=2, hidden=256))
    )
    for blocks in (model.encoder.blocks, model.decoder.blocks):
        for number, block in enumerate(blocks, start=1):
            scaled = 0.02 / (2 * number) ** 0.5
            inside = ("qkv",) if hasattr(block.attn, "qkv") else ("q", "kv")
            for layer in (*(getattr(block.attn, name) for name in inside), block.mlp.gate):
                assert float(layer.weight.std()) == pytest.approx(0.02, rel=0.05)
            for layer in (block.attn.proj, block.mlp.fc1, block.mlp.fc2):
                assert float(layer.weight.std()) == pytest.approx(scaled, rel=0.05)
    assert float(make(small_mae()).encoder.blocks[0].attn.proj.weight.std()) > 0.1  # Xavier's


def test_adaptive_tokens_may_be_told_their_number_alone() -> None:
    """UCF-VIT's use_adaptive_pos_emb: false: a learned row for each token of the tree, no place and no size."""
    tokens = AdaptiveTokens(length=22, score=GradientScore(), told="number")
    encoder = EncoderConfig(width=24, depth=1, heads=2, patch=4, positions="learned", tokens=tokens)
    config = small_mae(encoder=encoder, ndim=2, shape=32)
    model = make(config)
    assert model.encoder.size_embed is model.decoder.size_embed is None
    assert model.encoder.pos_embed.table.shape == (22, 24)
    assert model.decoder.pos_embed.table.shape == (22, 16)
    images = torch.rand(2, 1, 32, 32)
    inputs = model.inputs(images)
    assert (inputs["coordinates"][..., 0] / 4 - 0.5).tolist() == [list(range(22))] * 2
    moved = inputs | {"sizes": inputs["sizes"] * 2, "queries": inputs["queries"]}
    assert torch.equal(model(**inputs), model(**moved))
    prediction, hidden = model.reconstruct(images, torch.rand(2, 22))
    assert prediction.shape == (2, 22, 16)
    assert hidden.any()
    batch = Batch([0, 1], images, None, ("x",))
    prepared, targets = ReconstructConfig().build(config, Statistics((0.0,), (1.0,))).prepare(batch, Draws(0, [0, 1]))
    told = torch.cat([prepared["coordinates"], prepared["queries"]], dim=1)[..., 0] / 4 - 0.5
    assert torch.equal(told[:, prepared["x"].shape[1] :].long(), targets.index)  # as training hides them
    assert torch.equal(told.sort().values, torch.arange(22.0).expand(2, -1))
    with pytest.raises(ValueError, match=r"no table for the places of adaptive tokens; .* set tokens.told: number"):
        replace(encoder, tokens=replace(tokens, told="place"))


def test_leaves_beside_each_other_have_different_places_in_bf16() -> None:
    places, leaves = PixelPlaces(3, 8), torch.tensor([[[2.0, 515.0, 9.0], [2.0, 517.0, 9.0]]])
    for values in places.parameters():
        values.data.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    expected = places(leaves)
    found = places.bfloat16()(leaves)
    assert not torch.equal(found[0, 0], found[0, 1])
    torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
    assert places.double()(leaves).dtype == torch.float64


def test_sizes_keep_the_positions_that_fit_trees() -> None:
    """Learned ones of a size have no table for places in a tree; its rotations need none."""
    tokens = AdaptiveTokens(length=64)
    found = [EncoderConfig(size=size, tokens=tokens).positions for size in ("UCF-B/16", "2B", "B/16")]
    assert found == ["sincos", "rope", "sincos"]
    assert EncoderConfig(size="UCF-B/16", tokens=replace(tokens, told="number")).positions == "learned"
