"""llama.cpp's routes: the checks of its own server's documentation and tests, over tiny."""

from __future__ import annotations

import json

import pytest
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.plugin_routes import SHIPPED

pytestmark = pytest.mark.anyio

TEXT = "The capital of France is"
ASK = {"prompt": TEXT, "n_predict": 8, "temperature": 0}
HI = [{"role": "user", "content": "hi"}]
UNICODE = "a test string with unicode \u5abd and emoji \U0001f917"
NAMED = {"routes": ("llama_cpp",)}
YES = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture
def asked(serve):
    return lambda **options: serve(**NAMED, **options)


async def complete(client, **more):
    return await client.post("/completion", json={**ASK, **more})


async def whole(client, **more):
    reply = await complete(client, **more)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def events_of(client, **more):
    reply = await complete(client, stream=True, **more)
    assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_the_routes_are_off_until_they_are_named(serve):
    assert "llama_cpp" not in SHIPPED and ServerOptions().routes is None
    async with serve() as client:
        assert (await complete(client)).status_code == 404
        assert (await client.post("/tokenize", json={"content": "hi"})).status_code == 400


async def test_a_completion_is_that_of_the_other_route(asked):
    async with asked() as client:
        made = await whole(client, return_tokens=True)
        body = {"prompt": TEXT, "max_tokens": 8, "temperature": 0}
        other = (await client.post("/v1/completions", json=body)).json()
    [choice] = other["choices"]
    assert made["content"] == choice["text"] and made["stop"] is True
    assert made["tokens_predicted"] == len(made["tokens"]) == other["usage"]["completion_tokens"]
    assert made["tokens_evaluated"] == other["usage"]["prompt_tokens"]
    assert made["stop_type"] == {"stop": "eos", "length": "limit"}[choice["finish_reason"]]
    assert (made["model"], made["truncated"], made["stopping_word"]) == ("tiny", False, "")
    assert made["prompt"].endswith(TEXT) and (made["index"], made["id_slot"]) == (0, -1)


@pytest.mark.parametrize("return_tokens", [False, True])
async def test_tokens_come_where_they_are_asked_for(asked, return_tokens):
    async with asked() as client:
        made = await whole(client, return_tokens=return_tokens)
    assert bool(made["tokens"]) == return_tokens and type(made["has_new_line"]) is bool


async def test_a_stream_is_the_same_text(asked):
    async with asked() as client:
        made = await whole(client, ignore_eos=True)
        *parts, last = await events_of(client, ignore_eos=True)
    assert "".join(event["content"] for event in parts) == made["content"]
    assert all(event["tokens"] and event["stop"] is False for event in parts)
    assert last["stop"] is True and last["content"] == "" and last["tokens"] == []
    assert last["tokens_predicted"] == made["tokens_predicted"] == 8
    assert last["stop_type"] == "limit" and last["generation_settings"]["n_predict"] == 8
    assert last["timings"]["predicted_n"] == 8 and last["prompt"] == made["prompt"]


async def test_a_stream_of_several_prompts_has_an_end_for_each(asked):
    async with asked() as client:
        events = await events_of(client, prompt=["Once", "The cat"], ignore_eos=True)
    assert sorted(event["index"] for event in events if event["stop"]) == [0, 1]


async def test_a_stream_that_fails_ends_with_the_error(asked):
    async with asked() as client:
        reply = await complete(client, stream=True, prompt=[10**6])
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


async def test_timings(asked):
    async with asked() as client:
        found = (await whole(client, ignore_eos=True, cache_prompt=False))["timings"]
    assert found["predicted_n"] == 8 and found["cache_n"] + found["prompt_n"] == 7
    assert found["predicted_ms"] > 0 and found["prompt_ms"] > 0
    # The first token comes at the end of the prompt.
    assert found["predicted_per_second"] == pytest.approx(7 / found["predicted_ms"] * 1000)
    assert found["predicted_per_token_ms"] == pytest.approx(found["predicted_ms"] / 7)


async def test_the_same_seed_gives_the_same_text(asked):
    drawn = {"temperature": 1.0, "ignore_eos": True, "n_predict": 24}
    async with asked() as client:
        same = {(await whole(client, **drawn, seed=42))["content"] for _ in range(3)}
        other = {(await whole(client, **drawn, seed=seed))["content"] for seed in range(4)}
        random = await whole(client, **drawn, seed=-1)
    assert len(same) == 1 and len(other) == 4
    assert random["generation_settings"]["seed"] == 2**32 - 1


PROMPTS = {
    "a text": (TEXT, None),
    "texts": (["Once", "The cat"], 2),
    "one text in a list": ([TEXT], 1),
    "token ids": ([5, 6, 7], None),
    "lists of token ids": ([[5, 6], [5, 6]], 2),
    "token ids and texts in one prompt": ([5, 6, "Once", 7, 8, "The cat"], None),
    "token ids beside a text": ([[5, 6, 7], "Once"], 2),
    "a text among lists with texts": (["Once", [5, "The", 6]], 2),
    "an object": ({"prompt_string": TEXT}, None),
    "objects": ([{"prompt_string": TEXT}, TEXT], 2),
}


@pytest.mark.parametrize("name", PROMPTS)
async def test_prompts(asked, name):
    prompt, several = PROMPTS[name]
    async with asked() as client:
        found = await whole(client, prompt=prompt)
    if several is None:
        assert isinstance(found["content"], str)
    else:
        assert [one["index"] for one in found] == [*range(several)]


async def test_tokens_of_a_text_are_the_text(asked):
    async with asked() as client:
        reply = await client.post("/tokenize", json={"content": TEXT, "add_special": True})
        tokens = reply.json()["tokens"]
        by_text = await whole(client)
        by_tokens = await whole(client, prompt=tokens)
        both = await whole(client, prompt=[tokens, TEXT])
    assert by_tokens["content"] == by_text["content"]
    assert [one["content"] for one in both] == [by_text["content"]] * 2


async def test_several_answers_to_one_prompt(asked):
    async with asked() as client:
        found = await whole(client, n_cmpl=3)
    assert [one["index"] for one in found] == [0, 1, 2]
    assert len({one["content"] for one in found}) == 1


async def test_a_stop_text_is_told(asked):
    async with asked() as client:
        text = (await whole(client, ignore_eos=True))["content"]
        found = await whole(client, ignore_eos=True, stop=[text[2:4]])
    assert (found["stop_type"], found["stopping_word"]) == ("word", text[2:4])
    assert found["content"] == text[:2]


@pytest.mark.parametrize("value", [-1, None])
async def test_none_given_is_as_many_as_fit(asked, value):
    async with asked() as client:
        found = await whole(client, n_predict=value, ignore_eos=True)
    assert found["tokens_evaluated"] + found["tokens_predicted"] == 256
    assert found["stop_type"] == "limit"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_may_be_read_without_an_answer(asked, stream):
    async with asked() as client:
        if stream:
            [found] = await events_of(client, n_predict=0)
        else:
            found = await whole(client, n_predict=0)
    assert (found["content"], found["tokens_predicted"], found["stop"]) == ("", 0, True)
    assert found["tokens_evaluated"] == 7


async def test_fields_of_the_answer_that_are_asked_for(asked):
    fields = ["content", "generation_settings/n_predict", "prompt", "nothing/there"]
    async with asked() as client:
        some = await whole(client, response_fields=fields)
        every = await whole(client, response_fields=[])
    assert sorted(some) == ["content", "generation_settings/n_predict", "prompt"]
    assert some["generation_settings/n_predict"] == 8
    assert every["content"] == some["content"] and "generation_settings" in every


@pytest.mark.parametrize("stream", [False, True])
async def test_probabilities(asked, stream):
    async with asked() as client:
        if stream:
            events = await events_of(client, n_probs=10, n_predict=5, ignore_eos=True)
            told = [event["completion_probabilities"] for event in events if not event["stop"]]
            found = [one for some in told for one in some]
        else:
            made = await whole(client, n_probs=10, n_predict=5, ignore_eos=True)
            found = made["completion_probabilities"]
    assert len(found) == 5
    for token in found:
        assert token["id"] > 0 and token["logprob"] <= 0 and bytes(token["bytes"])
        assert len(token["top_logprobs"]) == 10
        # Greedy: the token is the likeliest.
        assert {**token["top_logprobs"][0]} == {
            k: v for k, v in token.items() if k != "top_logprobs"
        }
        values = [one["logprob"] for one in token["top_logprobs"]]
        assert values == sorted(values, reverse=True)


async def test_a_bias_by_token_and_by_text(asked):
    async with asked() as client:
        free = await whole(client, n_predict=1, return_tokens=True)
        [token] = free["tokens"]
        for bias in ([[token, False]], {str(token): -100}, [[free["content"], False]]):
            other = await whole(client, n_predict=1, return_tokens=True, logit_bias=bias)
            assert other["tokens"] != [token]
        wanted = await whole(client, n_predict=1, return_tokens=True, logit_bias=[[77, 100.0]])
    assert wanted["tokens"] == [77]


async def test_a_grammar(asked):
    async with asked() as client:
        found = await whole(client, grammar='root ::= "yes" | "no"')
    assert found["content"] in ("yes", "no") and found["stop_type"] == "eos"


@pytest.mark.parametrize("schema", [YES, {"const": "foo"}])
async def test_a_schema(asked, schema):
    async with asked() as client:
        found = await whole(client, json_schema=schema, n_predict=32)
    value = json.loads(found["content"])
    assert value == "foo" if schema is not YES else type(value["ok"]) is bool


WRONG = {
    "negative temperature": ({"temperature": -1}, "temperature"),
    "more answers than is allowed": ({"n": 200}, "n"),
    "probabilities of all": ({"n_probs": 50}, "n_probs"),
    "log probabilities of the prompt": ({"prompt_logprobs": 1}, "prompt_logprobs"),
    "no prompt in the list": ({"prompt": []}, "prompt"),
    "a number": ({"prompt": 7}, "prompt"),
    "a list of nothing": ({"prompt": [None]}, "prompt"),
    "a token that is not there": ({"prompt": [10**6]}, "prompt"),
    "more prompts than are allowed": ({"prompt": ["a"] * 10_000}, "prompt"),
    "more texts than are allowed": ({"prompt": [5, *["a"] * 257]}, "prompt"),
    "an image": (
        {"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}},
        "prompt",
    ),
    "a bias of nothing": ({"logit_bias": [[5]]}, "logit_bias"),
    "a bias of true": ({"logit_bias": [[5, True]]}, "logit_bias"),
    "biases without end": ({"logit_bias": [[5, 1.0]] * 301}, "logit_bias"),
    "a grammar and a schema": ({"grammar": "root ::= [a]", "json_schema": YES}, "json_schema"),
    "probabilities after sampling": ({"post_sampling_probs": True}, "post_sampling_probs"),
    "penalties of a window": (
        {"repeat_last_n": 64, "repeat_penalty": 1.1},
        "repeat_last_n",
    ),
    "an adapter": ({"lora": [{"id": 0, "scale": 1.0}]}, "lora"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_values(asked, name):
    body, param = WRONG[name]
    async with asked() as client:
        reply = await complete(client, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, 400, param), error
    assert error["type"] == "invalid_request_error"


async def test_a_prompt_that_does_not_fit_is_refused(asked):
    async with asked() as client:
        reply = await complete(client, prompt=TEXT * 100)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "exceed_context_size_error"


async def test_what_its_clients_always_send_is_named(asked):
    more = {"samplers": ["top_k"], "cache_prompt": True, "id_slot": -1, "n_keep": 0}
    async with asked() as client:
        reply = await complete(client, **more, timings_per_token=False, min_keep=0)
    assert reply.status_code == 200 and reply.headers["x-ignored-fields"] == "samplers"


async def test_a_text_to_tokens_and_back(asked):
    async with asked() as client:
        tokens = (await client.post("/tokenize", json={"content": UNICODE})).json()["tokens"]
        back = (await client.post("/detokenize", json={"tokens": tokens})).json()
    assert len(tokens) > 5 and back["content"] == UNICODE == back["prompt"]


async def test_a_text_to_tokens_with_their_pieces(asked):
    body = {"content": UNICODE, "with_pieces": True, "parse_special": True}
    async with asked() as client:
        tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    pieces = [one["piece"] for one in tokens]
    joined = b"".join(one.encode() if isinstance(one, str) else bytes(one) for one in pieces)
    assert joined.decode() == UNICODE and any(isinstance(one, list) for one in pieces)
    assert all(one["id"] > 0 and one["piece"] for one in tokens)


async def test_texts_and_token_ids_to_tokens(asked):
    async with asked() as client:
        mixed = (await client.post("/tokenize", json={"content": [7, "hi", 9]})).json()["tokens"]
        alone = (await client.post("/tokenize", json={"content": "hi"})).json()["tokens"]
    assert mixed == [7, *alone, 9]


@pytest.mark.parametrize(
    "body",
    [
        {"content": "a", "prompt": "b"},
        {"content": 7},
        {"prompt": "a", "with_pieces": True},
        {"content": "a", "parse_special": False},
        {"content": [10**9], "with_pieces": True},
    ],
)
async def test_wrong_bodies_of_the_tokenizer(asked, body):
    async with asked() as client:
        reply = await client.post("/tokenize", json=body)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == 400


async def test_the_servers_own_bodies_are_still_taken(serve, asked):
    body = {"prompt": TEXT, "return_token_strs": True}
    async with serve() as client:
        own = (await client.post("/tokenize", json=body)).json()
    async with asked() as client:
        assert (await client.post("/tokenize", json=body)).json() == own


async def test_a_conversation_as_the_template_writes_it(asked):
    async with asked() as client:
        text = (await client.post("/apply-template", json={"messages": HI})).json()["prompt"]
        tokens = (await client.post("/tokenize", json={"messages": HI})).json()["tokens"]
        again = (await client.post("/detokenize", json={"tokens": tokens})).json()["content"]
        refused = await client.post("/apply-template", json={"messages": "hi"})
    assert "hi" in text and text == again
    assert refused.status_code == 400


async def test_properties(asked):
    async with asked() as client:
        found = (await client.get("/props")).json()
    settings = found["default_generation_settings"]
    assert settings["n_ctx"] == 256 and settings["params"]["temperature"] == 1.0
    assert (found["total_slots"], found["model_alias"]) == (4, "tiny")
    assert found["chat_template"] and found["modalities"] == {"vision": False, "audio": False}
    assert (found["bos_token"], found["eos_token"]) == ("<|bos|>", "<|im_end|>")


async def test_slots(asked):
    async with asked() as client:
        found = (await client.get("/slots")).json()
        free = await client.get("/slots", params={"fail_on_no_slot": "1"})
    assert [one["id"] for one in found] == [0, 1, 2, 3] and free.status_code == 200
    assert not any(one["is_processing"] for one in found)
    assert {one["n_ctx"] for one in found} == {256} and "params" in found[0]


@pytest.mark.parametrize("action", ["save", "restore", "erase"])
async def test_the_state_of_a_slot_is_refused_by_name(asked, action):
    async with asked() as client:
        reply = await client.post("/slots/0", params={"action": action}, json={"filename": "a"})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (501, "not_supported_error")
    assert action in error["message"]


async def test_other_actions_and_properties_are_refused(asked):
    async with asked() as client:
        assert (await client.post("/slots/0", params={"action": "x"})).status_code == 400
        assert (await client.post("/slots/x", params={"action": "save"})).status_code == 400
        assert (await client.post("/props", json={})).status_code == 501


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/completion"),
        ("POST", "/apply-template"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/props"),
        ("POST", "/props"),
        ("GET", "/slots"),
        ("POST", "/slots/0"),
    ],
)
async def test_the_key_is_needed(asked, method, path):
    async with asked(api_key="secret") as client:
        reply = await client.request(method, path, json=ASK)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (401, "authentication_error")
