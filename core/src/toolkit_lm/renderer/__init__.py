"""The renderer contract: all input preparation, and its inverse."""

from toolkit_lm.renderer.contract import DecodeStream, RenderedText, Renderer
from toolkit_lm.renderer.pair_renderer import PairRenderer

__all__ = ["DecodeStream", "PairRenderer", "RenderedText", "Renderer"]
