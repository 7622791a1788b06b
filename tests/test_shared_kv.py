"""A layer that reads another one's KV cache, by a third party's model (tests/plugins/shared_kv)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import UnsupportedError
from toolkit_lm_devkit import ModelConformance, write_checkpoint
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "shared_kv"))
PLUGIN = importlib.import_module("toolkit_lm_shared_kv")
SHAPES = {
    "embeddings": (272, 32),
    "q_proj": (64, 32),
    "k_proj": (32, 32),
    "v_proj": (32, 32),
    "query": (64, 32),
    "out.0": (32, 64),
    "out.1": (32, 64),
    "norms.0": (32,),
    "norms.1": (32,),
    "norms.2": (32,),
    "lm_head": (272, 32),
}


def make(folder, **fields):
    """Writes a checkpoint, and gives plain torch that computes the same."""
    config = {"architectures": ["SharedKVForCausalLM"], "vocab_size": 272, "hidden_size": 32}
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": 0.3 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in SHAPES.items()
    }
    write_checkpoint(folder, {**config, "eos_token_id": 1, **fields}, weights)
    of = {name: weights[f"{name}.weight"] for name in SHAPES}

    def reference(token_ids):
        x = of["embeddings"][torch.tensor(list(token_ids))]

        def heads(x, name):
            return F.linear(x, of[name]).view(len(x), -1, 16).transpose(0, 1)[None]

        def attend(q):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1).flatten(1)

        normed = F.rms_norm(x, (32,), of["norms.0"], 1e-5)
        k = heads(normed, "k_proj")
        v = heads(normed, "v_proj")
        x = x + F.linear(attend(heads(normed, "q_proj")), of["out.0"])
        normed = F.rms_norm(x, (32,), of["norms.1"], 1e-5)
        x = x + F.linear(attend(heads(normed, "query")), of["out.1"])
        return F.linear(F.rms_norm(x, (32,), of["norms.2"], 1e-5), of["lm_head"])

    return reference


class TestSharedKV(ModelConformance):
    """Chunks, preemptions, ranks, and a pass without a cache."""

    plugins = [PLUGIN]
    pipeline_stages = 1
    tensor_parallel_sizes = (2,)

    def make_checkpoint(self, folder, **variant):
        return make(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("shared")
    make(made)
    return made


def run(folder, prompts, **options):
    options = {"max_num_seqs": 8, "block_size": 4, "max_num_batched_tokens": 16} | options
    with LLM(str(folder), plugins=[PLUGIN], dtype="float32", max_model_len=64, **options) as llm:
        [group] = llm.engine.client.core.kv_cache.groups
        assert group.layers == ["attn.0"]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        found = []
        for prompt in prompts:
            [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            found.append((output.outputs[0].token_ids, output.num_cached_tokens))
        return found


def test_a_cached_prefix_is_both_layers(folder):
    prompt = [(7 * i) % 271 for i in range(30)]
    cached = run(folder, [prompt, [*prompt[:20], 5, 6]])
    fresh = run(folder, [prompt, [*prompt[:20], 5, 6]], enable_prefix_caching=False)
    assert [tokens for tokens, _ in cached] == [tokens for tokens, _ in fresh]
    assert [count for _, count in cached] == [0, 20]


def test_it_is_swapped_with_the_layer_that_keeps_it(folder):
    prompts = [{"prompt_token_ids": [(k * i) % 271 for i in range(20)]} for k in (3, 5, 7)]
    found = []
    for options in ({}, {"num_kv_blocks": 14, "preemption_mode": "swap", "swap_memory": "1MiB"}):
        with LLM(
            str(folder),
            plugins=[PLUGIN],
            dtype="float32",
            max_model_len=48,
            max_num_seqs=4,
            block_size=4,
            **options,
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shares_with": "attn.7"}, "'attn.7', which is no layer before it on its pipeline stage"),
        ({"shares_with": "attn.1"}, "which has none of its own"),
        ({"second_window": 8}, "which keeps something else"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, fields, message):
    make(tmp_path, **fields)
    with pytest.raises(
        UnsupportedError, match=f"layer 'attn.1' shares the KV cache of .*{message}"
    ):
        run(tmp_path, [])
