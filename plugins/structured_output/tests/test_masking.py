"""Packed masks, applied: on the host and on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toolkit_lm_structured_output.masking import _apply_on_device, _apply_on_host, apply_masks


def masks_of(kind, size, rows):
    generator = np.random.default_rng(5)
    allowed = {
        "nearly all": lambda: generator.random(size) < 0.99,
        "half": lambda: generator.random(size) < 0.5,
        "few": lambda: generator.random(size) < 0.01,
        "none": lambda: np.zeros(size, bool),
    }[kind]
    made = [allowed() for _ in range(rows)]
    packed = []
    for one in made:
        whole = np.zeros(-(-size // 32) * 32, bool)
        whole[:size] = one
        packed.append(np.packbits(whole, bitorder="little").view(np.int32))
    return made, packed


@pytest.mark.parametrize("apply", [_apply_on_host, _apply_on_device])
@pytest.mark.parametrize("kind", ["nearly all", "half", "few", "none"])
@pytest.mark.parametrize(
    ("vocab_size", "size"), [(256, 256), (100, 100), (101, 64), (64, 101), (33, 40)]
)
def test_what_is_not_allowed_is_ruled_out(apply, kind, vocab_size, size):
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(1))
    logits[1, 0] = -torch.inf
    allowed, masks = masks_of(kind, size, 3)
    expected = torch.full_like(logits, -torch.inf)
    for row, one in enumerate(allowed):
        some = np.flatnonzero(one[:vocab_size])
        expected[row, some] = logits[row, some]
    found = logits.clone()
    apply(found, masks)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("apply", [apply_masks, _apply_on_device])
def test_one_token_may_be_named(apply):
    logits = torch.randn(2, 70, generator=torch.Generator().manual_seed(1))
    expected = torch.full_like(logits, -torch.inf)
    expected[0, 63] = logits[0, 63]
    expected[1, 69] = logits[1, 69]
    apply(logits, [63, 69])
    assert torch.equal(logits, expected)
