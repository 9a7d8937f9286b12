"""Codecs: latents in the files' real layouts, what fits together, and what is refused."""

import json
import os
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from support import merge

from vitrail.codecs import IdentityConfig, decode_all, decoder_for, open_codec
from vitrail.codecs.kl import KLConfig
from vitrail.codecs.own import AutoencoderCodecConfig
from vitrail.codecs.torchscript import TorchScriptConfig
from vitrail.data.sources.items import LatentsConfig
from vitrail.errors import UserError
from vitrail.recipe import kinds, load_recipe
from vitrail.recipe.plugins import load_plugin

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

IMAGES = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


class Encoder(torch.nn.Module):
    """Cosmos-style: images of -1 to 1 in, a tuple out, 16 channels, 8 x 8 pixels; weights of bfloat16."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 16, 8, stride=8)

    def forward(self, x):
        return (self.conv(x),)


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.ConvTranspose2d(16, 3, 8, stride=8)

    def forward(self, x):
        return self.conv(x)


@pytest.fixture(scope="module")
def cosmos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("cosmos")
    torch.manual_seed(0)
    for name, module in (("encoder", Encoder()), ("decoder", Decoder())):
        torch.jit.save(torch.jit.script(module.to(torch.bfloat16).eval()), folder / f"{name}.jit")
    return folder


@pytest.fixture(scope="module")
def kl(tmp_path_factory) -> Path:
    """A tiny AutoencoderKL, saved by diffusers itself."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    network = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.5,
        shift_factor=0.25,
    )
    folder = tmp_path_factory.mktemp("kl") / "vae"
    network.save_pretrained(folder)
    return folder


def recipe(codec, **changes):
    tree = {
        "run": {"name": "a", "steps": 1},
        "model": {"kind": "dit", "size": "S/2"},
        "objective": {"kind": "flow"},
        "data": {"train": [{"path": "x", "kind": "latents"}], "crop": 8, "batch": 2},
        "codec": codec,
    }
    return load_recipe(merge(tree, changes))


def stored(codec, *, channels=None, axes=2, **changes):
    """describe() of latents that a codec has encoded."""
    number = channels or codec.channels
    return {
        "kind": "latents",
        "path": "data/latents",
        "axes": ["z", "y", "x"][-axes:],
        "variables": [f"latent{i}" for i in range(number)],
        "codec": json.loads(json.dumps(codec.facts())) | changes,
    }


# ---------------------------------------------------------------- what each computes


def test_identity_leaves_values_as_they_are():
    codec = open_codec(IdentityConfig(), device="cpu")
    assert torch.equal(codec.encode(IMAGES), IMAGES.float())
    assert torch.equal(codec.decode(codec.encode(IMAGES)), IMAGES.float())
    codec.check((5, 7, 7, 7))


def test_kl_gives_the_scaled_mean_of_the_posterior(kl):
    from diffusers import AutoencoderKL

    codec = open_codec(KLConfig(path=str(kl)), device="cpu")
    assert (codec.ndim, codec.factor, codec.channels, codec.data_channels) == (2, (2, 2), 4, 3)
    latents = codec.encode(IMAGES)
    network = AutoencoderKL.from_pretrained(kl).eval()
    with torch.no_grad():
        mean = network.encode(IMAGES / 127.5 - 1).latent_dist.mean
        images = (network.decode(mean).sample + 1) * 127.5
    torch.testing.assert_close(latents, (mean - 0.25) * 0.5, rtol=0, atol=1e-5)
    torch.testing.assert_close(codec.decode(latents), images, rtol=0, atol=0.01)  # of 255
    assert torch.equal(codec.encode(IMAGES), latents)  # nothing is drawn
    wide = open_codec(KLConfig(path=str(kl), range=(0, 1)), device="cpu")
    torch.testing.assert_close(wide.encode(IMAGES / 255), latents, rtol=0, atol=1e-5)
    assert open_codec(KLConfig(path=str(kl.parent), subfolder="vae"), device="cpu").fingerprint == codec.fingerprint


def test_kl_of_another_scale_is_another_codec(kl, tmp_path):
    """The same weights, but config.json says otherwise what latents are."""
    found = {open_codec(KLConfig(path=str(kl)), device="cpu").fingerprint}
    settings = json.loads((kl / "config.json").read_text())
    for key in ("scaling_factor", "shift_factor"):
        shutil.copytree(kl, tmp_path / key)
        (tmp_path / key / "config.json").write_text(json.dumps(settings | {key: 0.125}))
        found.add(open_codec(KLConfig(path=str(tmp_path / key)), device="cpu").fingerprint)
    assert len(found) == 3


def test_torchscript_pair_in_the_layout_of_cosmos(cosmos):
    codec = open_codec(TorchScriptConfig(path=str(cosmos)), device="cpu", trust=True)
    assert (codec.ndim, codec.factor, codec.channels, codec.data_channels) == (2, (8, 8), 16, 3)
    latents = codec.encode(IMAGES)
    assert latents.shape == (2, 16, 4, 4)
    assert latents.dtype == torch.float32
    module = torch.jit.load(cosmos / "encoder.jit")
    expected = module((IMAGES.float() * 2 / 255 - 1).to(torch.bfloat16))[0].float()
    torch.testing.assert_close(latents, expected, rtol=0, atol=0.01)  # inputs round to bfloat16
    assert codec.decode(latents).shape == IMAGES.shape
    files = TorchScriptConfig(encoder=str(cosmos / "encoder.jit"), decoder=str(cosmos / "decoder.jit"))
    assert open_codec(files, device="cpu", trust=True).fingerprint == codec.fingerprint


def test_frozen_torchscript_tells_its_type_by_what_it_takes(cosmos, tmp_path):
    for name in ("encoder", "decoder"):
        module = torch.jit.freeze(torch.jit.load(cosmos / f"{name}.jit"))
        assert not list(module.parameters())
        torch.jit.save(module, tmp_path / f"{name}.jit")
    frozen, plain = (open_codec(TorchScriptConfig(path=str(p)), device="cpu", trust=True) for p in (tmp_path, cosmos))
    torch.testing.assert_close(frozen.encode(IMAGES), plain.encode(IMAGES))


def test_many_latents_are_decoded_a_few_at_a_time(cosmos):
    codec = open_codec(TorchScriptConfig(path=str(cosmos)), device="cpu", trust=True)
    sizes, decode = [], codec.decode
    codec.decode = lambda some: (sizes.append(len(some)), decode(some))[1]
    latents = torch.randn(9, 16, 2, 2)
    torch.testing.assert_close(decode_all(codec, latents), decode(latents))
    assert sizes == [4, 4, 1]


def test_hub_files_come_by_their_names(cosmos, monkeypatch):
    asked = []

    def download(repository, name, revision=None):
        asked.append((repository, name, revision))
        if repository == "no/body":
            raise OSError("404 not found\nmore")
        return str(cosmos / name)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(hf_hub_download=download))
    config = TorchScriptConfig(hub="nvidia/Cosmos-Tokenizer-CI8x8", revision="main")
    assert open_codec(config, device="cpu", trust=True).channels == 16
    assert asked == [("nvidia/Cosmos-Tokenizer-CI8x8", f"{n}.jit", "main") for n in ("encoder", "decoder")]
    with pytest.raises(UserError, match=r"codec\.hub: encoder\.jit of 'no/body' cannot be had \(404 not found\)"):
        open_codec(TorchScriptConfig(hub="no/body"), device="cpu", trust=True)


# ---------------------------------------------------------------- what is refused


def test_torchscript_needs_trust(cosmos):
    config = {"kind": "torchscript", "path": str(cosmos)}
    codec = open_codec(TorchScriptConfig(path=str(cosmos)), device="cpu", trust=True)
    facts = stored(codec)
    again = load_recipe(recipe(config).to_tree())  # a stored recipe says nothing of trust
    with pytest.raises(UserError, match=r"runs code that comes with the files of .*--trust"):
        decoder_for(again, facts, "cpu")
    decode = decoder_for(again, facts, "cpu", trust=True)
    assert decode(torch.zeros(1, 16, 2, 2)).shape == (1, 3, 16, 16)


def test_files_that_are_not_what_they_should_be(kl, cosmos, tmp_path):
    def refused(config, words):
        with pytest.raises(UserError, match=words):
            open_codec(config, device="cpu", trust=True)

    refused(KLConfig(path=str(tmp_path / "none")), "is no folder; give the one that holds config.json and")
    pickled = tmp_path / "pickled"
    shutil.copytree(kl, pickled)
    (pickled / "diffusion_pytorch_model.safetensors").rename(pickled / "diffusion_pytorch_model.bin")
    refused(KLConfig(path=str(pickled)), "has no diffusion_pytorch_model.safetensors")
    other = tmp_path / "other"
    shutil.copytree(kl, other)
    settings = json.loads((kl / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(settings | {"_class_name": "VQModel"}))
    refused(KLConfig(path=str(other)), "describes 'VQModel', not an AutoencoderKL")
    (other / "config.json").write_text(json.dumps(settings | {"layers_per_block": 2}))
    refused(KLConfig(path=str(other)), "do not fit|cannot be loaded")  # never random weights
    (other / "config.json").write_text("{")
    refused(KLConfig(path=str(other)), "is no JSON")
    (tmp_path / "encoder.jit").write_bytes(b"no TorchScript")
    shutil.copy(cosmos / "decoder.jit", tmp_path)
    refused(TorchScriptConfig(path=str(tmp_path)), "cannot be opened as TorchScript")
    swapped = TorchScriptConfig(path=str(cosmos), encoder="decoder.jit", decoder="encoder.jit")
    refused(swapped, "does not encode and decode an image of .*belong together")
    refused(TorchScriptConfig(path=str(cosmos), data_channels=1), "check data_channels and ndim")
    refused(AutoencoderCodecConfig(path=str(tmp_path / "none")), "give the run of a trained autoencoder")
    refused(AutoencoderCodecConfig(path=str(tmp_path)), "no checkpoint here")


def test_wrong_keys():
    for codec, words in (
        ({"kind": "kl"}, "codec: give one of path"),
        ({"kind": "kl", "path": "a", "hub": "b"}, "codec: give one of path"),
        ({"kind": "kl", "path": "a", "range": [1, 1]}, "must be two rising numbers"),
        ({"kind": "vae", "path": "a"}, r"codec\.kind: 'vae' is not a known codec"),
        ({"path": "a"}, r"codec\.kind: missing; expected one of autoencoder, identity, kl, torchscript"),
        ("kl", "codec: expected a mapping"),
        ({"kind": "torchscript", "ndim": 4}, "must be 2 or 3"),
    ):
        with pytest.raises(UserError, match=words):
            recipe(codec)
    assert recipe(None).codec is None


def test_codec_latents_and_data_must_belong_together(cosmos):
    config = {"kind": "torchscript", "path": str(cosmos)}
    codec = open_codec(TorchScriptConfig(path=str(cosmos)), device="cpu", trust=True)
    named = recipe(config)

    def refused(facts, words):
        with pytest.raises(UserError, match=words):
            decoder_for(named, facts, "cpu", True)

    refused(stored(codec, channels=4), "decodes latents of 16 channels, but data/latents has 4")
    refused(stored(codec, axes=3), "decodes 2 axes, but data/latents has 3")
    refused(stored(codec, fingerprint="0"), "was encoded by .* with fingerprint 0, and")
    refused(stored(codec, kind="kl"), "with kind kl, and")
    refused({"kind": "image_folder", "path": "data/x"}, "encode them with `vitrail data encode RECIPE --out DIR`")
    with pytest.raises(UserError, match="with fingerprint 0, and"):  # the second of two sources
        decoder_for(named, stored(codec), "cpu", True, stored(codec, fingerprint="0"))
    foreign = stored(codec)
    del foreign["codec"]  # latents of another program
    assert decoder_for(named, foreign, "cpu", True) is not None
    assert decoder_for(recipe(None), stored(codec), "cpu") is None
    assert decoder_for(recipe({"kind": "identity"}), {"kind": "image_folder"}, "cpu") is None
    # The range that data were encoded with is that which they are decoded to.
    decode = decoder_for(named, stored(codec, range=[0.0, 1.0]), "cpu", True)
    bright = decoder_for(named, stored(codec), "cpu", True)
    latents = torch.randn(1, 16, 2, 2)
    torch.testing.assert_close(decode(latents) * 255, bright(latents))
    for shape, words in (
        ((1, 32, 32), "encodes 3 channels, but the data have 1"),
        ((3, 30, 32), r"data\.crop: \[30, 32\] is not a multiple of the codec's factor \[8, 8\]"),
        ((3, 8, 8, 8), "encodes 2 axes, but samples have 3"),
    ):
        with pytest.raises(UserError, match=words):
            codec.check(shape)


# ---------------------------------------------------------------- a user's own, and the store


def test_a_codec_of_the_user(tmp_path, monkeypatch):
    """The example of docs/plugins.md, as it stands there."""
    text = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    example = text.partition("## Your own codec")[2].partition("```python\n")[2].partition("```")[0]
    assert 5 < len([line for line in example.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_codec.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(kinds._registered, "codec", {})
    load_plugin("my_codec")
    codec = open_codec(recipe({"kind": "blocks", "size": 4}).codec, device="cpu")
    latents = codec.encode(IMAGES)
    assert latents.shape == (2, 3, 8, 8)
    assert codec.decode(latents).shape == IMAGES.shape
    decode = decoder_for(recipe({"kind": "blocks", "size": 4}), stored(codec, channels=3), "cpu")
    assert decode(latents).shape == IMAGES.shape


def test_latents_that_are_complete_are_tidied_and_nothing_else(tmp_path):
    """What lies beside them and is not of their making stays: files of a person, and drafts of who writes there now."""
    from vitrail import disk
    from vitrail.data.latents.shards import ShardedLatents
    from vitrail.data.latents.store import PLAN

    plan = {"codec": {"kind": "x"}, "data": {}, "encoding": {}}
    rows = [(np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4), None)]

    def latents(store):
        return ShardedLatents(tmp_path / store, plan, store=store)

    def left(store):
        folder = latents(store).folder
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))

    for store in ("zarr", "safetensors"):
        assert not latents(store).begin()
        latents(store).write(0, iter(rows))
        (mine := latents(store).folder / "mine").mkdir()
        (mine / "thesis.txt").write_text("mine")
        (old := disk.draft_of(latents(store).place(0))).write_text("of a kill")
        os.utime(old, (0, 0))
        (young := disk.draft_of(latents(store).place(0))).write_text("of a process that writes now")
        latents(store).finish(1)
        assert latents(store).begin()
        there = {"zarr": [PLAN], "safetensors": ["index.json", "latents-00000.safetensors"]}[store]
        assert left(store) == sorted([young.name, "mine", "mine/thesis.txt", *there])
        os.utime(young, (0, 0))
        assert latents(store).begin()
        assert left(store) == sorted(["mine", "mine/thesis.txt", *there])
        (mine / "thesis.txt").unlink()
        mine.rmdir()
        assert latents(store).begin()
    assert not latents("zarr").folder.exists()

    # A folder of that name which no call has begun, or one with another plan, is none of theirs.
    for words in (None, "{}", json.dumps(plan | {"codec": {"kind": "y"}})):
        for store in ("zarr", "safetensors"):
            folder = latents(store).folder
            folder.mkdir(exist_ok=True)
            (folder / "latents-00007.safetensors").write_text("mine")
            if words is not None:
                (folder / PLAN).write_text(words)
            before = left(store)
            assert latents(store).begin()
            assert left(store) == before
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / PLAN).write_text(json.dumps(plan))
    latents("zarr").folder.rename(tmp_path / "away")
    latents("zarr").folder.symlink_to(tmp_path / "real")
    assert latents("zarr").begin()
    assert (tmp_path / "real" / PLAN).exists()


def test_shards_survive_whatever_happens(tmp_path):
    from vitrail.data.latents.shards import ShardedLatents
    from vitrail.data.latents.store import PLAN, Moments

    random = np.random.default_rng(0)
    values = (random.standard_normal((10, 2, 4, 4)) * 3 + 100).astype(np.float32)
    labels = np.arange(10) % 3
    plan = {"codec": {"kind": "x"}, "data": {"crop": [8]}, "encoding": {"samples": 10}}

    def batches(first, last):
        return iter([(values[i : min(i + 2, last)], labels[i : min(i + 2, last)]) for i in range(first, last, 2)])

    def make(path, order, store="safetensors"):
        latents = ShardedLatents(path, plan, store=store)
        assert not latents.begin()
        for number in order:
            latents.write(number, batches(4 * number, min(10, 4 * number + 4)))
        return latents, latents.finish(3, classes=("a", "b", "c"))

    first, facts = make(tmp_path / "one", [0, 1, 2])
    second, _ = make(tmp_path / "two", [2, 0, 1])
    files = sorted(p.name for p in first.target.iterdir())
    assert files == ["index.json", *(f"latents-0000{n}.safetensors" for n in range(3))]
    assert all((first.target / f).read_bytes() == (second.target / f).read_bytes() for f in files)
    flat = values.astype(np.float64).transpose(1, 0, 2, 3).reshape(2, -1)
    np.testing.assert_allclose(facts["mean"], flat.mean(1), rtol=1e-14)
    np.testing.assert_allclose(facts["std"], flat.std(1), rtol=1e-14)
    _, same = make(tmp_path / "three.zarr", [1, 2, 0], "zarr")
    assert (same["mean"], same["std"]) == (facts["mean"], facts["std"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "three.zarr", "two"]
    for path in ("one", "three.zarr"):
        source = LatentsConfig(path=str(tmp_path / path)).open()
        assert [item.label for item in source.items] == labels.tolist()
        rows = [source.read(i, (slice(None), slice(None))) for i in range(10)]
        np.testing.assert_array_equal(np.stack(rows), values)
        assert source.describe()["codec"] == {"kind": "x", "data": {"crop": [8]}}

    # Complete ones are left alone, unfinished ones are told from complete ones, and others are refused.
    assert first.begin()
    with pytest.raises(UserError, match=r"begun with other settings \(codec.kind: 'x' became 'y'\)"):
        ShardedLatents(first.target, plan | {"codec": {"kind": "y"}}, store="safetensors").begin()
    begun = ShardedLatents(tmp_path / "begun", plan, store="safetensors")
    assert not begun.begin()
    assert (begun.target / PLAN).is_file()
    begun.write(0, batches(0, 4))
    assert (begun.has(0), begun.has(1)) == (True, False)
    begun.place(0).write_bytes(begun.place(0).read_bytes()[:-3])  # by a disk that lost the end
    assert not begun.has(0)
    with pytest.raises(UserError, match="is not encoded to its end"):
        LatentsConfig(path=str(begun.target)).open()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(UserError, match="holds something else"):
        ShardedLatents(tmp_path / "mine", plan, store="safetensors").begin()
    (tmp_path / ".new.shards").mkdir()  # where shards of new/ would be, and be removed in the end
    (tmp_path / ".new.shards" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"new\.shards holds something else"):
        ShardedLatents(tmp_path / "new", plan, store="zarr").begin()
    assert (tmp_path / ".new.shards" / "thesis.txt").read_text() == "mine"
    (tmp_path / ".linked.shards").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"linked\.shards holds something else"):
        ShardedLatents(tmp_path / "linked", plan, store="zarr").begin()
    # Rows that could not be read are missing; of nothing but such, there is nothing to write.
    begun.write(0, iter([]))
    with pytest.raises(UserError, match="would hold no latents"):
        begun.finish(1)
    moments = Moments()
    moments.merge({"rows": 0})
    assert not moments.rows
