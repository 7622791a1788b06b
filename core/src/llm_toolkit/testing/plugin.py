"""The pytest plugin, which pytest finds by entry point: a failed assertion of the kit shows its values, as one in a test module does."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite(
    "llm_toolkit.testing.attention",
    "llm_toolkit.testing.equality",
    "llm_toolkit.testing.model",
    "llm_toolkit.testing.renderer",
    "llm_toolkit.testing.sharding",
    "llm_toolkit.testing.transformers_model",
)
