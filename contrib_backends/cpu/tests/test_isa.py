"""Which instructions are used: the best that the processor has and the environment allows. Those
that all can do give the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from toolkit_lm import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm_cli.explanation import explain
from toolkit_lm_cpu import backend, layers, library
from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.backend import CpuBackend
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_cpu.library import ISA_VARIABLE, KERNELS, usable_types
from toolkit_lm_cpu.panels import linear, pack
from toolkit_lm_devkit import AttentionStep

NAMES = ["avx2", "avx512", "avx512_bf16", "amx"]
BEST = [kernels[torch.bfloat16] for kernels in KERNELS.values()]
"""For bfloat16, by NAMES."""
GENERATE = """
import json
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_cpu.library import usable_types
with LLM(model="tiny", dtype="float32", kernels="cpu", attention_backend="cpu") as llm:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(["Once upon a time", "The sea"], params, use_tqdm=False)
tokens = [list(output.outputs[0].token_ids) for output in outputs]
print(json.dumps([list(usable_types().values()), tokens]))
"""


def has(monkeypatch, number: int) -> None:
    """A processor with the first `number` of NAMES, which is not asked yet."""
    chosen = cache(library.usable_types.__wrapped__)
    for module in (library, backend, layers):
        monkeypatch.setattr(module, "usable_types", chosen)
    monkeypatch.setattr(library, "_missing", None)
    monkeypatch.setattr(
        library, "_kernels", SimpleNamespace(supports=NAMES[:number].__contains__), raising=False
    )


@pytest.mark.parametrize("number", range(5))
def test_the_best_instructions_that_there_are(monkeypatch, number) -> None:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    has(monkeypatch, number)
    assert library.usable_types().get(torch.bfloat16) == ([None, *BEST][number])
    assert library.usable_types().get(torch.float32) == [None, 0, 3, 3, 3][number]


@pytest.mark.parametrize("most", NAMES)
@pytest.mark.parametrize("number", [1, 3, 4])
def test_the_environment_sets_a_limit(monkeypatch, most, number) -> None:
    monkeypatch.setenv(ISA_VARIABLE, most)
    has(monkeypatch, number)
    assert library.usable_types()[torch.bfloat16] == BEST[min(NAMES.index(most), number - 1)]


def test_an_unknown_limit_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "sse2")
    has(monkeypatch, 4)
    message = f"{ISA_VARIABLE}: 'sse2' is not one of avx2, avx512, avx512_bf16, amx"
    for choose in (library.usable_types, CpuKernels):
        with pytest.raises(ConfigError, match=message):
            choose()


def test_without_avx2_it_says_so(monkeypatch) -> None:
    has(monkeypatch, 0)
    (layer, *_) = explain(VllmConfig.make(model="tiny")).layers
    assert layer.backend == "sdpa"
    assert ("cpu", "this processor lacks AVX2, FMA or F16C") in layer.candidates
    assert CpuKernels()._types == {}


@pytest.mark.skipif(
    "not usable_types() or not library._kernels.supports('avx512')", reason="needs AVX-512"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_avx2_and_avx512_give_the_same_bits(monkeypatch, dtype) -> None:
    x = torch.randn(13, 160).to(dtype)
    weight = torch.randn(96, 160).mul_(0.1).to(dtype)
    bias = torch.randn(96).to(dtype)
    cos = torch.randn(13, 1, 64).to(dtype)
    sin = torch.randn(13, 1, 64).to(dtype)
    norm = torch.randn(160).to(dtype)
    steps = [
        AttentionStep(
            CpuBackend,
            [(3, 300), (1, 40), (9, 9)],
            heads=(6, 2),
            head_size=48,
            dtype=dtype,
            **fields,
        )
        for fields in ({}, {"soft_cap": 5.0, "window": 33}, {"bias": "alibi"})
    ]

    def compute(isa: str) -> list[torch.Tensor]:
        monkeypatch.setitem(usable_types(), dtype, KERNELS[isa][dtype])
        kernels = CpuKernels()
        packed = pack(weight, usable_types()[dtype], Arena())
        products = [
            linear(usable_types()[dtype], x, packed, 96, bias, activation, gated, None)
            for activation in range(6)
            for gated in (False, True)
        ]
        others = [
            kernels.rms_norm(x, norm, 1e-5),
            kernels.layer_norm(x, norm, norm, (160,), 1e-5),
            *kernels.likeliest(x),
        ]
        rotated = kernels.rotate(x.clone()[:, :128].view(13, 2, 64), cos, sin, False)
        return [packed, *products, *others, rotated, *(step.run() for step in steps)]

    for ours, theirs in zip(compute("avx2"), compute("avx512"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not usable_types(), reason=str(library.refusal()))
def test_generation_is_the_same() -> None:
    found = []
    for limit in ("avx2", "amx"):
        done = subprocess.run(
            [sys.executable, "-c", GENERATE],
            env=os.environ | {ISA_VARIABLE: limit},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        types, tokens = json.loads(done.stdout.splitlines()[-1])
        found.append(tokens)
        if limit == "avx2":
            assert types == list(KERNELS["avx2"].values())
    assert found[0] == found[1]
