"""Grammars through the whole engine: several sequences, preemption, chunks, company, streams, and
core's other parameters."""

from __future__ import annotations

import asyncio
import json
import re

import jsonschema
import pytest
from schemas import SCHEMAS
from toolkit_lm import LLM, AsyncLLM, RequestOutputKind, SamplingParams, VllmConfig
from toolkit_lm.plugin import hookimpl

# 30 blocks of 4 tokens do not hold all sequences, and a step computes at most 12 tokens: it
# preempts, and prefills in chunks.
TIGHT = {
    "num_kv_blocks": 30,
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 12,
}
PROMPTS = [
    "Once upon a time there was a little cat that lived near the sea and was very happy",
    "It",
    "One day the king",
    "x y z " * 6,
] * 2
ASKED = [
    {"json": SCHEMAS["nested"]},
    {"regex": "[a-z ]{20,40}"},
    {"choice": ["a long choice of several words", "another one"]},
    {"json": SCHEMAS["object"]},
    None,
    {"grammar": 'root ::= ("ab" | "cd "){10,20}'},
    {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 8}},
    {"json": SCHEMAS["recursive"]},
]


class Preemptions:
    """A plugin that counts."""

    name = "preemptions"

    def __init__(self):
        self.count = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += getattr(event, "kind", None) == "preempted"


def params(asked, **more):
    return SamplingParams(
        **{"max_tokens": 40, "seed": 5, "structured_outputs": asked, "logprobs": 2, **more}
    )


def run(llm, temperature=1.2):
    outputs = llm.generate(
        PROMPTS, [params(one, temperature=temperature) for one in ASKED], use_tqdm=False
    )
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0] for output in outputs]


def same(found, expected):
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.text for one in found] == [one.text for one in expected]
    assert [one.finish_reason for one in found] == [one.finish_reason for one in expected]


@pytest.fixture(scope="module")
def alone(llm):
    return [
        llm.generate(prompt, params(asked, temperature=1.2), use_tqdm=False)[0].outputs[0]
        for prompt, asked in zip(PROMPTS, ASKED, strict=True)
    ]


def test_the_batch_changes_nothing(llm, alone):
    same(run(llm), alone)


def test_preemption_and_chunks_change_nothing(alone):
    counter = Preemptions()
    with LLM("tiny", dtype="float32", plugins=[counter], **TIGHT) as llm:
        same(run(llm), alone)
    assert counter.count > 0


def test_cached_prefixes_change_nothing(alone):
    with LLM("tiny", dtype="float32", enable_prefix_caching=True, block_size=4) as llm:
        run(llm)
        same(run(llm), alone)


def test_an_engine_process_changes_nothing(alone):
    async def body():
        async with AsyncLLM(
            VllmConfig.make(model="tiny", dtype="float32", engine_process=True)
        ) as llm:

            async def ask(index):
                given = params(ASKED[index], temperature=1.2)
                return [output async for output in llm.generate(PROMPTS[index], given)][-1].outputs[
                    0
                ]

            return await asyncio.gather(*map(ask, range(len(PROMPTS))))

    same(asyncio.run(body()), alone)


def test_a_stream_is_the_whole(alone):
    async def body():
        async with AsyncLLM(VllmConfig.make(model="tiny", dtype="float32")) as llm:

            async def ask(index):
                given = params(ASKED[index], temperature=1.2, output_kind=RequestOutputKind.DELTA)
                return [output.outputs[0] async for output in llm.generate(PROMPTS[index], given)]

            return await asyncio.gather(*map(ask, range(len(PROMPTS))))

    streams = asyncio.run(body())
    assert ["".join(piece.text for piece in stream) for stream in streams] == [
        one.text for one in alone
    ]
    assert [[token for piece in stream for token in piece.token_ids] for stream in streams] == [
        one.token_ids for one in alone
    ]


def test_several_sequences(llm):
    [output] = llm.generate(
        "It is", params({"regex": "[a-z]{8}"}, n=4, temperature=2.0), use_tqdm=False
    )
    texts = [one.text for one in output.outputs]
    assert len(set(texts)) == 4 and all(re.fullmatch("[a-z]{8}", text) for text in texts)
    [best] = llm.generate(
        "It is",
        params({"regex": "[a-z]{8}"}, n=2, best_of=4, temperature=2.0, logprobs=None),
        use_tqdm=False,
    )
    assert {one.text for one in best.outputs} <= set(texts)
    assert best.outputs[0].score >= best.outputs[1].score


def test_log_probabilities_are_the_models(llm):
    [output] = llm.generate(
        "Once upon", params({"choice": ["qqq"]}, temperature=0.0, logprobs=1), use_tqdm=False
    )
    [plain] = llm.generate(
        "Once upon", params(None, temperature=0.0, logprobs=1, max_tokens=1), use_tqdm=False
    )
    first = output.outputs[0].logprobs[0]
    likeliest = plain.outputs[0].token_ids[0]
    drawn = output.outputs[0].token_ids[0]
    assert first[drawn].rank > 1 and first[likeliest].rank == 1
    assert first[likeliest].logprob == pytest.approx(
        plain.outputs[0].logprobs[0][likeliest].logprob
    )


def test_stop_texts_end_it(generate):
    [one] = generate({"regex": "ab{3}c{3}"}, stop=["c"])
    assert (one.text, one.finish_reason, one.stop_reason) == ("abbb", "stop", "c")


def test_max_tokens_cut_it(generate):
    [one] = generate({"regex": "a{50}"}, max_tokens=3)
    assert one.finish_reason == "length" and set(one.text) == {"a"}


def test_min_tokens_hold_the_end_back(generate):
    [one] = generate({"regex": "[a-z]*"}, min_tokens=20, max_tokens=40, temperature=3.0)
    assert len(one.token_ids) >= 20
    [ended] = generate({"choice": ["yes"]}, min_tokens=20, max_tokens=40)
    assert (ended.text, ended.finish_reason) == ("yes", "stop"), (
        "the grammar's end has the last word"
    )


def test_after_the_end_nothing_comes(generate):
    [one] = generate({"choice": ["yes"]}, ignore_eos=True, max_tokens=12)
    assert (one.text, one.finish_reason, len(one.token_ids)) == ("yes", "length", 12)


def test_filters_and_penalties_stay_inside(generate):
    given = {
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1.0,
    }
    extra = {
        "typical_p": 0.9,
        "xtc_probability": 0.5,
        "dry_multiplier": 2.0,
        "no_repeat_ngram_size": 4,
        "mirostat_tau": 3.0,
    }
    for one in generate({"json": SCHEMAS["object"]}, n=8, extra_args=extra, **given):
        assert one.text.lstrip().startswith("{")
        if one.finish_reason == "stop":
            jsonschema.validate(json.loads(one.text), SCHEMAS["object"])


def test_what_leaves_no_token_says_so(llm):
    [token] = llm.engine.renderer.render_prompt("a", add_special_tokens=False).token_ids
    output = llm.generate("x", params({"regex": "b"}, allowed_token_ids=[token]), use_tqdm=False)[0]
    assert "leave no token" in output.error and "structured_outputs" in output.error
    assert llm.generate("x", params({"choice": ["b"]}), use_tqdm=False)[0].outputs[0].text == "b"


def test_chats(llm):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = {"regex": r"The capital of [A-Z][a-z]+ is [A-Z][a-z]+\."}
    [output] = llm.chat(question, params(asked, temperature=0.0), use_tqdm=False)
    assert output.outputs[0].text == "The capital of France is Paris."


class OwnBackend:
    name = "own_backend"

    @hookimpl(optionalhook=True)
    def toolkit_register_structured_output(self, backends):
        backends.add("own", "toolkit_lm_llguidance.backend:LLGuidanceReader")


def test_a_backend_of_a_plugin_that_is_an_object():
    """The plugins of the engine are asked, and not loaded once more."""
    options = {"plugins": [OwnBackend()], "plugin_option": ["structured_output.backend=own"]}
    with LLM("tiny", dtype="float32", **options) as llm:
        [output] = llm.generate(
            "a",
            SamplingParams(max_tokens=8, structured_outputs={"choice": ["one", "two"]}),
            use_tqdm=False,
        )
        assert output.outputs[0].text in ("one", "two")
