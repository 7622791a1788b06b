"""State shared by the layers of a step is made once by an attention backend: the cache slots of
their keys and values."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from flashinfer_stand_in import StandInBackend
from stand_in_kernel import GATHERING, PAGING, backend_of
from toolkit_lm.attention import AttentionBackend, AttentionCall, AttentionType, BatchView
from toolkit_lm.plugin import Plugins
from toolkit_lm_cpu.backend import CpuBackend
from toolkit_lm_cpu.library import refusal
from toolkit_lm_devkit import AttentionStep, assert_bf16_error
from toolkit_lm_devkit.attention import BATCHES
from toolkit_lm_devkit.attention_step import BIASES, CACHES
from toolkit_lm_flash_attn import arguments
from toolkit_lm_flex.backend import FlexBackend
from toolkit_lm_sdpa.backend import SdpaBackend
from toolkit_lm_xformers import layout
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BACKENDS: dict[str, list[type[AttentionBackend]]] = {
    "cpu": [CpuBackend],
    "flash_attn": [backend_of(GATHERING), backend_of(PAGING)],
    "flashinfer": [StandInBackend],
    "flex": [FlexBackend],
    "sdpa": [SdpaBackend],
}
OTHERS = {
    "latent": "its caches hold no keys and values",
    "triton": "its kernels find the places themselves",
    "xformers": "its masks need the package: below",
}
_VIEWS = {
    "view",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "expand",
    "unbind",
    "as_strided",
    "alias",
    "permute",
    "transpose",
    "detach",
}


class MadeIntegers(TorchDispatchMode):
    """Counts the operations whose results are integers, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        made = [
            one
            for one in tree_leaves(result)
            if isinstance(one, Tensor) and not one.is_floating_point() and one.dtype != torch.bool
        ]
        name = func.overloadpacket.__name__
        if made and name not in _VIEWS:
            self.counts[name] += 1
        return result


def with_two_layers(backend: type[AttentionBackend], made: MadeIntegers) -> type[AttentionBackend]:
    """Writes what each layer keeps twice, and counts the second time."""

    class Twice(backend):  # type: ignore[misc, valid-type]
        def write_kv(self, call: AttentionCall) -> None:
            super().write_kv(call)
            with made:
                super().write_kv(call)

    return Twice


def test_every_backend_is_counted() -> None:
    assert BACKENDS.keys() | OTHERS.keys() == {
        entry.key for entry in Plugins.load().attention_backends.entries()
    }


def test_an_engine_that_asks_every_backend_imports_no_compiler() -> None:
    """That takes seconds of each start, and leaves a folder."""
    asked = (
        "for entry in Plugins.load().attention_backends.entries(): "
        "importlib.import_module(entry.target.partition(':')[0])"
    )
    script = (
        f"import importlib, sys; from toolkit_lm.plugin import Plugins\n{asked}\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(one, id=f"{name} {i}")
        for name, all in BACKENDS.items()
        for i, one in enumerate(all)
    ],
)
def test_a_second_layer_knows_where_to_write(backend: type[AttentionBackend], batch: str) -> None:
    if backend is CpuBackend and refusal() is not None:
        pytest.skip(str(refusal()))
    made = MadeIntegers()
    step = AttentionStep(with_two_layers(backend, made), BATCHES[batch])
    step.run()
    assert not made.counts


def batch_of(rows: list[tuple[int, int]], device: str) -> BatchView:
    """Rows of (queries, keys), in blocks of 16."""
    queries, keys = zip(*rows, strict=True)
    table = torch.arange(len(rows) * 16, dtype=torch.int32).flip(0).view(len(rows), 16)
    slots = torch.arange(sum(queries))
    step = AttentionStep(SdpaBackend, rows, device=device)
    return step._batch(queries, keys, [k - q for q, k in rows], table, slots)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("batch", sorted(BATCHES.keys() - {"prefill"}))
@pytest.mark.parametrize("name", ["flash_attn", "xformers"])
def test_the_host_sends_numbers_of_rows_and_not_of_keys(
    name: str, batch: str, window: int | None
) -> None:
    """To kernels that read no pages, of which the keys are gathered. Nor does it wait for the
    device."""

    def keys(device: str) -> Tensor | None:
        given = batch_of(BATCHES[batch], device)
        sent = len(cuda.uploads)
        cuda.waits.clear()
        if name == "flash_attn":
            key = arguments.LayerKey(AttentionType.DECODER, window, 16, paged=False)
            found = arguments.make_arguments(given, key).keys
        else:
            found = layout.make_layout(
                given, layout.LayerKey(AttentionType.DECODER, window, 16, paged=False)
            ).keys
        assert sum(size.numel() for size in cuda.uploads[sent:]) <= 6 * len(BATCHES[batch]) + 2
        assert not cuda.waits
        return found

    with FakeCuda() as cuda:
        expected = keys("cpu")
        found = keys("cuda")
        assert found is not None and expected is not None
        assert found.tolist() == expected.tolist() != []


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["decoder", "encoder", "cross"])
@pytest.mark.parametrize("batch", BATCHES)
def test_what_sdpa_sends_is_little_and_waits_for_nothing(batch: str, kind: str) -> None:
    rows = BATCHES[batch] if kind != "encoder" else [(keys, keys) for _, keys in BATCHES[batch]]

    class Watched(SdpaBackend):
        def build(self, view: BatchView) -> Any:
            cuda.waits.clear()
            cuda.uploads.clear()
            return super().build(view)

        def forward(self, call: AttentionCall) -> None:
            super().forward(call)
            assert not cuda.waits
            # Numbers of rows, and not of keys.
            assert kind == "encoder" or sum(size.numel() for size in cuda.uploads) <= 4 * len(rows)

    with FakeCuda() as cuda:
        step = AttentionStep(
            Watched, rows, type=AttentionType(kind), cached=kind != "encoder", device="cuda"
        )
        np.testing.assert_allclose(step.run().numpy(), step.naive(), atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("cache", CACHES)
def test_sdpa_stores_the_same_codes_on_a_gpu(cache: str) -> None:
    """A GPU divides by a number of the host as it multiplies by its reciprocal."""
    rows = BATCHES["mixed"]
    stored = []
    with FakeCuda():
        for device in ("cpu", "cuda"):
            step = AttentionStep(SdpaBackend, rows, cache=cache, head_size=64, device=device)
            pages = step.run_and_keep()[1]
            assert pages is not None
            stored.append([page.cpu() for page in pages])
    for ours, theirs in zip(*stored, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@torch.inference_mode()
@pytest.mark.parametrize("bias", BIASES)
def test_sdpa_gives_a_gpu_biases_in_the_dtype_of_queries(bias: str) -> None:
    rows = [(19, 19), (8, 8), (19, 19)]
    with FakeCuda():
        step = AttentionStep(
            SdpaBackend,
            rows,
            type=AttentionType.ENCODER,
            cached=False,
            bias=bias,
            dtype=torch.bfloat16,
            device="cuda",
        )
        found = step.run()
    assert_bf16_error([found], [step.eager()], [torch.from_numpy(step.naive())])
