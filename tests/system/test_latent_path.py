"""The latent path from the command line: train a codec, encode, train on latents, sample, decode."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import LONG, environment, losses, merge, run, torchrun, write_recipe, write_volume

from vitrail import cli
from vitrail.codecs import open_codec
from vitrail.codecs.own import AutoencoderCodecConfig
from vitrail.data.sources import guess_kind
from vitrail.data.sources.image_folder import ImageFolderConfig
from vitrail.data.sources.items import LatentsConfig
from vitrail.data.sources.zarr import OmeZarrConfig

ROWS, BATCH = 3, 2  # of a shard, and of a forward


def call(*words) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code or 0


def write_images(folder, number: int, seed: int) -> None:
    """Stripes that stand (class up) or lie (class across), 8 x 8 pixels of grey."""
    random = np.random.default_rng(seed)
    for label in ("across", "up"):
        (folder / label).mkdir(parents=True)
        for index in range(number):
            wave = np.rint(127 + 100 * np.sin(np.arange(8) * random.uniform(0.6, 1.6) + random.uniform(0, 6)))
            image = np.tile(wave.astype(np.uint8), (8, 1))
            Image.fromarray(image if label == "up" else image.T).save(folder / label / f"{index:02d}.png")


def base(folder, name: str, **changes):
    tree = {
        "run": {"name": name, "dir": str(folder / name), "steps": 40, "device": "cpu"},
        "model": {"kind": "autoencoder", "factor": 2, "latent": 3, "width": 8},
        "objective": {"kind": "autoencode"},
        "data": {
            "train": [{"path": str(folder / "images/train"), "kind": "image_folder"}],
            "valid": [{"path": str(folder / "images/valid"), "kind": "image_folder"}],
            "crop": 8,
            "batch": 16,
        },
        "optimizer": {"kind": "adamw", "lr": 1e-2},
        "ema": {"decay": 0.9},
        "checkpoint": {"every": "100%"},
        "eval": {"every": "100%", "samples": 8},
        "log": {"every": 20, "pictures": "100%", "tensorboard": False},
    }
    return merge(tree, changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A trained autoencoder, and latents of its data."""
    folder = tmp_path_factory.mktemp("latents")
    write_images(folder / "images/train", 10, 0)
    write_images(folder / "images/valid", 4, 1)
    assert call("train", write_recipe(folder / "codec.yaml", base(folder, "codec")), "--quiet") == 0
    assert call(*encoding(folder, folder / "encoded")) == 0
    return folder


def encoding(folder, out, *more):
    return "data", "encode", folder / "codec", "--out", out, "--rows", ROWS, "--batch", BATCH, "--quiet", *more


def contents(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read_all(path) -> np.ndarray:
    source = LatentsConfig(path=str(path)).open()
    return np.stack([source.read(i, (slice(None), slice(None))) for i in range(len(source.items))])


def test_the_codec_learns_and_shows_it(made):
    (picture,) = (made / "codec/pictures").glob("autoencode-00000040.png")
    assert picture.stat().st_size > 1000
    lines = [json.loads(line) for line in (made / "codec/metrics.jsonl").read_text().splitlines()]
    (found,) = [line["metrics"] for line in lines if line["event"] == "eval"]
    assert found["mse_over_variance"] < 0.25
    assert found["psnr"] > 10


def test_latents_are_those_of_every_image_in_order(made):
    codec = open_codec(AutoencoderCodecConfig(path=str(made / "codec")), device="cpu")
    files = sorted((made / "images/train").rglob("*.png"))
    images = torch.from_numpy(np.stack([np.asarray(Image.open(file))[None] for file in files]))
    expected = codec.encode(images).numpy()
    found = read_all(made / "encoded/train")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    facts = json.loads((made / "encoded/train/index.json").read_text())
    assert (facts["rows"], facts["shape"], facts["classes"]) == (20, [3, 4, 4], ["across", "up"])
    flat = found.astype(np.float64).transpose(1, 0, 2, 3).reshape(3, -1)
    np.testing.assert_allclose(facts["mean"], flat.mean(1), rtol=1e-12)
    np.testing.assert_allclose(facts["std"], flat.std(1), rtol=1e-12)
    assert facts["codec"] == json.loads(json.dumps(codec.facts()))
    assert [facts["data"][name] for name in ("variables", "dtype", "crop")] == [["grey"], "uint8", [8, 8]]
    source = LatentsConfig(path=str(made / "encoded/train")).open()
    assert [item.label for item in source.items] == [0] * 10 + [1] * 10
    assert len(read_all(made / "encoded/valid")) == 8
    again = codec.decode(torch.from_numpy(found)).numpy()
    assert np.abs(again - images.numpy()).mean() < 40


# Each child goes a little further than the one before, and dies at the worst moments: before a file gets its name, or
# right after it.
KILLED = """
import os, signal, sys
from pathlib import Path
from vitrail.infer.encode import encode

recipe, out, rows, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
replace, calls = os.replace, [0]
kills = ((1, True), (1, False), (1, True), (2, False), (3, True), (3, False), (1, True), (1, False), (3, True))
for number, before in kills:
    child = os.fork()
    if not child:
        def deadly(source, target):
            calls[0] += 1
            if calls[0] == number and before:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(source, target)
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
        os.replace = deadly
        try:
            encode(recipe, out, rows=rows, batch=batch, quiet=True)
        finally:
            os._exit(3)
    status = os.waitpid(child, 0)[1]
    print(number, before, os.WIFSIGNALED(status), sorted(p.name for p in Path(out).rglob("*") if p.is_file()))
    sys.stdout.flush()
for draft in Path(out).rglob(".*.part"):
    os.utime(draft, (0, 0))  # drafts of kills are swept when they are old
for target in (out, out + "-plain"):
    encode(recipe, target, rows=rows, batch=batch, quiet=True)

# Zarr: while rows are copied from the shards, and when the copy has not got its name yet.
zarr = {"rows": rows, "batch": batch, "store": "zarr", "split": "valid", "quiet": True}
for target in ("c/0", "valid"):
    child = os.fork()
    if not child:
        from vitrail.data.latents import store as latents_write
        append = latents_write._append
        def deadly(*arguments):
            append(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)
        if target == "valid":
            from vitrail import disk
            disk.publish = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        else:
            latents_write._append = deadly
        try:
            encode(recipe, out + "-zarr", **zarr)
        finally:
            os._exit(3)
    status = os.waitpid(child, 0)[1]
    print(target, True, os.WIFSIGNALED(status), sorted(p.name for p in Path(out + "-zarr").iterdir()))
    sys.stdout.flush()
encode(recipe, out + "-zarr", **zarr)
"""


def test_encoding_survives_kills(made, tmp_path):
    words = [str(made / "codec"), str(tmp_path / "killed"), str(ROWS), str(BATCH)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *words], env=environment(), capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 11
    assert all(line.split()[2] == "True" for line in told), done.stdout  # killed, each of them
    assert "plan.json" in told[1]
    assert "'index.json'" not in told[6]  # all of train but that
    assert {"index.json", "plan.json"} <= set(json.loads(told[7].split(maxsplit=3)[3].replace("'", '"')))
    for line in told[9:]:
        assert ".valid.shards" in line
        assert line.count(".part") == 1, line  # the copy of the one before is gone
    assert [p.name for p in (tmp_path / "killed-zarr").iterdir()] == ["valid"]
    np.testing.assert_array_equal(read_all(tmp_path / "killed-zarr/valid"), read_all(tmp_path / "killed/valid"))
    expected = contents(tmp_path / "killed-plain")
    assert len(expected) == 1 + 7 + 1 + 3
    assert contents(tmp_path / "killed") == expected
    np.testing.assert_allclose(read_all(tmp_path / "killed/train"), read_all(made / "encoded/train"), atol=1e-5)


def test_ranks_hear_that_the_first_one_gets_on(made, tmp_path, monkeypatch):
    """While it looks at the files of the data, at shards that are there, and merges them: each may take hours."""
    from vitrail.parallel import agree as waiting

    heard = []
    share = waiting.share_json
    monkeypatch.setattr(waiting, "EVERY", 0.0)
    monkeypatch.setattr(waiting, "share_json", lambda value, group: heard.append(value) or share(value, group))
    assert call(*encoding(made, tmp_path / "out"), "--split", "valid") == 0
    files, shards = 8, 3
    assert (
        heard.count({"busy": True}) >= 2 * files + 2 * shards
    )  # before and after, and each shard when it is looked for and merged


@pytest.mark.slow
def test_two_ranks_write_the_same_bytes(made, tmp_path):
    for ranks, name in ((1, "one"), (2, "two")):
        code, said = run(*torchrun(ranks, "-m", "vitrail", *encoding(made, tmp_path / name)))
        assert code == 0, said
    assert len(contents(tmp_path / "two")) == 12
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
def test_the_codec_trains_alike_in_every_layout(made, tmp_path):
    words = ("run.steps=3", "log.every=1", "data.batch=8", "data.micro_batch=2", "run.seed=1")
    recipe = write_recipe(tmp_path / "a.yaml", base(made, "a"))
    layouts = {"one": (), "shard": (), "replicas": ("parallel.strategy=DDP",), "pipeline": ("parallel.pipeline=2",)}
    for name, layout in layouts.items():
        ranks = 1 if name == "one" else 2
        more = ("-m", "vitrail", "train", recipe, f"run.dir={tmp_path / name}", *words, *layout, "--quiet")
        code, said = run(*torchrun(ranks, *more))
        assert code == 0, said
    for name in layouts:
        np.testing.assert_allclose(losses(tmp_path / name), losses(tmp_path / "one"), rtol=1e-5)


def test_a_second_call_finds_all_done_and_other_settings_are_refused(made, capsys):
    before = {p: p.stat().st_mtime_ns for p in (made / "encoded").rglob("*")}
    assert call(*encoding(made, made / "encoded", "--json")) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["train"]["rows"], told["valid"]["rows"]) == (20, 8)
    assert {p: p.stat().st_mtime_ns for p in (made / "encoded").rglob("*")} == before
    assert call(*encoding(made, made / "encoded", "--batch", 4)) == 2
    assert "begun with other settings (encoding.batch: 2 became 4)" in capsys.readouterr().err


def test_latents_may_lie_in_the_folder_of_their_data(made, tmp_path):
    write_images(tmp_path / "images/train", 2, 0)
    changes = {"data.valid": [], "codec": {"kind": "identity"}, "data.batch": 2}
    recipe = write_recipe(tmp_path / "a.yaml", base(tmp_path, "a", **changes))
    for out in (tmp_path / "images/train/latents", tmp_path / "images/train"):
        assert call("data", "encode", recipe, "--out", out, "--quiet") == 0
        assert len(read_all(out / "train")) == 2 * 2
        shutil.rmtree(out / "train")


def test_latents_of_images_that_were_replaced_are_not_returned(made, tmp_path, capsys):
    write_images(tmp_path / "images/train", 2, 0)
    changes = {"data.valid": [], "codec": {"kind": "identity"}, "data.batch": 2}
    recipe = write_recipe(tmp_path / "a.yaml", base(tmp_path, "a", **changes))
    words = ("data", "encode", recipe, "--out", tmp_path / "out", "--quiet")
    assert call(*words) == 0
    before = contents(tmp_path / "out")
    assert call(*words) == 0
    shutil.rmtree(tmp_path / "images/train")
    write_images(tmp_path / "images/train", 2, 7)
    capsys.readouterr()
    assert call(*words) == 2
    assert "was encoded from data that have changed since (entry 0: " in capsys.readouterr().err
    assert contents(tmp_path / "out") == before
    assert call(*words[:-2], tmp_path / "new", "--quiet") == 0


def test_the_same_data_and_codec_by_another_spelling_go_on(made, monkeypatch):
    before = {p: p.stat().st_mtime_ns for p in (made / "encoded").rglob("*")}
    monkeypatch.chdir(made)
    train = "data.train=[{path: images/../images/train, kind: image_folder, weight: 2}]"
    assert call(*encoding(Path(), "encoded", train)) == 0
    assert {p: p.stat().st_mtime_ns for p in (made / "encoded").rglob("*")} == before


def test_zarr_and_one_split(made, tmp_path):
    assert call(*encoding(made, tmp_path / "z", "--store", "zarr", "--split", "valid")) == 0
    assert sorted(p.name for p in (tmp_path / "z").iterdir()) == ["valid"]
    np.testing.assert_allclose(read_all(tmp_path / "z/valid"), read_all(made / "encoded/valid"), atol=1e-5)
    assert call(*encoding(made, tmp_path / "z", "--store", "zarr", "--split", "valid")) == 0


def test_tiles_identity_and_bad_images(made, tmp_path, capsys):
    shutil.copytree(made / "images/valid", tmp_path / "some")
    data = {"data.train": [{"path": str(tmp_path / "some"), "kind": "image_folder"}], "data.valid": []}
    codec = {"codec": {"kind": "identity"}, "data.crop": 4, "data.batch": 3}
    recipe = write_recipe(tmp_path / "a.yaml", base(tmp_path, "a", **data, **codec))
    assert call("data", "encode", recipe, "--out", tmp_path / "tiles", "--rows", 5, "--quiet") == 0
    found, files = read_all(tmp_path / "tiles/train"), sorted((tmp_path / "some").rglob("*.png"))
    whole = np.stack([np.asarray(Image.open(file))[None] for file in files])
    tiles = [image[:, y : y + 4, x : x + 4] for image in whole for y in (0, 4) for x in (0, 4)]
    np.testing.assert_array_equal(found, np.stack(tiles))
    capsys.readouterr()

    content, content5 = files[2].read_bytes(), files[5].read_bytes()
    files[2].write_bytes(content[:-30])  # the header is good, the pixels are not
    words = ("data", "encode", recipe, "--out", tmp_path / "bad", "--quiet", "data.crop=8")
    assert call(*words) == 2
    assert files[2].name in capsys.readouterr().err
    assert call(*words, "data.bad=skip", "--json") == 0
    told = json.loads(capsys.readouterr().out)["train"]
    assert (told["rows"], told["left_out"]) == (7, 1)
    files[5].write_bytes(files[5].read_bytes()[:-30])
    worse = ("data", "encode", recipe, "--out", tmp_path / "worse", "--quiet", "data.crop=8", "--rows", 4)
    for sentence in (files[5].name, "would hold 6 rows, and data.most_bad lets no less than 7 be"):
        assert call(*worse, "data.bad=skip", "data.most_bad=1") == 2  # of all calls together
        assert sentence in capsys.readouterr().err
    files[5].write_bytes(content5)
    np.testing.assert_array_equal(read_all(tmp_path / "bad/train"), np.delete(whole, 2, axis=0))


def test_volumes_are_encoded_tile_by_tile(tmp_path):
    volume = write_volume(tmp_path / "em.zarr", size=32)
    tree = base(tmp_path, "a", **{"model.ndim": 3, "data.crop": [16, 16, 32], "codec": {"kind": "identity"}})
    tree["data"] |= {"train": [{"path": str(volume)}], "valid": [], "tiles": {"overlap": [0.5, 0, 0]}}
    recipe = write_recipe(tmp_path / "a.yaml", tree)
    assert call("data", "encode", recipe, "--out", tmp_path / "tiles", "--rows", 4, "--quiet") == 0
    source = LatentsConfig(path=str(tmp_path / "tiles/train")).open()
    voxels = OmeZarrConfig(path=str(volume)).open().read(0, (slice(None),) * 3)[0]
    starts = [(z, y) for z in (0, 8, 16) for y in (0, 16)]
    assert (len(source.items), source.axes) == (6, ("z", "y", "x"))
    for item, (z, y) in enumerate(starts):
        found = source.read(item, (slice(None),) * 3)
        np.testing.assert_array_equal(found[0], voxels[z : z + 16, y : y + 16])
    told = source.describe()["codec"]["data"]
    assert (told["spacing"], told["dtype"], told["axes"]) == ([8.0] * 3, "uint8", ["z", "y", "x"])


def test_what_does_not_fit_is_refused(made, tmp_path, capsys):
    def refused(words, *sentences):
        assert call(*words) == 2
        said = capsys.readouterr().err
        for sentence in sentences:
            assert sentence in said, said

    out = ("--out", tmp_path / "x", "--quiet")
    untrained = write_recipe(tmp_path / "a.yaml", base(made, "never"))
    refused(("data", "encode", untrained, *out), "holds no checkpoint of this autoencoder; train it first")
    idle = ("data", "encode", made / "codec", "model.depth=2", *out)
    refused(idle, "model.depth=2: the autoencoder encodes as it was trained, which this does not change")
    vit = {"model": {"kind": "vit", "size": "Ti/2"}, "objective": {"kind": "classify"}}
    recipe = write_recipe(tmp_path / "b.yaml", base(made, "vit") | vit)
    refused(("data", "encode", recipe, *out), "codec: the recipe names none to encode with")
    named = f"codec={{kind: autoencoder, path: {made / 'codec'}}}"
    refused(("data", "encode", recipe, named, "data.crop=5", *out), "data.crop: [5, 5] is not a multiple")
    files = f"codec={{kind: torchscript, path: {tmp_path}}}"
    refused(("data", "encode", recipe, files, *out), "codec.kind: 'torchscript' runs code", "--trust")
    refused(("data", "encode", recipe, named, *latents_of(made), *out), "holds latents already; name the data")
    assert not (tmp_path / "x").exists()

    # Training on pixels with a codec: the sentence says how to encode them.
    pixels = write_recipe(tmp_path / "c.yaml", base(made, "pixels") | DIT)
    refused(("train", pixels, named, "--quiet"), "encode them with `vitrail data encode RECIPE --out DIR`")
    refused(("train", pixels, files, *latents_of(made), "--quiet"), "runs code", "--trust")
    half = [word.replace("kind: latents", "kind: latents, variables: [latent0]") for word in latents_of(made)]
    refused(("train", pixels, named, *half, "--quiet"), "decodes latents of 3 channels", "has 1")


DIT = {
    "model": {"kind": "dit", "width": 16, "depth": 1, "heads": 2, "patch": 2, "classes": 2},
    "objective": {"kind": "flow"},
}


def latents_of(folder):
    return [f"data.{name}=[{{path: {folder / 'encoded' / name}, kind: latents}}]" for name in ("train", "valid")] + [
        "data.crop=4"
    ]


def test_train_on_latents_sample_and_decode(made, tmp_path, capsys):
    tree = base(made, "dit") | DIT | {"codec": {"kind": "autoencoder", "path": str(made / "codec")}}
    recipe = write_recipe(tmp_path / "dit.yaml", tree)
    words = ("train", recipe, *latents_of(made), "run.steps=6", f"run.dir={tmp_path / 'dit'}", "--quiet")
    assert call(*words) == 0
    pictures = list((tmp_path / "dit/pictures").glob("flow-00000006.png"))
    assert len(pictures) == 1
    capsys.readouterr()
    out = tmp_path / "samples"
    assert call("sample", tmp_path / "dit", "--number", 4, "--steps", 3, "--out", out, "--quiet") == 0
    files = sorted(out.rglob("0*.png"))
    assert len(files) == 4
    assert {file.parent.name for file in files} == {"across", "up"}
    for file in files:
        with Image.open(file) as image:
            assert (image.size, image.mode) == ((8, 8), "L")  # pixels, decoded from latents of 4 x 4

    # By its path alone the folder is a dataset with the names of the classes.
    assert guess_kind(str(out / "samples")) == "image_folder"
    source = ImageFolderConfig(path=str(out / "samples")).open()
    assert source.class_names == ("across", "up")
    assert [source.items[n].label for n in range(4)] == [0, 0, 1, 1]

    latents = ("sample", tmp_path / "dit", "--number", 4, "--steps", 3, "--latents", "--format", "npy", "--quiet")
    assert call(*latents, "--out", tmp_path / "undecoded") == 0
    codec = open_codec(AutoencoderCodecConfig(path=str(made / "codec")), device="cpu")
    for file in files:
        name = file.relative_to(out).with_suffix(".npy")
        decoded = codec.decode(torch.from_numpy(np.load(tmp_path / "undecoded" / name))[None])[0, 0].numpy()
        with Image.open(file) as image:
            assert np.abs(np.clip(decoded, 0, 255) - np.asarray(image)).max() < 0.51

    # Another codec is other samples; without what is known of the latents, they are not decoded.
    capsys.readouterr()
    again = ("sample", tmp_path / "dit", "--number", 4, "--steps", 3, "--quiet")
    assert call(*again, "--out", out, "codec.weights=raw") == 2
    assert "was encoded by" in capsys.readouterr().err
    (tmp_path / "dit/data.json").unlink()
    assert call(*again, "--out", tmp_path / "other") == 2
    assert "data.json is missing, and without it latents cannot be decoded; restore it" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


class Half(torch.nn.Module):
    """Every second pixel, or each twice."""

    def __init__(self, up: bool):
        super().__init__()
        self.up = up

    def forward(self, x):
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3) if self.up else x[:, :, ::2, ::2]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchscript_from_the_command_line(made, tmp_path):
    for name, up in (("encoder", False), ("decoder", True)):
        torch.jit.save(torch.jit.script(Half(up)), tmp_path / f"{name}.jit")
    codec = f"codec={{kind: torchscript, path: {tmp_path}, data_channels: 1}}"
    words = ("data", "encode", made / "codec.yaml", codec, "--split", "valid", "--out", tmp_path / "out", "--quiet")
    assert call(*words) == 2
    assert call(*words, "--trust") == 0
    files = sorted((made / "images/valid").rglob("*.png"))
    images = np.stack([np.asarray(Image.open(file))[None] for file in files])
    np.testing.assert_allclose(read_all(tmp_path / "out/valid"), images[:, :, ::2, ::2] / 127.5 - 1, atol=1e-6)
