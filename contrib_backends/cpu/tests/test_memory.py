"""Memory: weights are held once, also while they are packed, and the cache lies in huge pages."""

from __future__ import annotations

import errno
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from toolkit_lm import VllmConfig
from toolkit_lm.attention import BatchLimits, GroupSetup
from toolkit_lm.kv import FullSpec
from toolkit_lm.model import ParallelLMHead, ReplicatedLinear, VocabParallelEmbedding, construction
from toolkit_lm_cpu import panels, toolkit_explain
from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.backend import CpuBackend
from toolkit_lm_cpu.huge_pages import describe
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_cpu.library import refusal
from toolkit_lm_cpu.panels import PanelEmbedding
from toolkit_lm_devkit import AttentionStep, make_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.skipif(refusal() is not None, reason=str(refusal()))
MIB = 2**20
KV_BYTES = 32 * MIB
PEAK = """
import re, sys
from toolkit_lm import LLM, SamplingParams
with LLM(
    model=sys.argv[1],
    dtype="bfloat16",
    kv_cache_memory=int(sys.argv[2]),
    max_model_len=256,
    renderer="tokens",
) as llm:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 4, params, use_tqdm=False)
print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
"""


@pytest.mark.parametrize("tied", [True, False])
def test_peak_of_a_start(tmp_path, tied) -> None:
    """At most the weights, the cache, and 400 MB. The embedding is most of the weights."""
    shape = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=180_000, tie_word_embeddings=tied, max_position_embeddings=256, **shape
            )
        )
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    if tied:
        model.tie_weights()
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    folder = make_checkpoint(tmp_path, model)
    del model
    command = [sys.executable, "-c", PEAK, str(folder), str(KV_BYTES)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.splitlines()[-1]) * 1024
    assert num_bytes > 200e6
    assert peak <= num_bytes + KV_BYTES + 400e6, (
        f"{(peak - num_bytes) / 1e6:.0f} MB beside the weights"
    )


def make_tied(
    dtype: torch.dtype, rows: int, size: int
) -> tuple[VocabParallelEmbedding, ParallelLMHead]:
    config = VllmConfig.default(dtype=str(dtype).removeprefix("torch."))
    with construction(kernels=CpuKernels()):
        embedding = VocabParallelEmbedding(rows, size, vllm_config=config, prefix="embedding")
        head = ParallelLMHead(rows, size, tied_to=embedding, vllm_config=config, prefix="head")
    embedding.weight.data.normal_()
    for module in (embedding, head):
        module.requires_grad_(False)
        module.method.process(module)
    return embedding, head


@pytest.mark.parametrize("shape", [(100, 64), (33, 16), (1, 48)], ids=str)
def test_an_embedding_out_of_the_panels_of_its_head(dtype, shape) -> None:
    torch.manual_seed(3)
    embedding, head = make_tied(dtype, *shape)
    torch.manual_seed(3)
    weight = torch.empty(shape, dtype=dtype).normal_()
    assert (
        isinstance(embedding.method, PanelEmbedding)
        and not hasattr(embedding, "weight")
        and not hasattr(embedding.method, "weight")
    )
    for ids in (
        torch.arange(shape[0]),
        torch.randint(shape[0], (300,)),
        torch.zeros(0, dtype=torch.int64),
        torch.arange(shape[0])[::2],
    ):
        assert torch.equal(embedding(ids), weight[ids])
    x = torch.randn(3, shape[1]).to(dtype)
    assert torch.allclose(head(x).double(), x.double() @ weight.double().T, rtol=0.02, atol=0.1)
    for wrong in (shape[0], -1):
        with pytest.raises(IndexError, match=f"there are {shape[0]} rows, and none is {wrong}"):
            embedding(torch.tensor([0, wrong]))


def test_an_embedding_compiles() -> None:
    embedding, _ = make_tied(torch.float32, 50, 32)
    ids = torch.tensor([3, 49, 3])
    assert torch.equal(
        torch.compile(embedding, backend="eager", fullgraph=True)(ids), embedding(ids)
    )


def test_an_embedding_by_itself_stays_as_it_is() -> None:
    with construction(kernels=CpuKernels()):
        embedding = VocabParallelEmbedding(
            20, 32, vllm_config=VllmConfig.default(), prefix="embedding"
        )
    weight = embedding.weight.data.normal_()
    embedding.method.process(embedding)
    assert torch.equal(embedding(torch.arange(20)), weight)


@pytest.mark.parametrize("is_own", [True, False], ids=["made for it", "given to it"])
def test_a_weight_is_handed_over(monkeypatch, is_own) -> None:
    """Its memory goes back to the system. What others gave a parameter stays theirs."""
    lost = []
    kernels = panels._kernels
    monkeypatch.setattr(panels, "_LARGE", 0)
    monkeypatch.setattr(panels, "_SOME", 64 * 4096)
    monkeypatch.setattr(
        kernels,
        "lose",
        lambda start, count, lose=kernels.lose: lost.append(count) or lose(start, count),
    )
    with construction(kernels=CpuKernels()):
        layer = ReplicatedLinear(1024, 200, vllm_config=VllmConfig.default(), prefix="layer")
    layer.requires_grad_(False)
    held = layer.weight
    weight = torch.randn(200, 1024)
    if is_own:
        held.data.copy_(weight)
    else:
        held.data = weight
    before = weight.clone()
    layer.method.process(layer)
    assert sum(lost) == (weight.nbytes if is_own else 0)
    assert torch.equal(weight, before)
    assert held.shape == ((0,) if is_own else weight.shape), "else a holder would read zeros"
    x = torch.randn(3, 1024)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-5, atol=1e-3)


def test_the_cache_lies_in_huge_pages() -> None:
    step = AttentionStep(CpuBackend, [(1, 5)])
    spec = step.layer.attention_spec(torch.device("cpu"), cached=True)
    assert isinstance(spec.kv_cache, FullSpec)
    backend = CpuBackend(
        GroupSetup(
            layers=[spec],
            kv_cache=spec.kv_cache,
            limits=BatchLimits(1, 8, 64),
            device=torch.device("cpu"),
        )
    )
    memory = np.zeros(8 * MIB, np.uint8)
    page = torch.from_numpy(memory).view(torch.float32)
    backend.see((page,))
    middle = memory.ctypes.data + 4 * MIB
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(bounds[1], 16) <= middle < int(bounds[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    pytest.skip("the system does not tell")


def test_a_system_without_huge_pages_holds_weights_all_the_same(monkeypatch) -> None:
    advice = []

    class Refusing(mmap.mmap):
        def madvise(self, option: int) -> None:  # type: ignore[override]
            advice.append(option)
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    held = Arena(4096).empty(8, torch.float32)
    held.fill_(2.0)
    assert held.sum() == 16
    assert advice == [mmap.MADV_HUGEPAGE]


@pytest.mark.parametrize(
    ("modes", "start"),
    [
        ("always [madvise] never\n", "asked for"),
        ("[always] madvise never\n", "asked for"),
        ("always madvise [never]\n", "none: transparent_hugepage is 'never'"),
        (None, "none: this system does not tell of any"),
    ],
)
def test_explain_tells_of_huge_pages(modes, start, tmp_path) -> None:
    setting = tmp_path / "enabled"
    if modes is not None:
        setting.write_text(modes)
    assert describe(setting).startswith(start)


def test_explain_has_a_row_of_huge_pages_where_the_kernels_run() -> None:
    def config(**options: str) -> VllmConfig:
        return VllmConfig.make(model="tiny", **options)

    rows = toolkit_explain(config(device="cpu"))
    assert rows is not None and list(rows) == ["huge pages"]
    assert toolkit_explain(config(device="cpu", kernels="torch")) is None
    assert toolkit_explain(config(device="cuda")) is None
