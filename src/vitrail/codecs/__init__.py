"""From images to latents and back; one small file a codec."""

from vitrail.codecs.codec import Codec, codec_for, decode_all, decoder_for, open_codec

__all__ = ["Codec", "codec_for", "decode_all", "decoder_for", "open_codec"]
