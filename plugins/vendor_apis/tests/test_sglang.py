"""SGLang's routes: the checks of its documentation and of its own tests, over tiny."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from toolkit_lm_server.generation import ChoicePiece
from toolkit_lm_vendor_apis.sglang.output import weights_of

pytestmark = pytest.mark.anyio

TEXT = "The capital of France is"
PARAMS = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.fixture
def asked(serve):
    return lambda **options: serve(routes=("sglang",), **options)


async def generate(client, params=None, **more):
    body = {"sampling_params": {**PARAMS, **(params or {})}, **more}
    if "input_ids" not in more:
        body = {"text": TEXT, **body}
    return await client.post("/generate", json=body)


async def whole(client, params=None, **more):
    reply = await generate(client, params, **more)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def events_of(client, params=None, **more):
    reply = await generate(client, params, stream=True, **more)
    lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def plain(client, **more):
    fields = {"prompt": TEXT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    return (await client.post("/v1/completions", json=fields)).json()


async def test_the_routes_are_off_until_they_are_named(serve):
    async with serve() as client:
        assert (await generate(client)).status_code == 404
        assert (await client.get("/get_model_info")).status_code == 404


async def test_a_text_is_that_of_the_other_route(asked):
    async with asked() as client:
        made = await whole(client)
        other = await plain(client)
    info = made["meta_info"]
    assert made["text"] == other["choices"][0]["text"]
    assert info["prompt_tokens"] == other["usage"]["prompt_tokens"]
    assert info["completion_tokens"] == len(made["output_ids"]) == 8
    assert info["finish_reason"] == {"type": "length", "length": 8}
    # Eight steps of tiny take longer than making the answer does.
    assert info["e2e_latency"] > 1e-3 and info["cached_tokens"] >= 0
    assert isinstance(info["id"], str) and info["weight_version"] == "default"


@pytest.mark.parametrize(
    ("versions", "told"),
    [(None, "default"), (["", "a"], "a"), (["a", "b"], "b"), (["a", ""], "default")],
)
def test_an_answer_names_the_weights_of_its_end(versions, told):
    spans = {"weight_versions": [{"version": name} for name in versions]} if versions else {}
    ended = ChoicePiece(0, "x", finish_reason="stop", versions=spans)
    assert weights_of(ended) == {"weight_version": told}
    assert weights_of(ChoicePiece(0, "x")) == {}


async def test_a_stream_has_the_text_so_far(asked):
    async with asked() as client:
        made = await whole(client)
        events = await events_of(client)
    texts = [event["text"] for event in events]
    assert texts[-1] == made["text"] and events[-1]["output_ids"] == made["output_ids"]
    assert all(later.startswith(text) for text, later in pairwise(texts))
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons[-1] == {"type": "length", "length": 8} and not any(reasons[:-1])


async def test_a_stream_of_several_has_their_numbers(asked):
    async with asked() as client:
        events = await events_of(client, text=["Once", "The cat"])
        made = await whole(client, text=["Once", "The cat"])
    last = {event["index"]: event["text"] for event in events}
    assert last == {0: made[0]["text"], 1: made[1]["text"]}


@pytest.mark.parametrize(
    ("prompt", "several"),
    [
        ({"text": TEXT}, None),
        ({"text": [TEXT]}, 1),
        ({"text": ["Once", "The cat", TEXT]}, 3),
        ({"input_ids": [5, 6, 7]}, None),
        ({"input_ids": [[5, 6, 7]]}, 1),
        ({"input_ids": [[5, 6], [7, 8, 9]]}, 2),
    ],
)
async def test_prompts(asked, prompt, several):
    async with asked() as client:
        made = await whole(client, **prompt)
    assert (len(made) if isinstance(made, list) else None) == several


async def test_token_ids_of_a_text_give_its_answer(asked):
    async with asked() as client:
        tokens = (await client.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]
        assert (await whole(client, input_ids=tokens))["text"] == (await whole(client))["text"]


async def test_without_parameters_an_answer_has_128_tokens_at_most(asked):
    async with asked() as client:
        reply = await client.post(
            "/generate", json={"text": "Once", "sampling_params": {"ignore_eos": True}}
        )
    assert reply.json()["meta_info"]["completion_tokens"] == 128


@pytest.mark.parametrize("n", [2, 3])
async def test_several_answers_to_a_prompt(asked, n):
    async with asked() as client:
        made = await whole(client, {"n": n, "temperature": 1.0, "max_new_tokens": 16})
        both = await whole(client, {"n": n}, text=["Once", "The cat"])
    assert len(made) == n and len({one["text"] for one in made}) > 1
    assert len(both) == 2 * n and both[0]["text"] == both[n - 1]["text"] != both[n]["text"]


async def test_ids_of_requests(asked):
    async with asked() as client:
        one = await whole(client, rid="mine")
        two = await whole(client, text=["a", "b"], rid=["x", "y"])
    assert one["meta_info"]["id"] == "mine"
    assert [made["meta_info"]["id"] for made in two] == ["x", "y"]


async def test_a_stop_text_matches(asked):
    async with asked() as client:
        text = (await whole(client))["text"]
        made = await whole(client, {"stop": text[2:4]})
        kept = await whole(client, {"stop": [text[2:4]], "no_stop_trim": True})
    assert made["meta_info"]["finish_reason"] == {"type": "stop", "matched": text[2:4]}
    assert made["text"] == text[:2] and kept["text"] == text[:4]


async def test_a_stop_token_matches(asked):
    async with asked() as client:
        tokens = (await whole(client))["output_ids"]
        made = await whole(client, {"stop_token_ids": [tokens[3]]})
    assert made["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[3]}


async def test_the_end_of_sequence_matches(asked):
    ask = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    async with asked() as client:
        made = await whole(client, {"ignore_eos": False, "max_new_tokens": 64}, text=ask)
    assert made["meta_info"]["finish_reason"] == {"type": "stop", "matched": 3}


async def test_the_fewest_tokens(asked):
    async with asked() as client:
        stop = (await whole(client))["text"][1]
        made = await whole(client, {"stop": stop, "min_new_tokens": 6})
    assert made["meta_info"]["completion_tokens"] >= 6


async def test_log_probabilities_of_an_answer(asked):
    async with asked() as client:
        made = await whole(client, return_logprob=True, return_text_in_logprobs=True)
        other = await plain(client, logprobs=0)
    info = made["meta_info"]
    told = info["output_token_logprobs"]
    assert [token for _, token, _ in told] == made["output_ids"]
    values = other["choices"][0]["logprobs"]["token_logprobs"]
    assert [value for value, _, _ in told] == pytest.approx(values, abs=1e-5)
    assert "".join(text for _, _, text in told) == made["text"]
    assert info["input_token_logprobs"] == [] and "output_top_logprobs" not in info


async def test_log_probabilities_have_no_texts_unless_asked(asked):
    async with asked() as client:
        info = (await whole(client, return_logprob=True))["meta_info"]
    assert {text for _, _, text in info["output_token_logprobs"]} == {None}


@pytest.mark.parametrize("start", [0, 1, 3])
async def test_log_probabilities_of_a_prompt(asked, start):
    async with asked() as client:
        made = await whole(client, return_logprob=True, logprob_start_len=start, top_logprobs_num=3)
    info = made["meta_info"]
    assert len(info["input_token_logprobs"]) == info["prompt_tokens"] - start
    first = info["input_token_logprobs"][0]
    assert (first[0] is None) == (start == 0)
    assert (info["input_top_logprobs"][0] is None) == (start == 0)
    assert len(info["input_top_logprobs"]) == len(info["input_token_logprobs"])
    assert all(value <= 0 for value, _, _ in info["input_token_logprobs"][1:])


async def test_a_prompt_is_scored_without_an_answer(asked):
    async with asked() as client:
        made = await whole(client, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
        read = await whole(client, {"max_new_tokens": 0})
    info = made["meta_info"]
    assert made["text"] == "" and info["completion_tokens"] == 0 and read["text"] == ""
    assert len(info["input_token_logprobs"]) == info["prompt_tokens"]


@pytest.mark.parametrize("top", [1, 5])
async def test_the_likeliest_tokens(asked, top):
    async with asked() as client:
        info = (await whole(client, return_logprob=True, top_logprobs_num=top))["meta_info"]
    assert [len(one) for one in info["output_top_logprobs"]] == [top] * 8
    for chosen, likeliest in zip(
        info["output_token_logprobs"], info["output_top_logprobs"], strict=True
    ):
        assert likeliest[0] == chosen


async def test_tokens_by_name(asked):
    async with asked() as client:
        made = await whole(client, return_logprob=True, token_ids_logprob=[10, 20])
    told = made["meta_info"]["output_token_ids_logprobs"]
    assert [[token for _, token, _ in one] for one in told] == [[10, 20]] * 8


async def test_a_stream_has_log_probabilities_so_far(asked):
    async with asked() as client:
        made = await whole(client, return_logprob=True, top_logprobs_num=2)
        events = await events_of(client, return_logprob=True, top_logprobs_num=2)
    last = events[-1]["meta_info"]
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert len(last[name]) == len(made["meta_info"][name]) == 8


async def test_parameters_of_each_prompt_that_are_equal(asked):
    async with asked() as client:
        body = {"text": ["Once", "The cat"], "sampling_params": [PARAMS, PARAMS]}
        made = (
            await client.post("/generate", json={**body, "return_logprob": [True, True]})
        ).json()
    assert all(len(one["meta_info"]["output_token_logprobs"]) == 8 for one in made)


async def test_a_seed_repeats_an_answer(asked):
    drawn = {"temperature": 1.0, "sampling_seed": 7}
    async with asked() as client:
        assert (await whole(client, drawn))["text"] == (await whole(client, drawn))["text"]


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "temperature": 0.7},
        {"top_k": -1, "temperature": 1.0},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
        {"skip_special_tokens": False, "spaces_between_special_tokens": True},
        {"logit_bias": {"77": 100}},
        {"stop": None, "json_schema": None, "regex": None, "ebnf": None},
    ],
)
async def test_parameters_that_are_taken(asked, params):
    async with asked() as client:
        made = await whole(client, params)
    assert made["meta_info"]["completion_tokens"] == 8
    if "logit_bias" in params:
        assert set(made["output_ids"]) == {77}


@pytest.mark.parametrize(
    ("params", "check"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, lambda text: type(json.loads(text)["ok"]) is bool),
        ({"json_schema": SCHEMA}, lambda text: type(json.loads(text)["ok"]) is bool),
        ({"regex": "(Paris|London)"}, lambda text: text in ("Paris", "London")),
        ({"ebnf": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
    ],
)
async def test_structured_answers(asked, params, check):
    async with asked() as client:
        made = await whole(client, {**params, "ignore_eos": False, "max_new_tokens": 32})
    assert check(made["text"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": None}, "text"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"text": []}, "text"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"text": "a", "sampling_params": {"prompt": "b"}}, "sampling_params"),
        ({"text": "a", "sampling_params": {"stop_regex": "b+"}}, "stop_regex"),
        ({"text": "a", "sampling_params": {"json_schema": "{"}}, "json_schema"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 0.5}]}, "sampling_params"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 50}, "top_logprobs_num"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "image_data": "aGk="}, "image_data"),
        ({"text": "a", "input_embeds": [[0.5]]}, "input_embeds"),
        ({"text": "a", "logprob_start_len": -7}, "logprob_start_len"),
        ({"input_ids": [10**6]}, "input_ids"),
    ],
)
async def test_wrong_bodies(asked, body, param):
    async with asked() as client:
        reply = await client.post("/generate", json=body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error


async def test_a_prompt_that_does_not_fit_is_refused(asked):
    async with asked() as client:
        reply = await generate(client, text=TEXT * 100)
    assert reply.status_code == 400 and "context length" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
async def test_the_model(asked, path):
    async with asked() as client:
        found = (await client.get(path)).json()
    assert (found["model_path"], found["is_generation"]) == ("tiny", True)
    assert found["architectures"] == ["LlamaForCausalLM"]
    assert not found["has_image_understanding"]


async def test_classes_of_both_bodies(serve):
    async with serve("classify", routes=("sglang",)) as client:
        made = (await client.post("/classify", json={"text": ["a", "b"], "rid": ["x", "y"]})).json()
        single = (await client.post("/classify", json={"text": "a"})).json()
        own = (await client.post("/classify", json={"input": ["a", "b"]})).json()
        probs = (await client.post("/classify", json={"text": "a", "use_activation": True})).json()
        for wrong in (
            {"text": "a", "input": "a"},
            {"text": []},
            {"input": "a", "rid": "x"},
            {"text": "a", "add_special_tokens": False},
            {},
        ):
            reply = await client.post("/classify", json=wrong)
            assert reply.status_code == 400, wrong
            assert reply.json()["error"]["type"] == "BadRequestError"
    assert [one["meta_info"]["id"] for one in made] == ["x", "y"]
    assert made[0]["embedding"] == pytest.approx(single["embedding"], abs=1e-6)
    assert sum(probs["embedding"]) == pytest.approx(1, abs=1e-5)
    assert probs["embedding"] == pytest.approx(own["data"][0]["probs"], abs=1e-6)


@pytest.mark.parametrize("name", ["generate", "embed"])
async def test_health_asks_the_engine(serve, name):
    async with serve(name, routes=("sglang",)) as client:
        reply = await client.get("/health_generate")
    assert (reply.status_code, reply.text) == (200, "")


async def test_the_cache_is_emptied_by_operators_alone(asked):
    async with asked() as client:
        assert (await client.post("/flush_cache")).status_code == 404
    async with asked(admin_routes=True) as client:
        assert (await client.post("/flush_cache")).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/generate"), ("GET", "/get_model_info"), ("GET", "/health_generate")],
)
async def test_the_key_is_needed(asked, method, path):
    async with asked(api_key="secret") as client:
        assert (await client.request(method, path, json={"text": "a"})).status_code == 401
