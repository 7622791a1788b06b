"""How requests name adapters, and that no adapter reads the cached prefixes of another."""

from __future__ import annotations

import asyncio
import shutil

import pytest
from lora_adapters import FORMS, PROMPT, Adapters, given
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm_lora.front import LoRARequest

NAMES = ("all", "rslora", "layers")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    forms = {name: FORMS["llama"][name] for name in (*NAMES, "dora", "invoked")}
    return Adapters(tmp_path_factory.mktemp("requests"), "llama", forms)


@pytest.fixture(scope="module")
def llm(adapters):
    modules = [f"{name}={adapters.paths[name]}" for name in NAMES]
    with adapters.llm({"modules": modules, "max_adapters": 2}) as made:
        yield made


def ask(llm, **extra_args):
    params = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logprobs=3, extra_args=extra_args
    )
    return llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0]


def test_no_adapter_reads_the_prefix_of_another(adapters, llm):
    llm.reset_prefix_cache()
    for cached in (0, 32):
        for name in (None, *NAMES):
            found = ask(llm, adapter=name) if name else ask(llm)
            adapters.assert_is(found, name)
            assert found.num_cached_tokens == cached
    # The contents are the key, whatever the name is.
    shutil.copytree(adapters.paths["all"], adapters.checkpoint.parent / "copy", dirs_exist_ok=True)
    path = str(adapters.checkpoint.parent / "copy")
    [found] = llm.generate(
        {"prompt_token_ids": PROMPT},
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3),
        lora_request=LoRARequest("copy", 7, path),
        use_tqdm=False,
    )
    adapters.assert_is(found, "all")
    assert found.num_cached_tokens == 32


def test_an_invoked_adapter_reads_the_prefix_of_the_base(adapters, llm):
    """aLoRA: blocks before the invocation are the base's, and later ones its own."""
    llm.reset_prefix_cache()
    for name, cached in ((None, 0), ("invoked", 16), ("invoked", 32), (None, 32)):
        [found] = adapters.ask(llm, name)
        adapters.assert_is(found, name)
        assert found.num_cached_tokens == cached
    prompt = {"prompt_token_ids": PROMPT[:20]}
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3)
    request = [adapters.request("invoked"), None]
    one, other = llm.generate([prompt] * 2, params, lora_request=request, use_tqdm=False)
    assert given(one) == given(other), "a prompt that does not invoke it is the base's"


def test_new_contents_under_an_old_name(adapters, llm, tmp_path):
    request = LoRARequest("fresh", 1, str(tmp_path / "one"))
    for name, folder in (("all", "one"), ("rslora", "two")):
        shutil.copytree(adapters.paths[name], tmp_path / folder)
        request = LoRARequest("fresh", 1, str(tmp_path / folder))
        [found] = llm.generate(
            {"prompt_token_ids": PROMPT},
            SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3),
            lora_request=request,
            use_tqdm=False,
        )
        adapters.assert_is(found, name)


def test_more_adapters_than_a_step_may_have(adapters, llm):
    names = (*NAMES, None, *reversed(NAMES), "dora")
    for name, found in zip(names, adapters.ask(llm, *names), strict=True):
        adapters.assert_is(found, name)


def test_several_adapters_with_scales(adapters, llm):
    """Scales of one: PEFT's own sum of both. A scale of 0 is none."""
    none = given(ask(llm))
    assert given(ask(llm, adapters=[{"name": "all", "scale": 0}])) == none
    one = given(ask(llm, adapter="layers"))
    assert given(ask(llm, adapters=[{"name": "layers"}])) == one
    both = adapters.combined(["all", "layers"], [0.5, -1.5])
    found = ask(llm, adapters=[{"name": "all", "scale": 0.5}, {"name": "layers", "scale": -1.5}])
    assert list(found.outputs[0].token_ids) == both.tokens
    for step, logprobs in zip(found.outputs[0].logprobs, both.logprobs, strict=True):
        assert all(abs(at.logprob - float(logprobs[token])) <= 1e-4 for token, at in step.items())
    other = [{"name": "layers", "scale": -1.5}, {"name": "all", "scale": 0.5}]
    assert given(ask(llm, adapters=other)) == given(found)


@pytest.mark.parametrize(
    ("extra_args", "wrong"),
    [
        ({"adapter": "al"}, r"no adapter 'al'\. Did you mean 'all'\?"),
        ({"adapters": [{"name": "nothing"}]}, r"no adapter 'nothing'"),
        ({"adapters": [{"scale": 1}]}, "each must be {'name': ..., 'scale': ...}"),
        ({"adapters": [{"name": "all", "weight": 1}]}, "there is no 'weight'"),
        ({"adapters": [{"name": "all", "scale": "x"}]}, "scale must be a number"),
        ({"adapters": [{"name": "all", "scale": True}]}, "scale must be a number"),
        ({"adapters": [{"name": "all", "scale": 1e9}]}, "scale must be a number from -100 to 100"),
        ({"adapter": "all", "adapters": [{"name": "all"}]}, "'all' is there twice"),
        ({"adapters": [{"name": one} for one in NAMES]}, "has 3 adapters, and a step may have 2"),
        ({"adapters": ["all"]}, "adapters must be a list of mappings"),
        ({"adapter": 3}, "adapter must be a text"),
    ],
    ids=str,
)
def test_what_a_request_may_not_say(llm, extra_args, wrong):
    with pytest.raises(RequestError, match=wrong):
        if error := ask(llm, **extra_args).error:
            raise RequestError(error)


def test_requests_of_vllms_shape(adapters, llm):
    with pytest.raises(RequestError, match="needs a lora_name and a lora_path"):
        llm.generate("x", lora_request=LoRARequest("", 1, ""), use_tqdm=False)
    with pytest.raises(RequestError, match=r"'gone': there is no folder '.*nowhere'"):
        llm.generate("x", lora_request=LoRARequest("gone", 1, "nowhere"), use_tqdm=False)
    with pytest.raises(RequestError, match="lora_request has 1 entries for 2 prompts"):
        llm.generate([[1], [2]], lora_request=[None], use_tqdm=False)
    with pytest.raises(TypeError, match="takes no 'lora_requests'"):
        llm.generate([1], lora_requests=1, use_tqdm=False)
    dora = LoRARequest("dora", 1, str(adapters.paths["dora"]))
    llm.generate([[1]], SamplingParams(max_tokens=1), lora_request=dora, use_tqdm=False)
    with pytest.raises(RequestError, match="its scale can only be 1"):
        ask(llm, adapters=[{"name": "dora", "scale": 2}])


def test_requests_of_async_engines(adapters):
    """`lora_request` is a request's option of AsyncLLM, and of LLMEngine."""
    asyncio.run(ask_async_engine(adapters, "rslora"))


async def ask_async_engine(adapters, name):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
    given = {"plugin_option": {"lora": {"enabled": True}}, "renderer": "tokens"}
    given |= {"num_kv_blocks": 64, "block_size": 16, "max_model_len": 128, "dtype": "float32"}
    config = VllmConfig.make(model=str(adapters.checkpoint), **given)
    async with AsyncLLM(config) as engine:
        prompt = {"prompt_token_ids": PROMPT}
        for request in (adapters.request(name), None):
            *_, last = [out async for out in engine.generate(prompt, params, lora_request=request)]
            adapters.assert_is(last, name if request else None)


def test_an_engine_without_adapters(adapters):
    with LLM(str(adapters.checkpoint), renderer="tokens", num_kv_blocks=64) as llm:
        assert "lora" not in llm.engine.processor.parts.by_name
        for extra_args in ({"adapter": "all"}, {"adapters": [{"name": "all"}]}):
            with pytest.raises(RequestError, match=r"no adapters. Start it with .*lora\.enabled"):
                ask(llm, **extra_args)
        with pytest.raises(RequestError, match="no adapters"):
            llm.generate([[1]], lora_request=adapters.request("all"), use_tqdm=False)


@pytest.mark.parametrize(
    ("own", "wrong"),
    [
        ({"modules": ["nothing"]}, "'nothing' is not NAME=PATH"),
        ({"modules": "a=x, nothing"}, "'nothing' is not NAME=PATH"),
        ({"modules": "a=x, b=y"}, "'a': there is no folder 'x'"),
        ({"modules": "[1]"}, "option modules: Expected `str`"),
        ({"modules": ["name=/nowhere"]}, "adapter 'name': there is no folder '/nowhere'"),
        ({"folder": "/nowhere"}, "there is no folder /nowhere"),
        ({"max_adapters": 0}, "max_adapters"),
    ],
    ids=str,
)
def test_options_that_are_wrong(adapters, own, wrong):
    with pytest.raises(ConfigError, match=wrong), adapters.llm(own):
        pass
