"""Latent attention by kernels in the whole engine: the tokens of plain torch."""

from __future__ import annotations

import pytest
from deepseek_families import make_minicpm3
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_cpu.layers import CpuKernels
from toolkit_lm_devkit import make_checkpoint, randomize

PROMPTS = [[*range(3, 3 + length)] for length in (40, 1, 17, 30)]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # A cached vector of 32 numbers, which kernels take.
    model = make_minicpm3(kv_lora_rank=16, qk_rope_head_dim=16)
    randomize(model)
    return make_checkpoint(tmp_path_factory.mktemp("minicpm3"), model)


def run(folder, kernels):
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
    with LLM(str(folder), kernels=kernels, **options) as llm:
        texts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = [output.outputs[0] for output in llm.generate(texts, GREEDY, use_tqdm=False)]
    tokens = [output.token_ids for output in outputs]
    logprobs = [
        entry[token].logprob
        for output in outputs
        for token, entry in zip(output.token_ids, output.logprobs, strict=True)
    ]
    return tokens, logprobs


def test_kernels_and_torch_give_the_same_tokens(folder, monkeypatch):
    calls = []

    def spy(self, *arguments):
        calls.append(latent_attention(self, *arguments))
        return calls[-1]

    latent_attention = CpuKernels.latent_attention
    monkeypatch.setattr(CpuKernels, "latent_attention", spy)
    tokens, logprobs = run(folder, "cpu")
    assert calls and all(calls)
    expected, expected_logprobs = run(folder, "torch")
    assert tokens == expected
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
