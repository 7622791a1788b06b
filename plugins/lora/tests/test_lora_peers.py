"""Adapters as clients of llama.cpp and SGLang name them."""

from __future__ import annotations

import pytest
from lora_adapters import PROMPT
from lora_served import BODY, post, served, tokens
from test_lora_resolvers import write_keys
from toolkit_lm import SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm_lora.numbers import Numbers


@pytest.mark.anyio
async def test_llama_cpps_numbers_and_scales(two_adapters, folder):
    modules = [f"{name}={folder / name}" for name in ("rslora", "all")]
    async with served(two_adapters, {"modules": modules}) as (client, _):

        async def listed():
            found = (await client.get("/lora-adapters")).json()
            assert [one["path"] for one in found] == [str(folder / one["name"]) for one in found]
            return [(one["id"], one["name"], one["scale"]) for one in found]

        async def put(status, *entries, text=""):
            answer = await client.post("/lora-adapters", json=list(entries))
            assert answer.status_code == status and text in answer.text, answer.text

        expected = {name: two_adapters.expected[name].tokens for name in ("all", "rslora", None)}
        assert await listed() == [(0, "rslora", 0.0), (1, "all", 0.0)]
        for number, name in enumerate(("rslora", "all")):
            lora = [{"id": number, "scale": 1}, {"id": 1 - number, "scale": 0}]
            assert await tokens(client, "base", lora=lora) == expected[name]
        both = two_adapters.combined(["rslora", "all"], [0.5, 2.0]).tokens
        lora = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 2.0}]
        assert await tokens(client, "base", lora=lora) == both
        # Scales that operators set are for requests that name no adapter.
        await put(200, *lora)
        assert await listed() == [(0, "rslora", 0.5), (1, "all", 2.0)]
        assert await tokens(client, "base") == both
        assert await tokens(client, "all") == expected["all"]
        assert await tokens(client, "base", lora=[]) == expected[None]
        assert await tokens(client, "base", adapters=[]) == expected[None]
        await put(200, {"id": 1, "scale": 1.0})
        assert await listed() == [(0, "rslora", 0.0), (1, "all", 1.0)]
        assert await tokens(client, "base") == expected["all"]
        await put(404, {"id": 2, "scale": 1.0}, text="no adapter with the id 2")
        await put(400, {"id": 1, "scale": 1000.0}, text="from -100 to 100")
        await put(400, {"id": "1", "scale": 1.0})
        await put(400, {"id": 1})
        assert await listed() == [(0, "rslora", 0.0), (1, "all", 1.0)]
        await post(client, "/v1/unload_lora_adapter", 200, lora_name="all")
        assert await tokens(client, "base") == expected[None]
        assert await listed() == [(0, "rslora", 0.0)]
        for wrong, status in (
            ([{"id": 1, "scale": 1}], 404),
            ([{"id": True, "scale": 1}], 404),
            ([{"id": 0}], 400),
            ([{"id": 0, "scale": "1"}], 400),
            ([{"id": 0, "scale": 1}] * 2, 400),
            (["rslora"], 400),
        ):
            await post(client, "/v1/completions", status, "lora", **BODY, lora=wrong)


@pytest.mark.anyio
async def test_a_scale_that_no_request_could_have(make_adapters, two_adapters):
    adapters = make_adapters("llama")
    own = {"modules": [f"dora={adapters.paths['dora']}"]}
    async with served(adapters, own) as (client, _):
        answer = await client.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])
        assert answer.status_code == 400 and "can only have the scale 1" in answer.text
        assert (await client.post("/lora-adapters", json=[{"id": 0, "scale": 1}])).is_success
        assert await tokens(client, "base") == adapters.expected["dora"].tokens


@pytest.mark.anyio
async def test_sglangs_path_is_a_name(two_adapters, folder):
    async with served(two_adapters, {"folder": str(folder)}) as (client, _):
        for name in ("all", "rslora"):
            found = await tokens(client, "base", lora_path=name)
            assert found == two_adapters.expected[name].tokens
        assert await tokens(client, "base", lora_path=None) == two_adapters.expected[None].tokens
        path = str(folder / "all")
        await post(client, "/v1/completions", 404, "no adapter", **BODY, lora_path=path)


@pytest.mark.anyio
async def test_keys_have_numbers_of_their_own(two_adapters, folder, tmp_path):
    keys = write_keys(tmp_path / "keys.yaml")
    own = {"folder": str(folder)}
    async with served(two_adapters, own, keys=keys) as (client, _):

        async def send(key, *entries):
            headers = {"authorization": f"Bearer {key}"}
            if entries:
                return await client.post("/lora-adapters", json=list(entries), headers=headers)
            found = (await client.get("/lora-adapters", headers=headers)).json()
            return [(one["id"], one["name"], one["scale"]) for one in found]

        assert await send("O") == [(0, "all", 0.0), (1, "rslora", 0.0)]
        assert await send("A") == [(0, "all", 0.0)]
        assert await send("B") == [(0, "rslora", 0.0)]
        assert await send("N") == []
        lora = [{"id": 0, "scale": 1.0}]
        answer = await post(client, "/v1/completions", 200, key="B", **BODY, lora=lora)
        expected = two_adapters.expected["rslora"].tokens
        assert answer.json()["choices"][0]["token_ids"] == expected
        await post(client, "/v1/completions", 404, "no id 0", key="N", **BODY, lora=lora)
        assert (await send("B", *lora)).status_code == 400
        # A limited key has those that it may use, of what an operator sets.
        assert (await send("O", *lora)).status_code == 200
        assert await send("A") == [(0, "all", 1.0)]
        assert await send("B") == [(0, "rslora", 0.0)]
        answer = await post(client, "/v1/completions", 200, key="B", **BODY)
        found = answer.json()["choices"][0]["token_ids"]
        assert found == two_adapters.expected[None].tokens


def test_numbers_are_kept():
    numbers = Numbers()
    assert numbers.of(None, ["a", "b"]) == {"a": 0, "b": 1}
    assert numbers.of(None, ["b", "c"]) == {"b": 1, "c": 2}
    assert numbers.of(("b", "c"), ["c"]) == {"c": 0}
    assert numbers.of(None, ["a", "c"]) == {"a": 0, "c": 2}


def test_an_engine_without_adapters(two_adapters):
    """Names are refused, and what names none is not."""
    with two_adapters.llm(plugin_option={}) as llm:
        prompt = {"prompt_token_ids": PROMPT}
        for asked in ({"lora": [{"id": 0, "scale": 1.0}]}, {"lora_path": "all"}):
            with pytest.raises(RequestError, match="this engine has no adapters"):
                llm.generate(prompt, SamplingParams(max_tokens=1, extra_args=asked))
        llm.generate(prompt, SamplingParams(max_tokens=1, extra_args={"lora": []}))
