"""The pytest plugin, which pytest finds by entry point: a failed assertion of the kit shows its values, as one in a test module does."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "toolkit_lm.testing.attention",
    "toolkit_lm.testing.equality",
    "toolkit_lm.testing.model",
    "toolkit_lm.testing.renderer",
    "toolkit_lm.testing.sharding",
    "toolkit_lm.testing.transformers_model",
)
