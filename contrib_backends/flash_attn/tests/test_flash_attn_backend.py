"""The backend's contract: refusals, registration; how it calls the kernels that it finds."""

import functools
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
import toolkit_lm_flash_attn
import torch
from stand_in_kernel import GATHERING, PAGING, backend_of
from toolkit_lm.attention import AttentionSpec, AttentionType
from toolkit_lm.kv import FullSpec, PageTensor, WindowSpec
from toolkit_lm.plugin import AttentionBackendRegistry, PluginInfo
from toolkit_lm_devkit import AttentionStep
from toolkit_lm_flash_attn import backend, kernel
from toolkit_lm_flash_attn.arguments import Arguments
from toolkit_lm_flash_attn.backend import FlashAttnBackend, lacks
from toolkit_lm_flash_attn.kernel import Kernel
from torch._subclasses import FakeTensorMode
from torch.nn.attention import varlen

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
PACKAGE = Kernel("flash_attn", None, soft_caps=True, page_step=256)
TORCH = Kernel("torch", None, soft_caps=False, page_step=None)


@pytest.mark.parametrize("found", [PACKAGE, TORCH])
@pytest.mark.parametrize("type", AttentionType)
def test_runs_every_type(found, type) -> None:
    assert lacks(found, msgspec.structs.replace(SPEC, type=type)) is None
    if type is not AttentionType.CROSS:
        assert lacks(found, msgspec.structs.replace(SPEC, type=type, window=7)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "no kernel for float32, only for bfloat16, float16"),
        ({"type": "sideways"}, "no attention of type 'sideways', only of decoder, encoder, cross"),
        ({"head_size": 20}, "head_size 20 is not a multiple of 8 up to 256"),
        ({"head_size": 512}, "head_size 512 is not a multiple of 8 up to 256"),
        (
            {"type": AttentionType.CROSS, "window": 7},
            "window relates positions of one sequence, and cross attention has two",
        ),
        (
            {"soft_cap": 30.0},
            "FlashAttention of torch has no soft caps; that of the package flash_attn has",
        ),
        ({"bias": True}, "FlashAttention has no bias"),
        ({"bias": True, "sinks": True}, "FlashAttention has no bias and no sinks"),
    ],
)
def test_what_kernels_lack(change, reason) -> None:
    assert lacks(TORCH, msgspec.structs.replace(SPEC, **change)) == reason


def test_the_package_has_soft_caps() -> None:
    assert lacks(PACKAGE, msgspec.structs.replace(SPEC, soft_cap=30.0, window=7)) is None


def test_which_blocks_are_read_as_pages() -> None:
    assert [PACKAGE.pages(size) for size in (None, 16, 128, 256, 384, 512)] == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]
    assert not any(TORCH.pages(size) for size in (None, 16, 256))


def test_refuses_other_devices() -> None:
    assert (
        FlashAttnBackend.refuses(msgspec.structs.replace(SPEC, device="cpu"))
        == "no kernel for device cpu, only for cuda"
    )


def test_without_a_kernel_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(kernel, "find_kernel", lambda: None)
    assert (
        FlashAttnBackend.refuses(SPEC)
        == "neither the package flash_attn is installed, nor does torch have FlashAttention"
    )


@pytest.mark.parametrize(
    ("available", "capability", "reason"),
    [
        (False, None, "no GPU is there"),
        (True, (7, 5), "the GPU has compute capability 7.5, and FlashAttention needs 8.0"),
        (True, (8, 0), None),
        (True, (10, 0), None),
    ],
)
def test_needs_a_gpu_that_has_the_kernels(monkeypatch, available, capability, reason) -> None:
    for module in (kernel, backend):
        monkeypatch.setattr(module, "find_kernel", lambda: PACKAGE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert FlashAttnBackend.refuses(SPEC) == reason


@pytest.fixture
def find_again():
    kernel.find_kernel.cache_clear()
    yield
    kernel.find_kernel.cache_clear()


@pytest.mark.usefixtures("find_again")
@pytest.mark.parametrize(
    ("package", "in_torch", "name"),
    [(True, True, "flash_attn"), (True, False, "flash_attn"), (False, True, "torch")],
)
def test_the_package_goes_before_torch(monkeypatch, package, in_torch, name) -> None:
    monkeypatch.setattr(
        kernel.importlib.util,
        "find_spec",
        lambda module: object() if package or module != "flash_attn" else None,
    )
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: in_torch)
    assert kernel.find_kernel().name == name


@pytest.mark.usefixtures("find_again")
def test_there_may_be_none(monkeypatch) -> None:
    monkeypatch.setattr(kernel.importlib.util, "find_spec", lambda module: None)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    assert kernel.find_kernel() is None


def test_how_the_package_is_called(monkeypatch) -> None:
    calls = []
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = lambda q, k, v, **options: (
        calls.append((k, options)) or torch.zeros_like(q)
    )
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    found = PAGING._replace(attend=kernel._attend_by_package)
    AttentionStep(backend_of(found), [(3, 40), (1, 20)], window=8, soft_cap=2.0).run()
    ((pages, options),) = calls
    assert pages.shape[1:] == (16, 2, 16)
    assert options.pop("cu_seqlens_q").tolist() == [0, 3, 4]
    assert options.pop("cu_seqlens_k").tolist() == [0, 40, 60]
    assert options.pop("block_table").shape[0] == 2
    assert options == {
        "max_seqlen_q": 3,
        "max_seqlen_k": 40,
        "softmax_scale": 0.25,
        "causal": True,
        "window_size": (7, 0),
        "softcap": 2.0,
    }


def varlen_attn_of_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    return_aux=None,
    scale=None,
    window_size=(-1, -1),
):
    """The signature of PyTorch 2.11, whose attention has no argument for shared KV heads."""


@pytest.mark.parametrize(
    "like", [varlen.varlen_attn, varlen_attn_of_2_11], ids=["installed", "2.11"]
)
@pytest.mark.parametrize(("window", "given"), [(None, (-1, 0)), (8, (7, 0))])
def test_how_torch_is_called(monkeypatch, like, window, given) -> None:
    """Whatever the installed PyTorch is, and as the oldest one takes it."""
    calls = []
    signature = inspect.signature(like)

    @functools.wraps(like)
    def recorded(*arguments, **options):
        calls.append(signature.bind(*arguments, **options).arguments)
        return torch.zeros_like(arguments[0])

    monkeypatch.setattr(varlen, "varlen_attn", recorded)
    found = GATHERING._replace(attend=kernel._attend_by_torch)
    AttentionStep(backend_of(found), [(3, 40), (1, 20)], window=window).run()
    (call,) = calls
    gathered = [40, 20] if window is None else [10, 8]
    assert (len(call["key"]), call["max_q"], call["max_k"]) == (sum(gathered), 3, gathered[0])
    assert call["cu_seq_q"].tolist() == [0, 3, 4]
    assert call["cu_seq_k"].tolist() == [0, gathered[0], sum(gathered)]
    assert (call["scale"], call["window_size"]) == (0.25, given)
    assert call.get("enable_gqa", False) is ("enable_gqa" in signature.parameters)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_the_installed_torch_takes_what_it_is_given(kv_heads) -> None:
    """Its own checks run. Tensors without memory stand for those of a GPU."""
    with FakeTensorMode():
        q, k = (
            torch.empty(4, heads, 16, device="cuda", dtype=torch.bfloat16)
            for heads in (4, kv_heads)
        )
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        given = Arguments(
            starts, starts, 3, 40, causal=True, window=(7, 0), keys=None, block_table=None
        )
        assert kernel._attend_by_torch(q, k, k, given, 0.25, None).shape == q.shape


def test_a_step_without_any_key_gives_zeros() -> None:
    for found in (GATHERING, PAGING):
        assert (
            not AttentionStep(backend_of(found), [(1, 0), (2, 0)], type=AttentionType.CROSS)
            .run()
            .any()
        )


def test_a_page_holds_keys_and_values() -> None:
    for spec in (SPEC.kv_cache, WindowSpec(window=9, **msgspec.structs.asdict(SPEC.kv_cache))):
        assert FlashAttnBackend.page_layout(spec) == [PageTensor((2, 16, 2, 80), "bfloat16")]


def test_entry_module_imports_no_torch() -> None:
    code = "import sys, toolkit_lm_flash_attn; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=Path(__file__).parent, check=False
        ).returncode
        == 0
    )


def test_entry_module_registers_the_backend() -> None:
    backends = AttentionBackendRegistry(owner=PluginInfo("flash_attn"))
    toolkit_lm_flash_attn.toolkit_register_attention_backends(backends)
    assert [(entry.key, entry.priority) for entry in backends.entries()] == [("flash_attn", -2)]
    assert backends.load("flash_attn") is FlashAttnBackend
