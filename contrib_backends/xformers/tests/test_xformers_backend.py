"""The backend's contract: refusals, registration."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import toolkit_lm_xformers
import torch
from toolkit_lm.attention import AttentionSpec, AttentionType
from toolkit_lm.kv import FullSpec, PageTensor
from toolkit_lm.plugin import AttentionBackendRegistry, PluginInfo
from toolkit_lm_xformers import kernel
from toolkit_lm_xformers.backend import XformersBackend, lacks

SPEC = AttentionSpec(
    layer="model.layers.0.self_attn.attn",
    type=AttentionType.DECODER,
    num_heads=4,
    num_kv_heads=2,
    head_size=80,
    dtype="bfloat16",
    device="cuda",
    kv_cache=FullSpec(block_size=16, num_kv_heads=2, head_size=80, dtype="bfloat16"),
)


@pytest.mark.parametrize("type", AttentionType)
def test_runs_every_type(type) -> None:
    assert lacks(msgspec.structs.replace(SPEC, type=type)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "no kernel for float32, only for bfloat16, float16"),
        ({"type": "sideways"}, "no attention of type 'sideways', only of decoder, encoder, cross"),
        ({"head_size": 20}, "head_size 20 is not a multiple of 8 up to 256"),
        ({"head_size": 264}, "head_size 264 is not a multiple of 8 up to 256"),
        ({"soft_cap": 30.0}, "the kernels of xFormers have no soft caps"),
        (
            {"bias": True, "sinks": True},
            "the kernels of xFormers have no sinks and no biases that are functions of positions",
        ),
        (
            {"type": AttentionType.ENCODER, "window": 7},
            "the masks of xFormers have no window on both sides of a token",
        ),
        (
            {"type": AttentionType.CROSS, "window": 7},
            "window relates positions of one sequence, and cross attention has two",
        ),
    ],
)
def test_what_the_kernels_lack(change, reason) -> None:
    assert lacks(msgspec.structs.replace(SPEC, **change)) == reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_the_package_it_says_so(monkeypatch, device) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert (
        XformersBackend.refuses(msgspec.structs.replace(SPEC, device=device))
        == "the package xformers is not installed"
    )


@pytest.fixture
def package(monkeypatch):
    monkeypatch.setattr(kernel, "missing", lambda: None)


@pytest.mark.usefixtures("package")
def test_refuses_other_devices() -> None:
    assert (
        XformersBackend.refuses(msgspec.structs.replace(SPEC, device="cpu"))
        == "no kernel for device cpu, only for cuda"
    )


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("available", "capability", "built", "reason"),
    [
        (False, None, True, "no GPU is there"),
        (
            True,
            (7, 5),
            True,
            "the GPU has compute capability 7.5, and xFormers needs 8.0",
        ),
        (
            True,
            (9, 0),
            False,
            "xFormers has no kernel for this PyTorch: see python -m xformers.info",
        ),
        (True, (9, 0), True, None),
    ],
)
def test_needs_a_gpu_and_kernels(monkeypatch, available, capability, built, reason) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(kernel, "_flash", lambda: SimpleNamespace(is_available=lambda: built))
    assert XformersBackend.refuses(SPEC) == reason


def test_which_blocks_are_not_read_as_pages() -> None:
    assert not any(kernel.reads_pages(size) for size in (None, 16, 128, 384))


def test_a_page_holds_keys_and_values() -> None:
    assert XformersBackend.page_layout(SPEC.kv_cache) == [PageTensor((2, 16, 2, 80), "bfloat16")]


def test_nothing_is_imported_before_it_is_needed() -> None:
    code = "import sys, toolkit_lm_xformers; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )
    code = "import sys, toolkit_lm_xformers.backend; sys.exit('xformers' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )


def test_entry_module_registers_the_backend() -> None:
    backends = AttentionBackendRegistry(owner=PluginInfo("xformers"))
    toolkit_lm_xformers.toolkit_register_attention_backends(backends)
    assert [(entry.key, entry.priority) for entry in backends.entries()] == [("xformers", -4)]
    assert backends.load("xformers") is XformersBackend
