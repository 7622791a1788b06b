"""`extra_tasks=["embed"]`: one engine generates and embeds with the same weights, in the same
batches."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, LLMEngine, PoolingParams, RequestOutput, SamplingParams, VllmConfig
from toolkit_lm.errors import RequestError

OPTIONS = {
    "device": "cpu",
    "num_kv_blocks": 128,
    "block_size": 4,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}
LOUD = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=272)
GENERATOR = torch.Generator().manual_seed(2)
PROMPTS = [
    torch.randint(3, 272, (length,), generator=GENERATOR).tolist()
    for length in (5, 60, 2, 33, 60, 21, 90)
]


def given(prompt: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt}


@pytest.fixture(scope="module")
def checkpoint(make_llama):
    return make_llama("beside")


@pytest.fixture(scope="module")
def states(checkpoint):
    with torch.inference_mode():
        return [
            checkpoint[1].model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS
        ]


def engine_of(checkpoint, watch, **options) -> LLMEngine:
    config = VllmConfig.make(
        model=str(checkpoint[0]), extra_tasks=["embed"], max_logprobs=272, **OPTIONS | options
    )
    return LLMEngine(config, plugins=[watch])


def submit_pooling(engine, request_id, prompt, params):
    [prepared] = engine.processor.pooling.prepare_batch([request_id], [given(prompt)], [params])
    engine.submit(prepared)


def run_mixed(engine, params=PoolingParams(task="embed")):
    """Both kinds of requests in flight; requests join while others run. By id, what each gave."""
    waiting = [
        (number, prompt, kind)
        for number, prompt in enumerate(PROMPTS)
        for kind in ("embed", "generate")
    ]
    done = {}
    mixed = 0
    while waiting or engine.has_unfinished_requests():
        for number, prompt, kind in waiting[:3]:
            if kind == "embed":
                submit_pooling(engine, f"embed-{number}", prompt, params)
            else:
                engine.add_request(f"generate-{number}", given(prompt), LOUD)
        del waiting[:3]
        outputs = engine.step()
        mixed += len({type(output) for output in outputs}) == 2
        done |= {output.request_id: output for output in outputs if output.finished}
    # Both kinds came out of one step.
    assert mixed
    return done


def check(done, states, assert_parity, model, pool):
    assert len(done) == 2 * len(PROMPTS)
    generated = [done[f"generate-{number}"] for number in range(len(PROMPTS))]
    assert all(
        isinstance(output, RequestOutput) and len(output.outputs[0].token_ids) == 30
        for output in generated
    )
    # Tokens and whole distributions, to which no pooling row may do anything.
    assert_parity(model, generated)
    for number, one in enumerate(states):
        expected = torch.nn.functional.normalize(pool(one), dim=0)
        np.testing.assert_allclose(done[f"embed-{number}"].outputs.data, expected, atol=2e-5)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_both_in_the_same_batches(checkpoint, states, watch, assert_parity, caching, overlap):
    with engine_of(checkpoint, watch, enable_prefix_caching=caching, overlap=overlap) as engine:
        assert engine.tasks == ("generate", "embed", "token_embed")
        for _ in range(2):
            done = run_mixed(engine)
            check(done, states, assert_parity, checkpoint[1], lambda one: one[-1])
        # Each kind finds what the other has computed.
        assert bool(done["embed-6"].num_cached_tokens) == caching
        assert bool(done["generate-6"].num_cached_tokens) == caching


@pytest.mark.parametrize("method", ["LAST", "MEAN"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption(checkpoint, states, watch, assert_parity, method, mode):
    """The pool is too small for all."""
    options = {
        "max_num_batched_tokens": 8,
        "num_kv_blocks": 36,
        "preemption_mode": mode,
        "swap_memory": "1MiB" if mode == "swap" else None,
        "pooling_type": method,
    }
    with engine_of(checkpoint, watch, **options) as engine:
        for _ in range(2):
            done = run_mixed(engine)
            check(
                done,
                states,
                assert_parity,
                checkpoint[1],
                (lambda one: one[-1]) if method == "LAST" else lambda one: one.mean(0),
            )
    assert watch.count("preempted")
    assert watch.last("num_used_blocks") == 0


def test_a_preempted_embedding_begins_anew(checkpoint, watch):
    """State that is lost with its row is computed again, and a mean does not sum it twice."""
    options = {
        "num_kv_blocks": 36,
        "max_num_batched_tokens": 8,
        "pooling_type": "MEAN",
        "normalize": False,
    }
    with engine_of(checkpoint, watch, enable_prefix_caching=True, **options) as engine:
        for number in range(6):
            engine.add_request(
                f"{number}", given(PROMPTS[number][:4]), LOUD.replace(max_tokens=40, logprobs=None)
            )
        for _ in range(2):
            engine.step()
        submit_pooling(engine, "mean", PROMPTS[6][:44], PoolingParams(task="embed"))
        done = {}
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step() if output.finished}
    assert any(
        getattr(event, "kind", None) == "preempted" and event.request_id == "mean"
        for event in watch.events
    )
    with torch.inference_mode():
        expected = checkpoint[1].model(torch.tensor([PROMPTS[6][:44]])).last_hidden_state[0].mean(0)
    np.testing.assert_allclose(done["mean"].outputs.data, expected, atol=2e-5)


def test_offline(checkpoint, states):
    with LLM(str(checkpoint[0]), extra_tasks=["embed"], **OPTIONS) as llm:
        (text,) = llm.generate(
            given(PROMPTS[1]), SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
        )
        assert len(text.outputs[0].token_ids) == 3
        (output,) = llm.embed(given(PROMPTS[1]), PoolingParams(normalize=False), use_tqdm=False)
        np.testing.assert_allclose(output.outputs.data, states[1][-1], atol=2e-5)
        assert llm.score("abc", ["abc", "xyz"], use_tqdm=False)[0].outputs.score == pytest.approx(
            1, abs=1e-5
        )
        with pytest.raises(
            RequestError,
            match=r"Supported: embed, token_embed\. Start the engine with convert='classify'",
        ):
            llm.classify(given(PROMPTS[1]))


def test_texts_are_read_as_by_a_pooling_engine(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint[0], tmp_path / "model")
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, "pooling_mode_lasttoken": True})
    )
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 64, "do_lower_case": True})
    )
    prompts = {"prompts": {"query": "Q: ", "document": "D: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with (
        LLM(str(folder), **OPTIONS) as pooling,
        LLM(str(folder), runner="generate", extra_tasks=["embed"], **OPTIONS) as both,
    ):
        for names in ({}, {"prompt_name": "query"}, {"prompt_name": "document"}):
            (one,), (other,) = (
                llm.embed("A Cat", use_tqdm=False, **names) for llm in (pooling, both)
            )
            assert one.prompt_token_ids == other.prompt_token_ids
            np.testing.assert_allclose(one.outputs.data, other.outputs.data, atol=2e-5)
        first, second = (
            llm.score("A Cat", "a dog", use_tqdm=False)[0].outputs.score for llm in (pooling, both)
        )
        assert first == pytest.approx(second, abs=1e-5)
        (text,) = both.generate(
            "A Cat", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False
        )
        assert text.prompt_token_ids == both.engine.renderer.render_prompt("A Cat").token_ids
