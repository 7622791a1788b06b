"""The conformance kit: what a plugin must do, as test classes. Subclass one, name what it tests, and run pytest.

    from toolkit_lm.testing import AttentionBackendConformance
    from toolkit_lm_mine.backend import MineBackend

    class TestMine(AttentionBackendConformance):
        backend = MineBackend

Needs pytest (`pip install toolkit-lm-core[testing]`). The names are resolved when they are used: importing this package, which pytest
does at each start, imports neither torch nor the engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit_lm.testing.attention import AttentionBackendConformance
    from toolkit_lm.testing.attention_step import AttentionStep
    from toolkit_lm.testing.checkpoints import make_checkpoint, randomize, write_checkpoint, write_tokenizer
    from toolkit_lm.testing.equality import assert_bf16_error, assert_same_logits, assert_same_tokens
    from toolkit_lm.testing.model import ModelConformance, Reference
    from toolkit_lm.testing.naive import naive_attention
    from toolkit_lm.testing.pairs import all_pairs
    from toolkit_lm.testing.renderer import RendererConformance
    from toolkit_lm.testing.transformers_model import TransformersConformance

_HOMES = {
    "AttentionBackendConformance": "attention",
    "AttentionStep": "attention_step",
    "ModelConformance": "model",
    "Reference": "model",
    "RendererConformance": "renderer",
    "TransformersConformance": "transformers_model",
    "all_pairs": "pairs",
    "assert_bf16_error": "equality",
    "assert_same_logits": "equality",
    "assert_same_tokens": "equality",
    "make_checkpoint": "checkpoints",
    "naive_attention": "naive",
    "randomize": "checkpoints",
    "write_checkpoint": "checkpoints",
    "write_tokenizer": "checkpoints",
}

__all__ = [
    "AttentionBackendConformance",
    "AttentionStep",
    "ModelConformance",
    "Reference",
    "RendererConformance",
    "TransformersConformance",
    "all_pairs",
    "assert_bf16_error",
    "assert_same_logits",
    "assert_same_tokens",
    "make_checkpoint",
    "naive_attention",
    "randomize",
    "write_checkpoint",
    "write_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'toolkit_lm.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(f"toolkit_lm.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
