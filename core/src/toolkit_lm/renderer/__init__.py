"""The renderer contract: all input preparation, and its inverse."""

from toolkit_lm.renderer.contract import DecodeStream, MultiModalFeatureSpec, RenderedText, Renderer
from toolkit_lm.renderer.score_template import ScoreTemplate, read_score_template, score_prompt, score_tokens

__all__ = [
    "DecodeStream",
    "MultiModalFeatureSpec",
    "RenderedText",
    "Renderer",
    "ScoreTemplate",
    "read_score_template",
    "score_prompt",
    "score_tokens",
]
