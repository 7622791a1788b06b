"""The renderer contract: all input preparation, and its inverse."""

from toolkit_lm.renderer.contract import DecodeStream, Rendered, RenderedText, Renderer
from toolkit_lm.renderer.encoder_decoder import EncoderDecoderRules
from toolkit_lm.renderer.pair_renderer import PairRenderer

__all__ = ["DecodeStream", "EncoderDecoderRules", "PairRenderer", "Rendered", "RenderedText", "Renderer"]
