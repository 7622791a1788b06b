"""Fields of generation that vLLM and llama.cpp have: special tokens, templates, documents, names of
tokens, and the middle of a text."""

from __future__ import annotations

import itertools
import json

import pytest
from toolkit_lm.outputs import Logprob
from toolkit_lm_server.app import create_app
from toolkit_lm_server.logprobs import (
    TextPlaces,
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
)
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def tokens_of(engine) -> str:
    """The prompt that the engine was asked for, as a text."""
    return engine.renderer.decode(engine.asked[-1][0]["prompt_token_ids"])


@pytest.fixture
def framed(make_engine):
    """An engine whose tokenizer puts ^ before each text, and has tokens for filling in the
    middle."""
    engine = make_engine(max_model_len=64)
    marks = dict(
        zip(("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"), (1, 2, 3), strict=True)
    )
    plain = engine.renderer.render_prompt

    def render_prompt(prompt, *, add_special_tokens=True):
        if isinstance(prompt, str):
            token_ids = [marks[prompt]] if prompt in marks else [ord(char) for char in prompt]
            prompt = {"prompt_token_ids": [ord("^")] * add_special_tokens + token_ids}
        return plain(prompt)

    names = {token: mark for mark, token in marks.items()}
    engine.renderer.render_prompt = render_prompt
    engine.renderer.vocabulary_texts = lambda token_ids: [
        names.get(one, chr(one)) for one in token_ids
    ]
    return engine


async def test_special_tokens_of_prompts(framed, client_of):
    async with client_of(create_app(framed)) as client:
        for given, expected in (
            ({}, "^ab"),
            ({"add_special_tokens": True}, "^ab"),
            ({"add_special_tokens": False}, "ab"),
        ):
            reply = await client.post(COMPLETE, json={"prompt": "ab", "echo": True, **given})
            assert reply.status_code == 200 and tokens_of(framed) == expected
        await client.post(COMPLETE, json={"prompt": [97], "add_special_tokens": False})
        assert tokens_of(framed) == "a"
        for value, count in ((True, 3), (None, 3), (False, 2)):
            assert (
                await client.post("/tokenize", json={"prompt": "ab", "add_special_tokens": value})
            ).json()["count"] == count


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_how_a_conversation_is_rendered(engine, client_of, path):
    """A template of the request only where the operator allows it."""
    given = {
        "documents": [{"title": "a"}],
        "add_special_tokens": True,
        "chat_template": "{{ messages }}",
    }
    async with client_of(create_app(engine)) as client:
        refused = (await client.post(path, json={**HI, **given})).json()["error"]
        assert (refused["param"], "(allow_request_chat_template)" in refused["message"]) == (
            "chat_template",
            True,
        )
        assert (await client.post(path, json={**HI, "chat_template": None})).status_code == 200
    async with client_of(
        create_app(engine, ServerOptions(allow_request_chat_template=True))
    ) as client:
        assert (await client.post(path, json={**HI, **given})).status_code == 200
        assert {name: engine.renderer.kwargs[name] for name in given} == given
        assert (await client.post(path, json=HI)).status_code == 200
        assert not set(given) & set(engine.renderer.kwargs)


async def test_tokens_named_by_their_ids(client):
    named = {"return_tokens_as_token_ids": True}
    reply = (
        await client.post(COMPLETE, json={"prompt": "ab", "logprobs": 1, "echo": True, **named})
    ).json()
    logprobs = reply["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{ord(char)}" for char in "abAB"]
    assert logprobs["top_logprobs"][2:] == [
        {"token_id:65": -1.5, "token_id:126": -0.5},
        {"token_id:66": -1.5, "token_id:126": -0.5},
    ]
    reply = (
        await client.post(
            CHAT, json={**HI, "logprobs": True, "top_logprobs": 1, "max_tokens": 1, **named}
        )
    ).json()
    [entry] = reply["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:85", "token_id:126")


async def test_a_suffix(framed, client_of):
    async with client_of(create_app(framed)) as client:
        reply = await client.post(COMPLETE, json={"prompt": ["ab", "c"], "suffix": "yz"})
        assert reply.status_code == 200
        assert [framed.renderer.decode(one[0]["prompt_token_ids"]) for one in framed.asked] == [
            "^\1ab\2yz\3",
            "^\1c\2yz\3",
        ]
        assert (await client.post(COMPLETE, json={"prompt": "ab", "suffix": ""})).status_code == 200
        assert tokens_of(framed) == "^ab"
        for wrong in ({"echo": True}, {"prompt": [97]}):
            error = (
                await client.post(COMPLETE, json={"prompt": "ab", "suffix": "yz", **wrong})
            ).json()["error"]
            assert error["param"] == "suffix"
        # Names of these tokens in a text are text.
        await client.post(COMPLETE, json={"prompt": "<|fim_middle|>a", "suffix": "b"})
        assert tokens_of(framed).count("\3") == 1


async def test_a_suffix_where_the_tokenizer_has_no_tokens_for_it(client):
    for path, body in (
        (COMPLETE, {"prompt": "a", "suffix": "b"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ):
        reply = await client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "suffix")
    assert (await client.post(CHAT, json={**HI, "suffix": "b"})).json()["error"][
        "code"
    ] == "unsupported_parameter"


async def test_infill(framed, client_of):
    async with client_of(create_app(framed)) as client:
        body = {
            "input_prefix": "ab",
            "input_suffix": "yz",
            "prompt": "c",
            "n_predict": 3,
            "samplers": ["top_k"],
        }
        reply = await client.post("/infill", json=body)
        assert tokens_of(framed) == "^\1abc\2yz\3"
        whole = reply.json()
        assert (
            whole["content"],
            whole["stop"],
            whole["tokens_predicted"],
            whole["tokens_evaluated"],
        ) == ("^\1A", True, 3, 9)
        assert framed.asked[-1][1].max_tokens == 3
        events = (await client.post("/infill", json={**body, "stream": True})).text.split("\n\n")
        chunks = [
            json.loads(event.removeprefix("data: "))
            for event in events
            if event.startswith("data: {")
        ]
        assert "".join(chunk["content"] for chunk in chunks) == "^\1A" and [
            chunk["stop"] for chunk in chunks
        ] == [False, False, True]
        given = {
            "input_extra": [{"filename": "a.py", "text": "E"}],
            "n_predict": -1,
            "repeat_penalty": 1.5,
        }
        assert (await client.post("/infill", json=given)).status_code == 200
        assert tokens_of(framed) == "^\1\n\n--- snippet ---\n\nE\2\3"
        assert (framed.asked[-1][1].max_tokens, framed.asked[-1][1].repetition_penalty) == (64, 1.5)
        for wrong in (
            {"n_predict": "1"},
            {"input_extra": [5]},
            {"temperature": -1},
            {"model": "other"},
        ):
            assert (
                await client.post("/infill", json={"input_prefix": "a", **wrong})
            ).status_code in (400, 404)


async def test_tokens_of_one_text_and_parts_of_characters_have_names_of_their_own():
    """vllm-project/vllm#44319, sgl-project/sglang#32290: in a table by text, one of them was
    lost."""
    known = {1: b"\xf0\x9f", 2: b"\x98", 3: b"\x80", 4: b"x", 5: b"x", 6: b" y"}
    texts = {one: data.decode("utf-8", "replace") for one, data in known.items()}

    def table(chosen: int, *others: int) -> dict[int, Logprob]:
        return {
            one: Logprob(-float(one), rank, texts[one])
            for rank, one in enumerate([chosen, *others], 1)
        }

    def token_bytes(token_ids):
        return [known[one] for one in token_ids]

    tables = [table(1, 2, 3), table(2, 1), table(3, 1), table(4, 5, 6), table(6)]
    made = completion_logprobs([1, 2, 3, 4, 6], tables, 5, TextPlaces(7), token_bytes)
    assert made["tokens"] == ["bytes:\\xf0\\x9f", "bytes:\\x98", "bytes:\\x80", "x", " y"]
    assert [len(one) for one in made["top_logprobs"]] == [3, 2, 2, 3, 1]
    assert made["top_logprobs"][3] == {"x": -4.0, "token_id:5": -5.0, " y": -6.0}
    # The character is one of the text, and comes with its last part.
    assert made["text_offset"] == [7, 7, 7, 8, 9]
    # However the tokens come.
    for cuts in itertools.product([False, True], repeat=4):
        ends = [place for place, is_cut in enumerate(cuts, 1) if is_cut]
        places = TextPlaces(7)
        found = []
        for begin, end in itertools.pairwise([0, *ends, 5]):
            piece = completion_logprobs(
                [1, 2, 3, 4, 6][begin:end], tables[begin:end], 5, places, token_bytes
            )
            found += piece["text_offset"]
        assert found == made["text_offset"]
    for name in (texts[1], "token_id:1"):
        echoed = echo_logprobs([1, 2, 3, 4, 6], [None, *tables[1:]], 5, texts[1], name, token_bytes)
        assert echoed["text_offset"] == [0, 0, 0, 1, 2]
    whole = chat_logprobs([1, 2, 3], tables[:3], 2, token_bytes)["content"]
    assert bytes(byte for one in whole for byte in one["bytes"]).decode() == "\N{GRINNING FACE}"
