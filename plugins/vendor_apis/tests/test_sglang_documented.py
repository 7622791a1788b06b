"""Requests that SGLang documents of its native API: each argument, sampling parameter and route is
one, asked of ours."""

from __future__ import annotations

import json

import pytest
from documented_requests import Documented, fault_of, share_of

pytestmark = pytest.mark.anyio

TEXT = "The capital of France is"
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
)
USER = [{"role": "user", "content": "List 3 countries and their capitals."}]


def generated(holds=lambda made: True, params=None, **more) -> Documented:
    """POST /generate. `params`: sampling parameters. `more`: of the body."""
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, **(params or {})}
    body = {"text": TEXT, "sampling_params": sampling, **more}
    if "input_ids" in more:
        del body["text"]
    return Documented("POST /generate", body, holds)


def sampled(holds=lambda made: True, **params) -> Documented:
    return generated(holds, params)


def taken(made) -> bool:
    return made["meta_info"]["completion_tokens"] == 6


def streamed(holds, **more) -> Documented:
    return generated(holds, stream=True, **more)


def scored(holds, **more) -> Documented:
    return generated(lambda made: holds(made["meta_info"]), return_logprob=True, **more)


def structured(holds, **params) -> Documented:
    return sampled(lambda made: holds(made["text"]), ignore_eos=False, max_new_tokens=32, **params)


ARGUMENTS = {
    "text": generated(lambda made: isinstance(made["text"], str)),
    "text: alone": Documented(
        "POST /generate", {"text": TEXT}, lambda made: made["meta_info"]["completion_tokens"] <= 128
    ),
    "text: several": generated(lambda made: len(made) == 2, text=[TEXT, "a"]),
    "input_ids": generated(taken, input_ids=[5, 6, 7]),
    "input_ids: several": generated(lambda made: len(made) == 2, input_ids=[[5, 6], [7]]),
    "input_embeds": generated(taken, text=None, input_embeds=[[0.0] * 8]),
    "sampling_params: a list": Documented(
        "POST /generate",
        {"text": [TEXT, "a"], "sampling_params": [{"max_new_tokens": 2}] * 2},
        lambda made: len(made) == 2,
    ),
    "rid": generated(lambda made: made["meta_info"]["id"] == "mine", rid="mine"),
    "rid: several": generated(
        lambda made: [one["meta_info"]["id"] for one in made] == ["x", "y"],
        text=[TEXT, "a"],
        rid=["x", "y"],
    ),
    "return_logprob": scored(lambda info: len(info["output_token_logprobs"]) == 6),
    "return_logprob: a log probability, an id, a text": scored(
        lambda info: (
            [type(one) for one in info["output_token_logprobs"][0]] == [float, int, type(None)]
        )
    ),
    "return_logprob: a list": Documented(
        "POST /generate",
        {"text": [TEXT, "a"], "return_logprob": [True, True]},
        lambda made: all("output_token_logprobs" in one["meta_info"] for one in made),
    ),
    "return_logprob: false": generated(
        lambda made: "output_token_logprobs" not in made["meta_info"], return_logprob=False
    ),
    "logprob_start_len: -1": scored(
        lambda info: info["input_token_logprobs"] == [], logprob_start_len=-1
    ),
    "logprob_start_len: 0": scored(
        lambda info: len(info["input_token_logprobs"]) == info["prompt_tokens"],
        logprob_start_len=0,
    ),
    "logprob_start_len: within the prompt": scored(
        lambda info: len(info["input_token_logprobs"]) == info["prompt_tokens"] - 2,
        logprob_start_len=2,
    ),
    "top_logprobs_num": scored(
        lambda info: [len(one) for one in info["output_top_logprobs"]] == [3] * 6,
        top_logprobs_num=3,
    ),
    "top_logprobs_num: of the prompt": scored(
        lambda info: (
            info["input_top_logprobs"][0] is None and len(info["input_top_logprobs"][1]) == 3
        ),
        top_logprobs_num=3,
        logprob_start_len=0,
    ),
    "token_ids_logprob": scored(
        lambda info: (
            [[one[1] for one in row] for row in info["output_token_ids_logprobs"]] == [[10, 20]] * 6
        ),
        token_ids_logprob=[10, 20],
    ),
    "return_text_in_logprobs": scored(
        lambda info: all(isinstance(one[2], str) for one in info["output_token_logprobs"]),
        return_text_in_logprobs=True,
    ),
    "stream": streamed(lambda events: events[-1]["meta_info"]["finish_reason"]["type"] == "length"),
    "stream: the text so far": streamed(
        lambda events: all(events[-1]["text"].startswith(event["text"]) for event in events)
    ),
    "stream: no reason before the end": streamed(
        lambda events: not any(event["meta_info"]["finish_reason"] for event in events[:-1])
    ),
    "stream: several": streamed(
        lambda events: {event["index"] for event in events} == {0, 1}, text=[TEXT, "a"]
    ),
    "stream: log probabilities": streamed(
        lambda events: len(events[-1]["meta_info"]["output_token_logprobs"]) == 6,
        return_logprob=True,
    ),
}
META = {
    "meta_info: id": generated(lambda made: isinstance(made["meta_info"]["id"], str)),
    "meta_info: finish_reason": generated(
        lambda made: made["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    ),
    "meta_info: prompt_tokens": generated(lambda made: made["meta_info"]["prompt_tokens"] == 7),
    "meta_info: completion_tokens": generated(taken),
    "meta_info: cached_tokens": generated(lambda made: made["meta_info"]["cached_tokens"] >= 0),
    "meta_info: e2e_latency": generated(lambda made: made["meta_info"]["e2e_latency"] > 0),
    "meta_info: weight_version": generated(
        lambda made: made["meta_info"]["weight_version"] == "default"
    ),
    "output_ids": generated(lambda made: len(made["output_ids"]) == 6),
}
PARAMETERS = {
    "max_new_tokens": sampled(
        lambda made: made["meta_info"]["completion_tokens"] == 3, max_new_tokens=3
    ),
    "max_new_tokens: 0": sampled(lambda made: made["text"] == "", max_new_tokens=0),
    "stop": structured(lambda text: text == "a", regex="abc", stop="b"),
    "stop: a list": structured(lambda text: text == "a", regex="abc", stop=["b", "c"]),
    "stop: what matched": sampled(
        lambda made: made["meta_info"]["finish_reason"] == {"type": "stop", "matched": "b"},
        regex="abc",
        stop="b",
    ),
    "stop_token_ids": sampled(
        lambda made: made["meta_info"]["finish_reason"] == {"type": "stop", "matched": 77},
        stop_token_ids=[77],
        logit_bias={"77": 100},
    ),
    "stop_regex": structured(lambda text: text == "a", regex="abc", stop_regex="b+"),
    "temperature": sampled(taken, temperature=0.7),
    "top_p": sampled(taken, top_p=0.9, temperature=1.0),
    "top_k": sampled(taken, top_k=20, temperature=1.0),
    "top_k: -1": sampled(taken, top_k=-1, temperature=1.0),
    "min_p": sampled(taken, min_p=0.1, temperature=1.0),
    "frequency_penalty": sampled(taken, frequency_penalty=1.0),
    "presence_penalty": sampled(taken, presence_penalty=-1.0),
    "repetition_penalty": sampled(taken, repetition_penalty=1.1),
    "min_new_tokens": sampled(
        lambda made: made["meta_info"]["completion_tokens"] >= 4,
        min_new_tokens=4,
        ignore_eos=False,
    ),
    "json_schema": structured(
        lambda text: type(json.loads(text)["ok"]) is bool, json_schema=SCHEMA
    ),
    "regex": structured(lambda text: text in ("France", "England"), regex="(France|England)"),
    "ebnf": structured(
        lambda text: text in ("Hello", "Hi", "Hey"), ebnf='root ::= "Hello" | "Hi" | "Hey"'
    ),
    "structural_tag": sampled(
        structural_tag=json.dumps(
            {
                "type": "structural_tag",
                "structures": [
                    {"begin": "<function=a>", "schema": {"type": "object"}, "end": "</function>"}
                ],
                "triggers": ["<function="],
            }
        )
    ),
    "n": sampled(lambda made: len(made) == 3, n=3),
    "n: of two prompts": generated(lambda made: len(made) == 4, {"n": 2}, text=[TEXT, "a"]),
    "ignore_eos": sampled(taken, ignore_eos=True),
    "skip_special_tokens": sampled(taken, skip_special_tokens=False),
    "spaces_between_special_tokens": sampled(taken, spaces_between_special_tokens=True),
    "no_stop_trim": structured(lambda text: text == "ab", regex="abc", stop="b", no_stop_trim=True),
    "logit_bias": sampled(lambda made: set(made["output_ids"]) == {77}, logit_bias={"77": 100}),
    "sampling_seed": sampled(taken, sampling_seed=7, temperature=1.0),
}
ANY = {"type": "object", "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": ANY}}
CHATS = {
    "regex": ({"regex": "(Paris|London)"}, lambda text: text in ("Paris", "London")),
    "ebnf": ({"ebnf": 'root ::= "Hi" | "Hey"'}, lambda text: text in ("Hi", "Hey")),
    "json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "ok", "schema": json.loads(SCHEMA)},
            }
        },
        lambda text: type(json.loads(text)["ok"]) is bool,
    ),
    "json_object": ({"response_format": {"type": "json_object"}, "max_tokens": 64}, bool),
    "structural_tag": (
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": ANY, "end": "</f>"}],
                "triggers": ["<f>"],
            }
        },
        bool,
    ),
    "stop": ({"regex": "abc", "stop": "b"}, lambda text: text == "a"),
    "stop_token_ids": ({"stop_token_ids": [77]}, lambda text: isinstance(text, str)),
    "repetition_penalty": ({"repetition_penalty": 1.1}, bool),
    "min_p": ({"min_p": 0.1, "temperature": 1.0}, bool),
    "no_stop_trim": (
        {"regex": "abc", "stop": "b", "no_stop_trim": True},
        lambda text: text == "ab",
    ),
    "skip_special_tokens": ({"skip_special_tokens": False}, bool),
    "logit_bias": ({"logit_bias": {"77": -100}}, bool),
    "seed": ({"seed": 7, "temperature": 1.0}, bool),
    "parallel_tool_calls": ({"tools": [TOOL], "parallel_tool_calls": True}, bool),
    "tool_choice none": ({"tools": [TOOL], "tool_choice": "none"}, bool),
    "continue_final_message": (
        {
            "messages": [*USER, {"role": "assistant", "content": "France:"}],
            "continue_final_message": True,
        },
        lambda text: isinstance(text, str),
    ),
}


def chat(holds, **body) -> Documented:
    """POST /v1/chat/completions. `holds`: of the text."""
    return Documented(
        "POST /v1/chat/completions",
        {"messages": USER, "temperature": 0, "max_tokens": 32, **body},
        lambda made: holds(made["choices"][0]["message"]["content"]),
    )


MODEL_FIELDS = {
    "model_path",
    "is_generation",
    "tokenizer_path",
    "preferred_sampling_params",
    "has_image_understanding",
    "has_audio_understanding",
}
ROUTES = {
    **{
        f"GET {path}": Documented(f"GET {path}", None, lambda made: set(made) >= MODEL_FIELDS)
        for path in ("/get_model_info", "/model_info")
    },
    "GET /get_model_info: is_generation": Documented(
        "GET /get_model_info", None, lambda made: made["is_generation"] is True
    ),
    "GET /get_model_info: of an embedding model": Documented(
        "GET /get_model_info", None, lambda made: made["is_generation"] is False, engine="embed"
    ),
    "GET /get_model_info: weight_version": Documented(
        "GET /get_model_info", None, lambda made: made["weight_version"] == "default"
    ),
    "GET /get_server_info": Documented(
        "GET /get_server_info",
        None,
        lambda made: made["model_path"] == "tiny" and made["max_running_requests"] == 4,
    ),
    "GET /health": Documented("GET /health", None, lambda made: True),
    "GET /health_generate": Documented("GET /health_generate", None, lambda made: made == ""),
    "POST /flush_cache": Documented(
        "POST /flush_cache", None, lambda made: made.startswith("Cache flushed.")
    ),
    "POST /encode": Documented(
        "POST /encode",
        {"model": "tiny", "text": "Once upon a time"},
        lambda made: all(isinstance(one, float) for one in made["embedding"][:10]),
        engine="embed",
    ),
    "POST /encode: several": Documented(
        "POST /encode",
        {"text": ["Once upon a time", "a"]},
        lambda made: len(made) == 2 and made[0]["embedding"] and made[1]["embedding"],
        engine="embed",
    ),
    "POST /encode: input_ids": Documented(
        "POST /encode",
        {"input_ids": [5, 6, 7]},
        lambda made: made["meta_info"]["prompt_tokens"] == 3,
        engine="embed",
    ),
    "POST /encode: meta_info": Documented(
        "POST /encode",
        {"text": "Once upon a time", "rid": "mine"},
        lambda made: made["meta_info"]["id"] == "mine" and made["meta_info"]["e2e_latency"] > 0,
        engine="embed",
    ),
    "POST /encode: a model that generates": Documented(
        "POST /encode", {"text": "a"}, lambda made: made["error"], status=400
    ),
    "POST /v1/embeddings": Documented(
        "POST /v1/embeddings",
        {"model": "tiny", "input": "Once upon a time"},
        lambda made: made["data"][0]["embedding"],
        engine="embed",
    ),
    "POST /v1/embeddings: input ids": Documented(
        "POST /v1/embeddings",
        {"model": "tiny", "input": [5, 6, 7]},
        lambda made: made["data"][0]["embedding"],
        engine="embed",
    ),
    "POST /v1/rerank": Documented(
        "POST /v1/rerank",
        {"query": "what is panda?", "documents": ["hi", "The giant panda"]},
        lambda made: all(one["score"] <= 1 and one["document"] for one in made),
        engine="rank",
    ),
    "POST /classify": Documented(
        "POST /classify",
        {"text": ["good", "bad"]},
        lambda made: [len(one["embedding"]) for one in made] == [1, 1],
        engine="rank",
    ),
    "POST /tokenize": Documented(
        "POST /tokenize",
        {"model": "tiny", "prompt": TEXT},
        lambda made: made["count"] == len(made["tokens"]) and made["max_model_len"] == 256,
    ),
    "POST /detokenize": Documented(
        "POST /detokenize", {"model": "tiny", "tokens": [72]}, lambda made: made["text"]
    ),
    "POST /v1/completions": Documented(
        "POST /v1/completions",
        {"model": "tiny", "prompt": TEXT, "temperature": 0, "max_tokens": 8, "n": 1, "stop": None},
        lambda made: made["choices"][0]["text"],
    ),
    "POST /v1/completions: regex": Documented(
        "POST /v1/completions",
        {"prompt": TEXT, "regex": "(Paris|London)", "max_tokens": 32},
        lambda made: made["choices"][0]["text"] in ("Paris", "London"),
    ),
    "POST /v1/completions: json_schema": Documented(
        "POST /v1/completions",
        {"prompt": TEXT, "json_schema": SCHEMA, "max_tokens": 32},
        lambda made: type(json.loads(made["choices"][0]["text"])["ok"]) is bool,
    ),
    "POST /v1/completions: ebnf": Documented(
        "POST /v1/completions",
        {"prompt": TEXT, "ebnf": 'root ::= "Hi" | "Hey"', "max_tokens": 32},
        lambda made: made["choices"][0]["text"] in ("Hi", "Hey"),
    ),
    "POST /v1/chat/completions": Documented(
        "POST /v1/chat/completions",
        {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 64},
        lambda made: made["choices"][0]["message"]["content"],
    ),
    "POST /v1/chat/completions: ignore_eos, min_tokens, top_k": Documented(
        "POST /v1/chat/completions",
        {"messages": USER, "max_tokens": 8, "ignore_eos": True, "min_tokens": 2, "top_k": 5},
        lambda made: made["usage"]["completion_tokens"] == 8,
    ),
    "POST /v1/chat/completions: separate_reasoning": Documented(
        "POST /v1/chat/completions",
        {"messages": USER, "max_tokens": 8, "separate_reasoning": True},
        lambda made: made["choices"],
    ),
    "POST /v1/chat/completions: chat_template_kwargs": Documented(
        "POST /v1/chat/completions",
        {"messages": USER, "max_tokens": 8, "chat_template_kwargs": {"enable_thinking": False}},
        lambda made: made["choices"],
    ),
    **{
        f"POST /v1/chat/completions: {name}": chat(holds, **body)
        for name, (body, holds) in CHATS.items()
    },
    "GET /v1/models": Documented(
        "GET /v1/models", None, lambda made: made["data"][0]["id"] == "tiny"
    ),
}
CHECKS = {**ARGUMENTS, **META, **PARAMETERS, **ROUTES}
NOT_HELD = {
    "input_embeds": (
        "`input_embeds` is refused: `prompt_embeds` of `/v1/completions` takes embeddings."
    ),
    "stop_regex": "`stop_regex` is refused: a stop is a text or a token.",
    "POST /v1/rerank": "`/v1/rerank` answers in Jina's shape, and not with a list.",
    "GET /get_model_info: weight_version": (
        "`/get_model_info` has no `weight_version`: `/weight_info` has it ([rl](rl.md))."
    ),
    "POST /detokenize": "`/detokenize` answers with `prompt`, vLLM's name, and not with `text`.",
}


@pytest.mark.parametrize("name", CHECKS)
async def test_a_documented_request(serve, name):
    async with serve(CHECKS[name].engine, routes=("sglang",), admin_routes=True) as client:
        fault = await fault_of(client, CHECKS[name])
    if name in NOT_HELD:
        assert fault is not None, "it holds now: take it off the list"
    else:
        assert fault is None, fault


def test_the_share_is_on_the_page():
    print(share_of("SGLang", CHECKS, NOT_HELD))
