"""From images to latents and back; one small file a codec."""

from vitrail.codecs.codec import Codec, decoder_for, open_codec

__all__ = ["Codec", "decoder_for", "open_codec"]
