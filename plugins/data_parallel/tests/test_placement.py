"""Which GPUs and cores an engine gets."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_data_parallel.placement import share, visible_devices


def config(device: str = "auto", ranks: int = 1) -> VllmConfig:
    return VllmConfig.make(device=device, data_parallel_size=4, tensor_parallel_size=ranks)


@pytest.mark.parametrize(
    "number, ranks, listed, seen",
    [
        (0, 1, None, "0"),
        (3, 1, None, "3"),
        (1, 2, None, "2,3"),
        (1, 2, "4,5,6,7", "6,7"),
        (0, 1, "GPU-a,GPU-b", "GPU-a"),
        # They are hidden from all.
        (1, 1, "", ""),
    ],
)
def test_each_sees_its_own_gpus(number, ranks, listed, seen):
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    for device in ("auto", "cuda"):
        assert visible_devices(config(device, ranks), number, environ) == {
            "CUDA_VISIBLE_DEVICES": seen
        }
    assert visible_devices(config("cpu", ranks), number, environ) == {}


def test_too_few_of_them_are_named():
    with pytest.raises(
        ConfigError,
        match=r"'4,5,6', and engine 1 needs 2 more \(data_parallel_size is 4, of 2 each\)",
    ):
        visible_devices(config("cuda", 2), 1, {"CUDA_VISIBLE_DEVICES": "4,5,6"})


def test_one_device_cannot_be_shared():
    with pytest.raises(ConfigError, match="'cuda:1' is one device, and data_parallel_size is 4"):
        visible_devices(config("cuda:1"), 0, {})


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(1, 16))
def test_cores_are_split_without_rest(cores, size):
    shares = [share(cores, number, size) for number in range(size)]
    assert set().union(*shares) == cores and all(shares)
    if len(cores) >= size:
        assert sum(map(len, shares)) == len(cores)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
