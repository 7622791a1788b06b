"""Fields of requests that plugins bring: those that change the forward pass are part of what a
cached prefix is found by."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path

import httpx
import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "adapter"))
ADAPTER = importlib.import_module("toolkit_lm_adapter")
NAMES = (None, "red", "green")
PREFIX = [(37 * i) % 250 + 16 for i in range(48)]
PROMPTS = [[*PREFIX, tail] for tail in (20, 21, 22)]
OPTIONS = {"num_kv_blocks": 256, "block_size": 4, "max_model_len": 128, "dtype": "float32"}
ON_LOGITS_ALONE = {
    "begun",
    "drafter",
    "dry",
    "no_repeat_ngram",
    "typical",
    "xtc",
    "epsilon_cutoff",
    "mirostat",
    "thinking_budget",
    "structured_outputs",
    "trace_replay",
    "vllm_processors",
    "hidden_states",
    "kv_transfer",
    "prefix_retention",
    "routed_experts",
}


@pytest.fixture(scope="module")
def folder(make_llama, tmp_path_factory):
    made = tmp_path_factory.mktemp("adapter") / "model"
    shutil.copytree(make_llama("adapter")[0], made)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(
        json.dumps({**config, "architectures": ["AdapterLlamaForCausalLM"]})
    )
    return str(made)


def params_of(name, **fields) -> SamplingParams:
    given = {} if name is None else {"extra_args": {"style": name}}
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **given, **fields)


@pytest.fixture(scope="module")
def expected(folder):
    """The tokens of each prompt with each adapter, computed without a cache."""
    with LLM(folder, plugins=[ADAPTER], enable_prefix_caching=False, **OPTIONS) as llm:
        return {
            (name, tail): tokens(llm, PROMPTS[tail], name)[0] for name in NAMES for tail in range(3)
        }


def tokens(llm, prompt, name, **options):
    [output] = llm.generate(
        {"prompt_token_ids": prompt}, params_of(name), use_tqdm=False, **options
    )
    assert output.error is None
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def test_adapters_differ(expected):
    for tail in range(3):
        assert len({tuple(expected[name, tail]) for name in NAMES}) == 3


def test_no_adapter_reads_the_prefix_of_another(folder, expected):
    with LLM(folder, plugins=[ADAPTER], **OPTIONS) as llm:
        for tail in range(3):
            for name in NAMES:
                found, cached = tokens(llm, PROMPTS[tail], name)
                assert found == expected[name, tail], f"adapter {name!r}, prompt {tail}"
                assert cached == (48 if tail else 0), "its own prefix is found"


def test_adapters_in_one_batch(folder, expected):
    with LLM(folder, plugins=[ADAPTER], **OPTIONS) as llm:
        asked = [(name, tail) for tail in range(3) for name in NAMES]
        prompts = [{"prompt_token_ids": PROMPTS[tail]} for _, tail in asked]
        outputs = llm.generate(prompts, [params_of(name, n=2) for name, _ in asked], use_tqdm=False)
    for key, output in zip(asked, outputs, strict=True):
        assert [list(one.token_ids) for one in output.outputs] == [expected[key]] * 2


def test_a_salt_that_is_a_key_reads_no_adapters_prefix(folder, expected):
    """A client may know how keys are made."""
    with LLM(folder, plugins=[ADAPTER], **OPTIONS) as llm:
        tokens(llm, PROMPTS[0], "red")
        [key] = llm.engine.processor.prepare(
            "r", {"prompt_token_ids": PROMPTS[0]}, params_of("red")
        ).message.cache_keys
        assert tokens(llm, PROMPTS[0], None, cache_salt=key.key) == (expected[None, 0], 0)


def test_salts_of_generate_and_chat(folder):
    with LLM(folder, plugins=[ADAPTER], **OPTIONS) as llm:
        found = [
            tokens(llm, PROMPTS[0], None, cache_salt=salt)[1]
            for salt in ("a", "b", None, "a", "b", None)
        ]
        assert found == [0, 0, 0, 48, 48, 48]
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(
            prompts, params_of(None), cache_salt=["a", "c", None], use_tqdm=False
        )
        assert [output.num_cached_tokens for output in outputs] == [48, 0, 48]
    with LLM("tiny") as llm:
        messages = [{"role": "user", "content": "What is the capital of France? " * 4}]
        short = SamplingParams(max_tokens=1)
        cached = [
            llm.chat(messages, short, cache_salt=salt, use_tqdm=False)[0].num_cached_tokens
            for salt in ("a", "b", "a")
        ]
        assert cached[:2] == [0, 0] and cached[2] > 0


def test_salts_of_what_pools():
    text = "What is the capital of France? " * 4
    with LLM("tiny", convert="embed", enable_prefix_caching=True) as llm:
        cached = [
            llm.embed(text, cache_salt=salt, use_tqdm=False)[0].num_cached_tokens
            for salt in ("a", "b", "a")
        ]
    assert cached[:2] == [0, 0] and cached[2] > 0


@pytest.mark.parametrize("salt", ["", 3, "\ud800", ["a", "b"]])
def test_wrong_salts_are_refused(folder, salt):
    from toolkit_lm.errors import RequestError

    with LLM("tiny") as llm:
        for call in (
            lambda: llm.generate("a", cache_salt=salt),
            lambda: llm.chat([{"role": "user", "content": "a"}], cache_salt=salt),
        ):
            with pytest.raises(RequestError, match="cache_salt"):
                call()


@pytest.mark.anyio
async def test_adapters_of_async_llm_and_over_http(folder, expected):
    plugins = Plugins.load(extra=[ADAPTER])
    llm = AsyncLLM(
        config=VllmConfig.make(model=folder, engine_process=False, **OPTIONS), plugins=plugins
    )
    try:
        await llm.wait_ready()
        for tail in range(3):
            for name in NAMES:
                async for output in llm.generate(
                    {"prompt_token_ids": PROMPTS[tail]}, params_of(name)
                ):
                    last = output
                assert list(last.outputs[0].token_ids) == expected[name, tail]
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for tail in range(3):
                for name in NAMES:
                    body = {
                        "prompt": PROMPTS[tail],
                        "temperature": 0,
                        "max_tokens": 8,
                        "ignore_eos": True,
                        "return_token_ids": True,
                    }
                    answer = (
                        await client.post("/v1/completions", json={**body, "style": name})
                    ).json()
                    assert answer["choices"][0]["token_ids"] == expected[name, tail], (name, tail)
                    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    finally:
        await llm.aclose()


def test_each_field_of_a_plugin_is_in_the_keys_unless_its_plugin_promises():
    """All that is installed: whoever adds parameters here says what they change."""
    registry = Plugins.load(extra=[ADAPTER]).logits_processors
    promised = {entry.key for entry in registry.entries() if not entry.params.changes_forward}
    assert promised == ON_LOGITS_ALONE
    for entry in registry.entries():
        key = registry.cache_key({entry.key: {"a": 1}})
        assert (key is None) == (entry.key in ON_LOGITS_ALONE)
        assert key is None or key != registry.cache_key({entry.key: {"a": 2}})


def test_parameters_that_change_draws_alone_share_prefixes():
    with LLM("tiny") as llm:
        prompt = "Once upon a time there was a cat. The cat said: I am a cat. " * 2
        for given in (
            {"dry_multiplier": 1.0},
            {"xtc_probability": 0.5},
            {"no_repeat_ngram_size": 3},
        ):
            [output] = llm.generate(
                prompt, SamplingParams(max_tokens=2, extra_args=given), use_tqdm=False
            )
        assert output.num_cached_tokens > 0
