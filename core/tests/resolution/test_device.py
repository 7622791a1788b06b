"""Which device computes."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.resolution import resolve_device


@pytest.mark.parametrize(("ranks", "made"), [(1, ["cuda"]), (2, [])])
def test_an_engine_whose_workers_compute_puts_nothing_on_a_gpu(monkeypatch, ranks, made):
    """It would have a context of its own there, beside that of the first worker."""
    seen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "empty", lambda *shape, device: seen.append(device))
    assert (
        resolve_device(VllmConfig.make(tensor_parallel_size=ranks, device="cuda")).device.device
        == "cuda"
    )
    assert seen == made


@pytest.mark.parametrize("ranks", [1, 2])
def test_gpus_that_are_not_there(ranks):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"device 'cuda' cannot be used: .* Available: cpu\."):
        resolve_device(VllmConfig.make(tensor_parallel_size=ranks, device="cuda"))
