"""How alike two texts are, from their embeddings."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

import numpy as np

from llm_toolkit.config.tasks import Task
from llm_toolkit.errors import RequestError


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    """Of two embeddings [D]: a bi-encoder's score, from -1 to 1. 0 where one of them has no length."""
    lengths = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
    return float(first @ second) / lengths if lengths else 0.0


def max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """Of two texts' token embeddings [tokens, D]: a late-interaction score (Khattab and Zaharia 2020).

    For each token of the query the dot product with the document's token that fits best, summed.
    """
    return float((query @ document.T).max(axis=1).sum())


class ScoreKind(Enum):
    """What a model's score is made of."""

    CROSS_ENCODER = "cross-encoder"
    BI_ENCODER = "bi-encoder"
    LATE_INTERACTION = "late interaction"


def score_kind(tasks: Collection[Task]) -> ScoreKind:
    """How a model that serves `tasks` scores. Raises RequestError when it cannot."""
    if "score" in tasks:
        return ScoreKind.CROSS_ENCODER
    if "embed" in tasks:
        return ScoreKind.BI_ENCODER
    if "token_embed" in tasks:
        # A model that embeds tokens only is made for this.
        return ScoreKind.LATE_INTERACTION
    raise RequestError(f"this model does not score texts. It serves: {', '.join(tasks)}.", "task")
