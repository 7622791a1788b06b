"""The renderer contract: all input preparation, and its inverse."""

from toolkit_lm.renderer.answer import (
    AnswerDelta,
    AnswerFormat,
    AnswerParser,
    ContentScope,
    ReasoningCounter,
    StopScope,
    ToolCallDelta,
    prompt_end,
)
from toolkit_lm.renderer.contract import (
    ConversationOptions,
    DecodeStream,
    Rendered,
    RenderedText,
    Renderer,
)
from toolkit_lm.renderer.encoder_decoder import EncoderDecoderRules, RenderedPair
from toolkit_lm.renderer.feature_lookup import FeatureLookup, HeldFeature
from toolkit_lm.renderer.making import make_renderer
from toolkit_lm.renderer.multimodal import MultiModalRules, Replacement

__all__ = [
    "AnswerDelta",
    "AnswerFormat",
    "AnswerParser",
    "ContentScope",
    "ConversationOptions",
    "DecodeStream",
    "EncoderDecoderRules",
    "FeatureLookup",
    "HeldFeature",
    "MultiModalRules",
    "ReasoningCounter",
    "Rendered",
    "RenderedPair",
    "RenderedText",
    "Renderer",
    "Replacement",
    "StopScope",
    "ToolCallDelta",
    "make_renderer",
    "prompt_end",
]
