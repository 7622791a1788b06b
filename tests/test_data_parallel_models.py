"""Several engines, one of which dies, with all kinds of models: what they give is what one
gives."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import decoder_families
import moe_families
import pytest
import torch
from toolkit_lm import LLM, SamplingParams, VllmConfig
from toolkit_lm.frontend.llm_engine import LLMEngine
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_devkit import make_checkpoint, randomize
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    StableLmConfig,
    StableLmForCausalLM,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "contrib_models" / "vision" / "tests"))
FAMILIES = ["vision", "encdec", "decoder", "moe", "transformers", "tiny"]
PLUGINS = [*FAMILIES, "loaders", "sdpa", "cpu", "renderer_hf", "pooling_adapters", "data_parallel"]
OPTIONS = {"plugins": PLUGINS, "device": "cpu", "max_num_seqs": 4}
PARAMS = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=24, ignore_eos=True, logprobs=0)
PICTURES = [[0], [0, 1], [2], [0], [3, 1, 0, 3], [2, 2], [4], [0, 4, 3], [1], []]
"""Pictures of the prompts."""


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> tuple[dict[str, Any], list[Any]]:
    checkpoints = importlib.import_module("vision_checkpoints")
    folder = checkpoints.make_subject(tmp_path_factory.mktemp("vision"), "llava").folder
    pictures = checkpoints.drawings(5)
    prompts = [
        {
            "prompt": "<image>" * len(its) + "What?",
            **({"multi_modal_data": {"image": [pictures[i] for i in its]}} if its else {}),
        }
        for its in PICTURES
    ]
    # Room for two pictures: others are encoded anew.
    options = {
        "model": str(folder),
        "max_model_len": 192,
        "num_kv_blocks": 60,
        "encoder_cache_memory": "8KiB",
    }
    return options, prompts


@pytest.fixture(scope="module")
def encoder_decoder(tmp_path_factory) -> tuple[dict[str, Any], list[Any]]:
    size = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_layers": 2,
        "decoder_layers": 2,
    }
    size |= {
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "max_position_embeddings": 64,
        "vocab_size": 272,
        "d_model": 32,
    }
    tokens = {
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    }
    model = BartForConditionalGeneration(BartConfig(**size, **tokens)).eval()
    randomize(model)
    folder = make_checkpoint(tmp_path_factory.mktemp("bart"), model)
    return {"model": str(folder), "num_kv_blocks": 60}, [
        {"prompt_token_ids": [5 + i, 40 + 2 * i, 9, *range(20, 24 + i)]} for i in range(10)
    ]


def cut_and_swapped(
    folder: Path, model: Any, num_kv_blocks: int
) -> tuple[dict[str, Any], list[Any]]:
    """Prompts in chunks, and requests that make room for each other."""
    randomize(model.eval())
    tight = {
        "block_size": 4,
        "num_kv_blocks": num_kv_blocks,
        "max_num_batched_tokens": 24,
        "preemption_mode": "swap",
    }
    prompts = [
        {"prompt_token_ids": [(i + 3) * k % 250 + 5 for k in range(1, 4 + 5 * i)]} for i in range(8)
    ]
    return {
        "model": str(make_checkpoint(folder, model)),
        "max_model_len": 64,
        "swap_memory": "4MiB",
        **tight,
    }, prompts


@pytest.fixture(scope="module")
def windows(tmp_path_factory) -> tuple[dict[str, Any], list[Any]]:
    fields = decoder_families.VARIANTS["Gemma3ForCausalLM"]["two rotary embeddings"]
    model = decoder_families.make_model("Gemma3ForCausalLM", {**fields, "vocab_size": 272})
    return cut_and_swapped(tmp_path_factory.mktemp("gemma"), model, 80)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> tuple[dict[str, Any], list[Any]]:
    return cut_and_swapped(
        tmp_path_factory.mktemp("mixtral"), moe_families.make("mixtral", "2 of 4"), 24
    )


@pytest.fixture(scope="module")
def fallback(tmp_path_factory) -> tuple[dict[str, Any], list[Any]]:
    """A family that transformers computes."""
    fields = {
        **decoder_families.LLAMA_LIKE,
        "vocab_size": 272,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "dtype": "float32",
    }
    options, prompts = cut_and_swapped(
        tmp_path_factory.mktemp("stablelm"), StableLmForCausalLM(StableLmConfig(**fields)), 24
    )
    return {**options, "model_impl": "transformers"}, prompts


def run(
    engine: LLMEngine, prompts: list[Any], params: Any, kill: int | None = None
) -> dict[str, Any]:
    """Results by request. `kill`: the engine that dies after a first output, or, for pooling,
    before."""
    pools = isinstance(params, PoolingParams)
    prepare = engine.processor
    made = (
        prepare.pooling.prepare_batch(
            list(map(str, range(len(prompts)))), prompts, [params] * len(prompts)
        )
        if pools
        else [prepare.prepare(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    )
    engine.submit_batch(made)
    found: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        if kill is not None and (pools or found):
            state = engine.client.engines[kill]
            assert state.num_requests > 0
            os.kill(state.pid, signal.SIGKILL)
            kill = None
        for output in engine.step():
            found[output.request_id] = output
    assert all(one.error is None for one in found.values())
    if pools:
        return {name: one.outputs.data.tolist() for name, one in found.items()}
    return {name: [(c.token_ids, c.text) for c in one.outputs] for name, one in found.items()}


AT_NIGHT = [
    pytest.param(family, marks=pytest.mark.nightly) for family in ("windows", "mixture", "fallback")
]
"""Their requests are moved as any text's."""


@pytest.mark.parametrize("family", ["vision", "encoder_decoder", *AT_NIGHT])
def test_what_generates(request, family):
    options, prompts = request.getfixturevalue(family)
    with LLMEngine(VllmConfig.make(**OPTIONS, **options)) as lone:
        expected = run(lone, prompts, PARAMS)
    with LLMEngine(VllmConfig.make(**OPTIONS, **options, data_parallel_size=2)) as engine:
        assert run(engine, prompts, PARAMS) == expected
        assert run(engine, prompts, PARAMS, kill=0) == expected
        # The dead engine's data is sent to the other one.
        assert run(engine, prompts, PARAMS) == expected
        assert [one.status for one in engine.client.engines] == ["dead", "ready"]


@pytest.mark.parametrize(
    "memory", ["12KiB", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("0", "1GiB"))]
)
def test_media_that_comes_again(vision, memory):
    """With room for none of the pictures, for one, and for all: in the front, and in each
    engine."""
    options, prompts = vision
    with LLMEngine(VllmConfig.make(**OPTIONS, **options)) as lone:
        expected = run(lone, prompts, PARAMS)
    with LLMEngine(
        VllmConfig.make(
            **OPTIONS,
            **options,
            data_parallel_size=2,
            feature_cache_memory=memory,
            restart_engine=1,
        )
    ) as engine:
        client = engine.client
        for kill in (None, 1, None):
            assert run(engine, prompts, PARAMS, kill) == expected
            assert set(client._held._data) == set(client.features.held_keys(9))
        assert len(client.features.held_keys(9)) == {"0": 0, "12KiB": 1, "1GiB": 5}[memory]
    assert not client._held._data


def test_media_that_an_engine_has_lost_is_sent_again(vision, monkeypatch):
    options, prompts = vision
    # One item at a time: with two prompts on their way, an item could be lost twice.
    with LLMEngine(VllmConfig.make(**OPTIONS, **options)) as lone:
        expected = [run(lone, [one], PARAMS) for one in prompts]
    with LLMEngine(VllmConfig.make(**OPTIONS, **options, data_parallel_size=2)) as engine:
        assert [run(engine, [one], PARAMS) for one in prompts] == expected
        first, second = (one.client for one in engine.client._engines)
        assert first.features.held_keys(9) != second.features.held_keys(9)
        # The second engine is thought to hold what the first does, and gets the requests.
        first.features, second.features = second.features, first.features
        engine.client._engines[0].num_tokens += 10**6
        again = []
        send_again = engine.client._send_again
        monkeypatch.setattr(
            engine.client, "_send_again", lambda *its: (again.append(its), send_again(*its))
        )
        assert [run(engine, [one], PARAMS) for one in prompts] == expected
        assert again


def test_what_is_pooled():
    options = {**OPTIONS, "model": "tiny", "runner": "pooling"}
    prompts = [f"A text of some length{', and more' * (i % 4)} {i}" for i in range(24)]
    params = PoolingParams(task="embed")
    with LLMEngine(VllmConfig.make(**options)) as lone:
        expected = run(lone, prompts, params)
    with LLM(config=VllmConfig.make(**options, data_parallel_size=2)) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        assert run(llm.engine, prompts, params) == expected
        assert run(llm.engine, prompts, params, kill=0) == expected
    assert torch.allclose(
        torch.tensor([one.outputs.embedding for one in outputs]),
        torch.tensor([expected[str(i)] for i in range(24)]),
        atol=0,
    )
