"""Which of torch's kernels may run. Tensors without memory stand for those of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toolkit_lm_paged_attention import fused, fused_attention
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).parents[3]


@pytest.fixture
def is_cudnn_asked(monkeypatch):
    """Whether cuDNN's kernel could be chosen, for each call so far."""
    calls = []
    attention = fused.scaled_dot_product_attention

    def spy(*arguments, **options):
        calls.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*arguments, **options)

    monkeypatch.setattr(fused, "scaled_dot_product_attention", spy)
    return calls


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("host", [True, False], ids=["the host allows it", "the host does not"])
def test_on_a_gpu_cudnn_is_not_asked(is_cudnn_asked, device, host) -> None:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(host)
    try:
        with FakeTensorMode():
            q, k = (
                torch.empty(2, 3, tokens, 16, device=device, dtype=torch.bfloat16)
                for tokens in (5, 9)
            )
            assert fused_attention(q, k, k, scale=0.25).shape == q.shape
            with pytest.raises(TypeError):
                fused_attention(q, k, k, scale="wide")
        assert torch.backends.cuda.cudnn_sdp_enabled() is host, "it is the host program's own"
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was)
    assert is_cudnn_asked == [device == "cpu" and host] * 2


def test_nothing_else_calls_torchs_attention() -> None:
    sources = [
        path
        for folder in ("core", "libs/*", "plugins/*", "contrib_*/*")
        for path in ROOT.glob(f"{folder}/src/**/*.py")
    ]
    callers = [path for path in sources if "scaled_dot_product_attention(" in path.read_text()]
    assert len(sources) > 300 and [path.name for path in callers] == ["fused.py"]
