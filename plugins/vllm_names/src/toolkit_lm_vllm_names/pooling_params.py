"""PoolingParams with vLLM's methods."""

from __future__ import annotations

from copy import deepcopy
from typing import Self

import toolkit_lm


class PoolingParams(toolkit_lm.PoolingParams, frozen=True, kw_only=True):
    """toolkit_lm.PoolingParams with `clone`."""

    def clone(self) -> Self:
        """A copy."""
        return deepcopy(self)
