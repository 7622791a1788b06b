"""The forward pass without an engine: its attention is the formula, and ranks that fail are
found."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toolkit_lm.attention import Attention, AttentionCall, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm_decoder.llama import LlamaForCausalLM
from toolkit_lm_devkit import Computed, logits_of_ranks, naive_attention
from toolkit_lm_devkit.forward import FormulaAttention


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_attention_is_the_formula(kind, window, soft_cap):
    layer = Attention(
        4,
        16,
        vllm_config=VllmConfig.default(),
        prefix="a",
        num_kv_heads=2,
        type=AttentionType(kind),
        window=window,
        soft_cap=soft_cap,
    )
    (q, k, v) = (torch.randn(9, heads, 16) for heads in (4, 2, 2))
    lengths = [5, 1, 3]
    out = torch.full_like(q, torch.nan)
    call = AttentionCall(layer.params, q, k, v, None, lengths, out)
    FormulaAttention(torch.device("cpu")).forward(call)
    rows = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    asked = {"scale": layer.params.scale, "kind": kind, "window": window, "soft_cap": soft_cap}
    expected = np.concatenate([naive_attention(*(x.numpy() for x in row), **asked) for row in rows])
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-5, rtol=0)


def test_ranks_that_fail_are_found(tmp_path, capfd):
    with pytest.raises(AssertionError, match=r"exit codes \[1, 1\]"):
        logits_of_ranks([Computed(LlamaForCausalLM, tmp_path / "none-such")], torch.arange(3))
    assert "none-such" in capfd.readouterr().err
