"""Llama through the whole engine against transformers: mixed lengths, a pool that makes it preempt, chunked prefill.

"The same" in fp32: log probabilities of every token of the vocabulary, teacher-forced, within 1e-4 of the reference, and a greedy
token differs only where the reference's two best logits are closer than 1e-3. In bf16: error against an fp32 reference no larger
than 1.5 times that of transformers in bf16.
"""

from __future__ import annotations

import copy

import pytest
import torch
from llm_toolkit import LLM, SamplingParams

VARIANTS = {
    "gqa": {},
    "mqa-tied": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "mha-biases": {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    "head-dim": {"head_dim": 24, "vocab_size": 301},
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "yarn-rope": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
    "gelu-deep": {"hidden_act": "gelu", "num_hidden_layers": 4, "rms_norm_eps": 1e-3},
}
LENGTHS = [5, 17, 40, 3, 64, 33, 1, 21]
MAX_TOKENS = 24
# 30 blocks of 4 tokens hold one sequence of 112, not all eight, and a step computes at most 12 tokens: it preempts, and prefills in chunks.
TIGHT = {"num_kv_blocks": 30, "block_size": 4, "max_model_len": 112, "max_num_seqs": 8, "max_num_batched_tokens": 12}


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def reference_logprobs(model, prompt: list[int], output: list[int]) -> torch.Tensor:
    """[output tokens, V] log probabilities of transformers, teacher-forced along our output."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)


def our_logprobs(output, vocab_size: int) -> torch.Tensor:
    table = torch.full((len(output.token_ids), vocab_size), torch.nan)
    for position, entries in enumerate(output.logprobs):
        for token, entry in entries.items():
            table[position, token] = entry.logprob
    return table


class _Preemptions:
    """A plugin that counts."""

    def __init__(self):
        self.count = 0

    from llm_toolkit.plugin import hookimpl

    @hookimpl
    def toolkit_event(self, event):
        self.count += getattr(event, "kind", None) == "preempted"


@pytest.mark.parametrize("name", VARIANTS)
def test_fp32_parity(make_llama, name):
    check_fp32(make_llama, name, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["gqa", "llama3-rope"])
def test_fp32_parity_on_cuda(make_llama, name):
    check_fp32(make_llama, name, "cuda")


def check_fp32(make_llama, name, device):
    folder, model = make_llama(name, **VARIANTS[name])
    vocab_size, counter = model.config.vocab_size, _Preemptions()
    work = prompts(vocab_size)
    with LLM(str(folder), plugins=[counter], max_logprobs=vocab_size, device=device, **TIGHT) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=vocab_size)
        outputs = llm.generate([{"prompt_token_ids": p} for p in work], params, use_tqdm=False)
    assert counter.count > 0, "the pool was meant to be too small"
    for prompt, output in zip(work, outputs, strict=True):
        ours = our_logprobs(output.outputs[0], vocab_size)
        reference = reference_logprobs(model, prompt, output.outputs[0].token_ids)
        assert len(output.outputs[0].token_ids) == MAX_TOKENS
        assert (ours - reference).abs().max() < 1e-4
        best = reference.topk(2, dim=-1)
        chosen = torch.tensor(output.outputs[0].token_ids)
        sure = best.values[:, 0] - best.values[:, 1] > 1e-3
        assert (chosen == best.indices[:, 0])[sure].all()


def test_bf16_error_is_that_of_transformers(make_llama):
    folder, model = make_llama("bf16", dtype="bfloat16", num_hidden_layers=4)
    exact = copy.deepcopy(model).float()
    vocab_size, work = model.config.vocab_size, prompts(model.config.vocab_size)
    with LLM(str(folder), max_logprobs=vocab_size, **TIGHT) as llm:
        assert llm.config.model.dtype == "bfloat16"
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=vocab_size)
        outputs = llm.generate([{"prompt_token_ids": p} for p in work], params, use_tqdm=False)
    ours, theirs = [], []
    for prompt, output in zip(work, outputs, strict=True):
        reference = reference_logprobs(exact, prompt, output.outputs[0].token_ids)
        ours.append((our_logprobs(output.outputs[0], vocab_size) - reference).square().mean())
        theirs.append((reference_logprobs(model, prompt, output.outputs[0].token_ids) - reference).square().mean())
    assert torch.stack(ours).mean().sqrt() <= 1.5 * torch.stack(theirs).mean().sqrt()


def test_sharded_checkpoint_is_the_same(make_llama):
    folder, _ = make_llama("whole")
    sharded, _ = make_llama("whole-sharded", save_options={"max_shard_size": "40KB"})
    assert len(list(sharded.glob("*.safetensors"))) > 2
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = []
    for path in (folder, sharded):
        with LLM(str(path), max_model_len=64, num_kv_blocks=8) as llm:
            texts.append(llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def test_seeded_sampling_survives_preemption_and_company(make_llama):
    """A seeded request draws the same tokens alone and in a batch that preempts it."""
    folder, model = make_llama("gqa", **VARIANTS["gqa"])
    work = prompts(model.config.vocab_size)
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=MAX_TOKENS, ignore_eos=True) for i in range(len(work))]
    with LLM(str(folder), **TIGHT) as llm:
        together = llm.generate([{"prompt_token_ids": p} for p in work], params, use_tqdm=False)
        alone = [llm.generate({"prompt_token_ids": p}, s, use_tqdm=False)[0] for p, s in zip(work, params, strict=True)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
