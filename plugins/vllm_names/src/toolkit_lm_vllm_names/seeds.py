"""Seeds of an engine, as vLLM draws: prompts share one stream of random numbers, so that equal
prompts get other answers."""

from __future__ import annotations

import random
from typing import Any

from toolkit_lm import SamplingParams


class Seeds:
    """Seeds of requests without one, from the engine's option `seed`."""

    def __init__(self, seed: int | None) -> None:
        """`seed`: the option; None: requests draw seeds of their own."""
        self._random = None if seed is None else random.Random(seed)  # nosec B311

    def seeded(self, params: Any, count: int) -> Any:
        """Returns the parameters of each of `count` prompts, each with a seed. Parameters that need
        none, or are not of this kind, stay."""
        if self._random is None:
            return params
        if isinstance(params, SamplingParams):
            params = [params] * count
        return [
            entry.replace(seed=self._random.getrandbits(62)) if _draws(entry) else entry
            for entry in params
        ]


def _draws(params: Any) -> bool:
    """Whether tokens are drawn by a seed of the request's own."""
    return (
        isinstance(params, SamplingParams)
        and params.seed is None
        and params.temperature > 0
        and not params.use_beam_search
    )
