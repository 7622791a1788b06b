"""Which options of PoolerConfig mean something to which model. What is given and means nothing is
refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from toolkit_lm.config import PoolerConfig
from toolkit_lm.errors import ConfigError


class PoolingKind(Enum):
    """Kind of model that a pooler is made for, in the words of errors."""

    EMBEDDER = "an embedding model"
    CLASSIFIER = "a native classifier"
    CONVERTED = "a language model made into a classifier"
    TOKENS = "a classifier or reward model of tokens"


_LABELS = (PoolingKind.CLASSIFIER, PoolingKind.CONVERTED, PoolingKind.TOKENS)
_KINDS: Mapping[str, tuple[PoolingKind, ...]] = MappingProxyType(
    {
        "pooling_type": (PoolingKind.EMBEDDER, *_LABELS),
        "normalize": (PoolingKind.EMBEDDER,),
        "matryoshka": (PoolingKind.EMBEDDER,),
        "use_activation": _LABELS,
        "logit_mean": _LABELS,
        "logit_sigma": _LABELS,
        "step_tag_id": (PoolingKind.TOKENS,),
        "returned_token_ids": (PoolingKind.TOKENS,),
        "classifier_method": (PoolingKind.CONVERTED,),
        "classifier_tokens": (PoolingKind.CONVERTED,),
        "score_template": (PoolingKind.CLASSIFIER, PoolingKind.CONVERTED),
    }
)
"""Kinds of model to which an option applies, by option."""


def check_pooler_options(options: PoolerConfig, kind: PoolingKind) -> None:
    """Raises ConfigError for an option that was given, and that means nothing to such a model."""
    unset = PoolerConfig()
    for name, kinds in _KINDS.items():
        if kind not in kinds and getattr(options, name) != getattr(unset, name):
            able = " or ".join(kind.value for kind in kinds)
            raise ConfigError(f"option {name!r} has no effect on {kind.value}: it is for {able}.")
