"""Llama through the whole engine: the conformance kit in several variants, and what concerns the
engine more than the model."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import TransformersConformance

SHAPE = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
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
    "yarn-rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "linear-rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
    },
    "gelu-deep": {"hidden_act": "gelu", "num_hidden_layers": 4, "rms_norm_eps": 1e-3},
}
# 30 blocks of 4 tokens hold one sequence of 112, not all eight, and a step computes at most 12
# tokens: it preempts, and prefills in chunks.
TIGHT = {
    "num_kv_blocks": 30,
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 12,
}


class TestLlama(TransformersConformance):
    variants = VARIANTS

    def make_hf_model(self, **variant):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**SHAPE | variant))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestLlamaOnCuda(TestLlama):
    variants = {name: VARIANTS[name] for name in ("gqa", "llama3-rope")}
    engine_options = {"device": "cuda"}


def test_sharded_checkpoint_is_the_same(make_llama):
    folder, _ = make_llama("whole")
    sharded, _ = make_llama("whole-sharded", save_options={"max_shard_size": "40KB"})
    assert len(list(sharded.glob("*.safetensors"))) > 2
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    texts = []
    for path in (folder, sharded):
        with LLM(str(path), max_model_len=64, num_kv_blocks=8) as llm:
            texts.append(
                llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)[0]
                .outputs[0]
                .token_ids
            )
    assert texts[0] == texts[1]


def test_seeded_sampling_survives_preemption_and_company(make_llama):
    """A seeded request draws the same tokens alone and in a batch that preempts it."""
    folder, model = make_llama("gqa")
    generator = torch.Generator().manual_seed(7)
    work = [
        torch.randint(3, model.config.vocab_size, (n,), generator=generator).tolist()
        for n in TestLlama.lengths
    ]
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, seed=i, max_tokens=24, ignore_eos=True)
        for i in range(len(work))
    ]
    with LLM(str(folder), **TIGHT) as llm:
        together = llm.generate([{"prompt_token_ids": p} for p in work], params, use_tqdm=False)
        alone = [
            llm.generate({"prompt_token_ids": p}, s, use_tqdm=False)[0]
            for p, s in zip(work, params, strict=True)
        ]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]
