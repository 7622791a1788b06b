"""The renderer contract: all input preparation, and its inverse."""

from toolkit_lm.renderer.answer import AnswerDelta, AnswerFormat, AnswerParser, ReasoningCounter, ToolCallDelta
from toolkit_lm.renderer.contract import DecodeStream, Rendered, RenderedText, Renderer
from toolkit_lm.renderer.encoder_decoder import EncoderDecoderRules, RenderedPair
from toolkit_lm.renderer.making import make_renderer
from toolkit_lm.renderer.multimodal import MultiModalRules, Replacement

__all__ = [
    "AnswerDelta",
    "AnswerFormat",
    "AnswerParser",
    "DecodeStream",
    "EncoderDecoderRules",
    "MultiModalRules",
    "ReasoningCounter",
    "Rendered",
    "RenderedPair",
    "RenderedText",
    "Renderer",
    "Replacement",
    "ToolCallDelta",
    "make_renderer",
]
