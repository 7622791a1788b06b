"""Requests that the documentation of llama.cpp's server describes: each option, field and route is
one, asked of ours."""

from __future__ import annotations

import json
import math

import pytest
from documented_requests import Documented, fault_of, share_of

pytestmark = pytest.mark.anyio

TEXT = "The capital of France is"
USER = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
DOCUMENTS = ["hi", "it is a bear", "The giant panda is a bear species endemic to China."]
ANY = {"type": "object", "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": ANY}}


def completed(holds=lambda made: True, **options) -> Documented:
    """POST /completion with these options. `holds`: of the answer, beside its number of tokens."""
    body = {"prompt": TEXT, "n_predict": 6, "temperature": 0, **options}
    return Documented("POST /completion", body, holds)


def streamed(holds, **options) -> Documented:
    return completed(holds, stream=True, ignore_eos=True, **options)


def shown(name: str, value, *, at=None) -> Documented:
    """POST /completion with an option that its generation_settings show."""
    return completed(
        lambda made: made["generation_settings"][name] == (value if at is None else at),
        **{name: value},
    )


def embedded(holds, **body) -> Documented:
    return Documented("POST /embedding", body, holds, engine="embed")


def only(made) -> list[float]:
    """The vector of an answer to one prompt."""
    [one] = made
    [vector] = one["embedding"]
    assert one["index"] == 0
    return vector


def ranked(made) -> bool:
    scores = [one["relevance_score"] for one in made["results"]]
    return scores == sorted(scores, reverse=True) and len(scores) == 3


def chat(holds, **more) -> Documented:
    body = {"messages": USER, "max_tokens": 32, "temperature": 0, **more}
    return Documented("POST /v1/chat/completions", body, holds)


def fields(*names: str):
    return lambda made: all(name in made for name in names)


OPTIONS = {
    "prompt: a text": completed(lambda made: made["prompt"] == TEXT and made["content"]),
    "prompt: tokens": completed(lambda made: made["content"], prompt=[12, 34, 56]),
    "prompt: tokens and texts": completed(
        lambda made: made["content"], prompt=[12, 34, "string", 56, 78]
    ),
    "prompt: an object": completed(
        lambda made: made["prompt"] == TEXT, prompt={"prompt_string": TEXT}
    ),
    "prompts: texts": completed(lambda made: len(made) == 2, prompt=["string1", "string2"]),
    "prompts: of all types": completed(
        lambda made: [one["index"] for one in made] == [0, 1, 2, 3],
        prompt=[[12, 34, "string", 56], [12, 34], "string", {"prompt_string": "string"}],
    ),
    "temperature": shown("temperature", 0.5),
    "dynatemp_range": completed(dynatemp_range=0.5, temperature=1.0),
    "top_k": shown("top_k", 7),
    "top_p": shown("top_p", 0.5),
    "min_p": shown("min_p", 0.25),
    "n_predict": completed(
        lambda made: made["tokens_predicted"] == 3, n_predict=3, ignore_eos=True
    ),
    "n_predict: 0": completed(
        lambda made: made["content"] == "" and made["tokens_evaluated"] > 0, n_predict=0
    ),
    "n_predict: -1": completed(lambda made: made["stop"], n_predict=-1),
    "n_indent": completed(
        lambda made: all(line.startswith("    ") for line in made["content"].split("\n")[1:]),
        n_indent=4,
        grammar='root ::= "a\\n" " "* "b"',
    ),
    "n_keep": completed(n_keep=-1),
    "n_cmpl": completed(lambda made: len(made) == 3, n_cmpl=3),
    "n_cmpl of two prompts": completed(
        lambda made: len(made) == 4, n_cmpl=2, prompt=["string1", "string2"]
    ),
    "n_cache_reuse": completed(n_cache_reuse=16),
    "stop": completed(lambda made: made["stop_type"] == "limit", stop=["\0\0"], ignore_eos=True),
    "typical_p": shown("typical_p", 0.9),
    "repeat_penalty": shown("repeat_penalty", 1.5),
    "repeat_last_n: all": completed(repeat_last_n=-1, repeat_penalty=1.5),
    "repeat_last_n: a window": completed(repeat_last_n=64, repeat_penalty=1.5),
    "presence_penalty": shown("presence_penalty", 0.5),
    "frequency_penalty": shown("frequency_penalty", 0.5),
    "dry_multiplier": shown("dry_multiplier", 0.8),
    "dry_base": shown("dry_base", 2.0),
    "dry_allowed_length": shown("dry_allowed_length", 3),
    "dry_penalty_last_n: all": completed(dry_multiplier=0.8, dry_penalty_last_n=-1),
    "dry_penalty_last_n: a window": completed(dry_multiplier=0.8, dry_penalty_last_n=64),
    "dry_sequence_breakers": completed(dry_multiplier=0.8, dry_sequence_breakers=["\n", ":"]),
    "xtc_probability": shown("xtc_probability", 0.5),
    "xtc_threshold": shown("xtc_threshold", 0.2),
    "mirostat: 1": completed(mirostat=1, temperature=1.0),
    "mirostat: 2": completed(mirostat=2, temperature=1.0),
    "mirostat_tau": completed(mirostat=2, mirostat_tau=3.0, temperature=1.0),
    "mirostat_eta": completed(mirostat=2, mirostat_eta=0.2, temperature=1.0),
    "grammar": completed(
        lambda made: made["content"] in ("yes", "no"), grammar='root ::= "yes" | "no"'
    ),
    "json_schema": completed(
        lambda made: type(json.loads(made["content"])["ok"]) is bool,
        json_schema=SCHEMA,
        n_predict=32,
    ),
    "json_schema: items": completed(
        lambda made: len(json.loads(made["content"])) == 2,
        json_schema={
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "minItems": 2,
            "maxItems": 2,
        },
        n_predict=32,
    ),
    "seed": shown("seed", 42),
    "seed: -1": shown("seed", -1, at=2**32 - 1),
    "ignore_eos": shown("ignore_eos", True),
    "logit_bias: pairs": completed(
        lambda made: made["tokens"][0] == 77,
        logit_bias=[[77, 100.0]],
        n_predict=1,
        return_tokens=True,
    ),
    "logit_bias: false": completed(
        lambda made: made["generation_settings"]["logit_bias"][0]["token"] == 77,
        logit_bias=[[77, False]],
    ),
    "logit_bias: texts": completed(logit_bias=[["Hello, World!", -0.5]]),
    "logit_bias: an object": completed(logit_bias={"77": -0.5}),
    "n_probs": completed(
        lambda made: {len(one["top_logprobs"]) for one in made["completion_probabilities"]} == {3},
        n_probs=3,
    ),
    "min_keep": completed(min_keep=0),
    "t_max_predict_ms": completed(
        lambda made: made["tokens_predicted"] < 200,
        t_max_predict_ms=1,
        n_predict=200,
        ignore_eos=True,
        logit_bias=[["\n", 10.0]],
    ),
    "id_slot": completed(id_slot=-1),
    "cache_prompt": completed(cache_prompt=False),
    "return_tokens": completed(
        lambda made: len(made["tokens"]) == made["tokens_predicted"], return_tokens=True
    ),
    "return_tokens: false": completed(lambda made: made["tokens"] == []),
    "samplers": completed(
        lambda made: len({one["content"] for one in made}) > 1,
        samplers=["temperature"],
        temperature=2.0,
        top_k=1,
        n_cmpl=4,
    ),
    "timings_per_token": streamed(
        lambda events: all(event["timings"]["predicted_n"] > 0 for event in events),
        timings_per_token=True,
    ),
    "return_progress": streamed(
        lambda events: (
            {"total", "cache", "processed", "time_ms"} <= set(events[0]["prompt_progress"])
        ),
        return_progress=True,
    ),
    "sse_ping_interval": streamed(lambda events: events[-1]["stop"], sse_ping_interval=-1),
    "post_sampling_probs": completed(
        lambda made: made["completion_probabilities"][0]["top_probs"],
        n_probs=3,
        post_sampling_probs=True,
    ),
    "response_fields": completed(
        lambda made: set(made) == {"content", "generation_settings/n_predict"},
        response_fields=["content", "generation_settings/n_predict", "not/there"],
    ),
}
DEFAULTS = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "typical_p": 1.0,
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "n_indent": 0,
    "n_keep": 0,
    "n_cmpl": 1,
    "n_cache_reuse": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "ignore_eos": False,
    "logit_bias": [],
    "n_probs": 0,
    "min_keep": 0,
    "t_max_predict_ms": 0,
    "id_slot": -1,
    "cache_prompt": True,
    "return_tokens": False,
    "timings_per_token": False,
    "return_progress": False,
    "post_sampling_probs": False,
    "stop": [],
    "stream": False,
    "seed": -1,
}
"""What the documentation gives as defaults: clients send them."""
OPTIONS |= {
    f"{name}: the default": completed(lambda made: made["content"], **{name: value})
    for name, value in DEFAULTS.items()
}
ANSWERS = {
    "stream: events until the last": streamed(
        lambda events: all(
            not event["stop"] and event["content"] and event["tokens"] for event in events[:-1]
        )
    ),
    "stream: the last event": streamed(
        lambda events: events[-1]["stop"] and events[-1]["stop_type"] == "limit"
    ),
    "stream: probabilities": streamed(
        lambda events: events[0]["completion_probabilities"][0]["top_logprobs"], n_probs=2
    ),
    "completion_probabilities: one a token": completed(
        lambda made: len(made["completion_probabilities"]) == made["tokens_predicted"], n_probs=1
    ),
    "completion_probabilities: fields": completed(
        lambda made: (
            {"id", "logprob", "token", "bytes", "top_logprobs"}
            == set(made["completion_probabilities"][0])
        ),
        n_probs=1,
    ),
    "completion_probabilities: top_logprobs": completed(
        lambda made: (
            {"id", "logprob", "token", "bytes"}
            == set(made["completion_probabilities"][0]["top_logprobs"][0])
        ),
        n_probs=1,
    ),
    "content": completed(lambda made: isinstance(made["content"], str)),
    "stop": completed(lambda made: made["stop"] is True),
    "generation_settings": completed(
        lambda made: (
            made["generation_settings"]["n_predict"] == 6
            and "prompt" not in made["generation_settings"]
        )
    ),
    "model": completed(lambda made: made["model"] == "tiny"),
    "prompt": completed(lambda made: made["prompt"] == TEXT),
    "stop_type: limit": completed(lambda made: made["stop_type"] == "limit", ignore_eos=True),
    "stop_type: eos": completed(
        lambda made: made["stop_type"] == "eos", grammar='root ::= "a"', n_predict=8
    ),
    "stop_type: word": completed(
        lambda made: (made["stop_type"], made["stopping_word"]) == ("word", "b"),
        grammar='root ::= "abc"',
        stop=["b"],
    ),
    "stop: the word is not in the content": completed(
        lambda made: made["content"] == "a", grammar='root ::= "abc"', stop=["b"]
    ),
    "stopping_word: none": completed(lambda made: made["stopping_word"] == "", ignore_eos=True),
    "timings": completed(
        lambda made: (
            made["timings"]["predicted_n"] == 6
            and {
                "prompt_n",
                "prompt_ms",
                "prompt_per_second",
                "predicted_ms",
                "predicted_per_second",
            }
            <= set(made["timings"])
        ),
        ignore_eos=True,
    ),
    "tokens_cached": completed(lambda made: made["tokens_cached"] >= 0),
    "tokens_evaluated": completed(lambda made: made["tokens_evaluated"] == 7),
    "truncated": completed(lambda made: made["truncated"] is False),
}
ROUTES = {
    "GET /health": Documented("GET /health", None, lambda made: made["status"] == "ok"),
    "POST /tokenize": Documented(
        "POST /tokenize",
        {"content": "Hello world"},
        lambda made: all(type(token) is int for token in made["tokens"]),
    ),
    "POST /tokenize: add_special": Documented(
        "POST /tokenize", {"content": "Hello", "add_special": True}, fields("tokens")
    ),
    "POST /tokenize: parse_special": Documented(
        "POST /tokenize",
        {"content": "<|im_end|>", "parse_special": True},
        lambda made: len(made["tokens"]) == 1,
    ),
    "POST /tokenize: parse_special false": Documented(
        "POST /tokenize",
        {"content": "<|im_end|>", "parse_special": False},
        lambda made: len(made["tokens"]) > 1,
    ),
    "POST /tokenize: with_pieces": Documented(
        "POST /tokenize",
        {"content": "Hello", "with_pieces": True},
        lambda made: "".join(one["piece"] for one in made["tokens"]) == "Hello",
    ),
    "POST /tokenize: pieces of bytes": Documented(
        "POST /tokenize",
        {"content": "\u5abd", "with_pieces": True},
        lambda made: any(isinstance(one["piece"], list) for one in made["tokens"]),
    ),
    "POST /detokenize": Documented(
        "POST /detokenize", {"tokens": [72, 73]}, lambda made: isinstance(made["content"], str)
    ),
    "POST /apply-template": Documented(
        "POST /apply-template", {"messages": USER}, lambda made: "Hello" in made["prompt"]
    ),
    "POST /embedding": embedded(
        lambda made: math.isclose(math.hypot(*only(made)), 1, rel_tol=1e-4), content=TEXT
    ),
    "POST /embedding: several": embedded(
        lambda made: [one["index"] for one in made] == [0, 1], content=[TEXT, "a"]
    ),
    "POST /embedding: tokens": embedded(
        lambda made: [one["index"] for one in made] == [0, 1, 2],
        content=[[12, 34, 56], "string", [12, "string"]],
    ),
    "POST /embedding: no norm": embedded(
        lambda made: not math.isclose(math.hypot(*only(made)), 1, rel_tol=1e-2),
        content=TEXT,
        embd_normalize=-1,
    ),
    "POST /embedding: the greatest number": embedded(
        lambda made: math.isclose(max(map(abs, only(made))), 32760, rel_tol=1e-4),
        content=TEXT,
        embd_normalize=0,
    ),
    "POST /embedding: taxicab": embedded(
        lambda made: math.isclose(sum(map(abs, only(made))), 1, rel_tol=1e-4),
        content=TEXT,
        embd_normalize=1,
    ),
    "POST /embedding: Euclidean": embedded(
        lambda made: math.isclose(math.hypot(*only(made)), 1, rel_tol=1e-4),
        content=TEXT,
        embd_normalize=2,
    ),
    "POST /embedding: a higher norm": embedded(
        lambda made: math.isclose(sum(abs(one) ** 3 for one in only(made)), 1, rel_tol=1e-4),
        content=TEXT,
        embd_normalize=3,
    ),
    "POST /embeddings": Documented(
        "POST /embeddings",
        {"input": [TEXT, "a"]},
        lambda made: [len(one["embedding"]) for one in made] == [1, 1],
        engine="embed",
    ),
    **{
        f"POST {path}": Documented(
            f"POST {path}",
            {"query": "What is panda?", "documents": DOCUMENTS},
            ranked,
            engine="rank",
        )
        for path in ("/reranking", "/rerank", "/v1/rerank", "/v1/reranking")
    },
    "POST /v1/rerank: top_n": Documented(
        "POST /v1/rerank",
        {"query": "What is panda?", "top_n": 2, "documents": DOCUMENTS},
        lambda made: len(made["results"]) == 2,
        engine="rank",
    ),
    "GET /props": Documented(
        "GET /props",
        None,
        fields(
            "default_generation_settings",
            "total_slots",
            "model_path",
            "chat_template",
            "modalities",
            "build_info",
            "is_sleeping",
        ),
    ),
    "GET /props: settings": Documented(
        "GET /props",
        None,
        lambda made: (
            {"n_predict", "seed", "temperature", "top_k", "top_p", "min_p", "stop"}
            <= set(made["default_generation_settings"]["params"])
        ),
    ),
    "GET /props: modalities": Documented(
        "GET /props", None, lambda made: made["modalities"]["vision"] is False
    ),
    "GET /slots": Documented(
        "GET /slots",
        None,
        lambda made: (
            {"id", "id_task", "n_ctx", "speculative", "is_processing", "params"} <= set(made[0])
        ),
    ),
    "GET /slots?fail_on_no_slot=1": Documented("GET /slots?fail_on_no_slot=1", None, len),
    "POST /slots/0?action=erase": Documented(
        "POST /slots/0?action=erase", {}, lambda made: made["id_slot"] == 0
    ),
    "GET /v1/models": Documented(
        "GET /v1/models",
        None,
        lambda made: made["object"] == "list" and made["data"][0]["object"] == "model",
    ),
    "POST /v1/completions": Documented(
        "POST /v1/completions",
        {"prompt": "I believe the meaning of life is", "max_tokens": 8, "mirostat": 2},
        lambda made: made["choices"][0]["text"],
    ),
    "POST /v1/chat/completions": chat(lambda made: made["choices"][0]["message"]["content"]),
    "POST /v1/chat/completions: json_object": chat(
        lambda made: isinstance(json.loads(made["choices"][0]["message"]["content"]), dict),
        response_format={"type": "json_object", "schema": SCHEMA},
    ),
    "POST /v1/chat/completions: json_schema": chat(
        lambda made: json.loads(made["choices"][0]["message"]["content"])["ok"] in (True, False),
        response_format={"type": "json_schema", "schema": SCHEMA},
    ),
    "POST /v1/chat/completions: chat_template_kwargs": chat(
        lambda made: made["choices"], chat_template_kwargs={"enable_thinking": False}
    ),
    "POST /v1/chat/completions: reasoning_format": chat(
        lambda made: made["choices"], reasoning_format="auto"
    ),
    "POST /v1/chat/completions: tools": chat(
        lambda made: made["choices"], tools=[TOOL], parallel_tool_calls=True
    ),
    "POST /v1/chat/completions: timings": chat(
        lambda made: (
            {"cache_n", "prompt_n", "prompt_ms", "predicted_n", "predicted_ms"}
            <= set(made["timings"])
        ),
        timings_per_token=True,
    ),
    "POST /v1/embeddings": Documented(
        "POST /v1/embeddings",
        {"input": ["hello", "world"], "model": "tiny", "encoding_format": "float"},
        lambda made: [one["index"] for one in made["data"]] == [0, 1],
        engine="embed",
    ),
    "errors": Documented(
        "POST /completion",
        {"prompt": []},
        lambda made: (
            set(made["error"]) >= {"code", "message", "type"} and made["error"]["code"] == 400
        ),
        status=400,
    ),
    "errors: a context that is too small": Documented(
        "POST /completion",
        {"prompt": TEXT * 200},
        lambda made: made["error"]["type"] == "exceed_context_size_error",
        status=400,
    ),
    "POST /v1/responses": Documented(
        "POST /v1/responses",
        {"instructions": "You are a coding assistant.", "input": "Write a limerick"},
        lambda made: made["object"] == "response",
    ),
    "POST /v1/messages": Documented(
        "POST /v1/messages",
        {"model": "tiny", "max_tokens": 8, "system": "You help.", "messages": USER},
        lambda made: made["type"] == "message",
    ),
    "POST /v1/messages/count_tokens": Documented(
        "POST /v1/messages/count_tokens",
        {"model": "tiny", "messages": USER},
        lambda made: made["input_tokens"] > 0,
    ),
}
SHARED = {
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.5},
    "min_p": {"min_p": 0.25},
    "typical_p": {"typical_p": 0.9},
    "repeat_penalty": {"repeat_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "dry": {"dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3},
    "xtc": {"xtc_probability": 0.5, "xtc_threshold": 0.2},
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
    "seed": {"seed": 42},
    "ignore_eos": {"ignore_eos": True},
    "logit_bias": {"logit_bias": {"77": -0.5}},
    "stop": {"stop": ["\0\0"]},
    "n_predict": {"n_predict": 4},
    "cache_prompt": {"cache_prompt": False},
    "id_slot": {"id_slot": -1},
    "n_keep": {"n_keep": -1},
    "n_cache_reuse": {"n_cache_reuse": 16},
    "min_keep": {"min_keep": 0},
    "timings_per_token": {"timings_per_token": True},
}
"""Options of /completion that OpenAI's routes take too, as the documentation says."""
DOORS = {
    "/v1/chat/completions": {"messages": USER, "temperature": 1.0},
    "/v1/completions": {"prompt": TEXT, "temperature": 1.0},
}


def answered(made) -> bool:
    return made["usage"]["completion_tokens"] > 0 and len(made["choices"]) == 1


OF_OPENAI = {
    f"{path}: {name}": Documented(
        f"POST {path}",
        {**body, **options, **({} if "n_predict" in options else {"max_tokens": 6})},
        answered,
    )
    for path, body in DOORS.items()
    for name, options in SHARED.items()
}
CONSTRAINTS = {
    "grammar": ({"grammar": 'root ::= "yes" | "no"'}, {"yes", "no"}),
    "json_schema": ({"json_schema": {"enum": ["yes", "no"]}}, {'"yes"', '"no"'}),
}


def text_of(choice) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


OF_OPENAI |= {
    f"{path}: {name}": Documented(
        f"POST {path}",
        {**body, **options, "max_tokens": 16},
        lambda made, wanted=wanted: text_of(made["choices"][0]) in wanted,
    )
    for path, body in DOORS.items()
    for name, (options, wanted) in CONSTRAINTS.items()
}
OF_OPENAI |= {
    f"{path}: a stream": Documented(
        f"POST {path}",
        {**body, "max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}},
        lambda events: (
            events[-1]["usage"]["completion_tokens"] > 0
            and events[-2]["choices"][0]["finish_reason"] in ("length", "stop")
        ),
    )
    for path, body in DOORS.items()
}
OF_OPENAI |= {
    "/v1/chat/completions: logprobs": chat(
        lambda made: len(made["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 3,
        logprobs=True,
        top_logprobs=3,
    ),
    "/v1/completions: logprobs": Documented(
        "POST /v1/completions",
        {"prompt": TEXT, "max_tokens": 2, "logprobs": 3},
        lambda made: len(made["choices"][0]["logprobs"]["top_logprobs"][0]) == 3,
    ),
    "/v1/chat/completions: content parts": chat(
        answered, messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    ),
    "/v1/chat/completions: tool_choice required": chat(
        lambda made: made["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look",
        tools=[TOOL],
        tool_choice="required",
        max_tokens=128,
    ),
    "/v1/chat/completions: tool_choice none": chat(
        lambda made: not made["choices"][0]["message"].get("tool_calls"),
        tools=[TOOL],
        tool_choice="none",
    ),
}
CHECKS = {
    **OPTIONS,
    **{f"answer: {name}": one for name, one in ANSWERS.items()},
    **ROUTES,
    **OF_OPENAI,
}
NOT_HELD = {
    "repeat_last_n: a window": "Penalties cover the whole context: `repeat_last_n` is -1.",
    "dry_penalty_last_n: a window": "DRY covers the whole context: `dry_penalty_last_n` is -1.",
    "mirostat: 1": "`mirostat` is 0 or 2: its first version is not there.",
    "dynatemp_range": "`dynatemp_range` is refused: the temperature is one number.",
    "n_indent": "`n_indent` is ignored, and the header `x-ignored-fields` says so.",
    "t_max_predict_ms": "`t_max_predict_ms` is ignored in the same way: `timeout` ends an answer.",
    "samplers": "`samplers` is ignored in the same way: filters come in one order.",
    "post_sampling_probs": "`post_sampling_probs` is refused: probabilities are the model's own.",
    "GET /health": 'The status of `/health` is "ready", and not "ok".',
    "POST /tokenize: parse_special false": (
        "`parse_special: false` is refused: texts of special tokens are read as these."
    ),
    "POST /slots/0?action=erase": "No slot is erased, saved or restored (501).",
}


@pytest.mark.parametrize("name", CHECKS)
async def test_a_documented_request(serve, name):
    routes = ("llama_cpp", "anthropic")
    async with serve(CHECKS[name].engine, routes=routes) as client:
        fault = await fault_of(client, CHECKS[name])
    if name in NOT_HELD:
        assert fault is not None, "it holds now: take it off the list"
    else:
        assert fault is None, fault


def test_the_share_is_on_the_page():
    print(share_of("llama.cpp", CHECKS, NOT_HELD))
