"""Rows and logits for the sampler."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm_devkit import sampling_rows


@pytest.fixture(scope="session")
def make_rows():
    return sampling_rows


@pytest.fixture(scope="session")
def make_logits():
    """make_logits(rows, seed=0, vocab=64) -> [rows, vocab] normal float32."""
    return lambda rows, seed=0, vocab=64: torch.randn(
        rows, vocab, generator=torch.Generator().manual_seed(seed)
    )
