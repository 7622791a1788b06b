"""vLLM's `vllm.inputs`: prompts."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.classes import (
    EmbedsPrompt,
    ExplicitEncoderDecoderPrompt,
    PromptType,
    SingletonPrompt,
    TextPrompt,
    TokensPrompt,
)

__all__ = [
    "EmbedsPrompt",
    "ExplicitEncoderDecoderPrompt",
    "PromptType",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
]

__getattr__ = absent(__name__)
