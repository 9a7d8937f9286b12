"""What codecs share: ranges, fingerprints, and units of the data on the way back."""

import types

import torch

from vitrail.codecs import fingerprint_of, range_of
from vitrail.codecs.own import AutoencoderCodec
from vitrail.recipe.normalize import Window


class Half(torch.nn.Module):
    """A network that halves, and doubles on the way back."""

    config = types.SimpleNamespace(ndim=2, factors=(1, 1), latent=2, channels=2)

    def encode(self, values):
        return values / 2

    def decode(self, latents):
        return latents * 2


def test_an_autoencoder_takes_and_gives_the_units_of_the_data():
    statistics = {"mean": [100.0, -3.0], "std": [10.0, 0.5]}
    codec = AutoencoderCodec(Half(), statistics, "a run", torch.device("cpu"))
    images = torch.tensor([[110.0, -2.0], [80.0, -3.0]])[:, :, None, None].expand(2, 2, 4, 4)
    latents = codec.encode(images)
    assert torch.equal(latents[:, :, 0, 0], torch.tensor([[0.5, 1.0], [-1.0, 0.0]]))
    assert torch.equal(codec.decode(latents), images)


def test_an_autoencoder_sees_what_it_was_trained_on():
    way = Window(window=(0.0, 100.0), to=(0.0, 1.0))
    codec = AutoencoderCodec(Half(), {"mean": [0.0] * 2, "std": [100.0] * 2}, "a run", torch.device("cpu"), way)
    assert codec.encode(torch.tensor([150.0, -9.0]).view(1, 2, 1, 1)).flatten().tolist() == [0.5, 0.0]


def test_the_range_of_a_recipe_comes_before_that_of_the_data():
    assert range_of((0.0, 1.0), (0.0, 9.0)) == (0.0, 1.0)
    assert range_of(None, (0.0, 9.0)) == (0.0, 9.0)
    assert range_of(None, None) == (0.0, 255.0)


def test_fingerprints_depend_on_every_value():
    weights = [torch.zeros(3), torch.zeros(2, dtype=torch.bfloat16)]
    found = {fingerprint_of(weights), fingerprint_of(weights[:1])}
    for part in weights:
        part[1] = 1.0
        found.add(fingerprint_of(weights))
    assert len(found) == 4
    assert fingerprint_of([b"ab"]) != fingerprint_of([b"ac"])
