"""The Processor with a made-up renderer: what it passes on, cuts, and refuses."""

from __future__ import annotations

from typing import Annotated

import pytest
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError, ContextLengthError, RequestError
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.messages import PoolingRules
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.processing import RequestLimits
from toolkit_lm.processing.processor import Processor
from toolkit_lm.processing.validation import check_token_ids
from toolkit_lm.prompts import parse_prompt
from toolkit_lm.renderer import Rendered, Renderer

VOCAB = 128


class CountingRenderer(Renderer):
    """One token per character, and how often it was asked."""

    vocab_size = 256
    eos_token_ids = [0]

    def __init__(self, config):
        super().__init__(config)
        self.num_calls = 0

    def render_conversation(self, messages, **kwargs):
        return self.render_prompt(messages[0]["content"])

    def render_prompt(self, prompt, *, add_special_tokens=True):
        self.num_calls += 1
        parsed = parse_prompt(prompt)
        return Rendered(parsed.get("prompt_token_ids") or [ord(char) for char in parsed["prompt"]])

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        raise AssertionError("nothing is decoded before the engine has answered")

    def decode(self, token_ids, *, skip_special_tokens=False):
        return "".join(map(chr, token_ids))

    def token_texts(self, token_ids):
        return [chr(token) for token in token_ids]


class LoudParams(ProcessorParams):
    loud_times: Annotated[int, param("How often.", ge=0)] = 0
    loud_word: Annotated[str | list[str], param("What.")] = "a"

    def prepare(self, renderer):
        token_ids = renderer.render_prompt(self.loud_word).token_ids
        if len(token_ids) > 1:
            raise ValueError("loud_word must be one token")
        if self.loud_times == 3:
            raise KeyError("three")
        return {"token_ids": token_ids, "times": self.loud_times} if self.loud_times else None


class Brings:
    name = "brings"

    @hookimpl
    def toolkit_register_logits_processors(self, processors):
        processors.add("loud", "nowhere:Loud", params=LoudParams)


def make_processor(pooling=None, hf_config=None, **options) -> Processor:
    config = VllmConfig.default(
        hf_config or {"vocab_size": VOCAB}, **{"max_model_len": 16, **options}
    )
    processor = Processor(
        config,
        CountingRenderer(config),
        Plugins.load(PluginsConfig(plugins=["pooling_adapters"]), [Brings()]),
    )
    processor.set_limits(RequestLimits(config, KVCacheConfig([], []), pooling or {}))
    return processor


@pytest.mark.parametrize("prompt", ["abc", {"prompt": "abc"}, {"prompt_token_ids": [97, 98, 99]}])
def test_a_prompt_is_rendered_once(prompt):
    processor = make_processor()
    prepared = processor.prepare(
        "r", prompt, SamplingParams(max_tokens=2), {"priority": 3, "timeout": 5.0}
    )
    assert prepared.message.prompt_token_ids == [97, 98, 99] and processor.renderer.num_calls == 1
    assert prepared.prompt == (
        None if isinstance(prompt, dict) and "prompt" not in prompt else "abc"
    )
    message = prepared.message
    assert (message.request_id, message.priority, message.eos_token_ids) == ("r", 3, [0])
    assert message.deadline == pytest.approx(message.arrival_time + 5)


def test_a_conversation_has_no_text():
    prepared = make_processor().prepare_chat("r", [{"role": "user", "content": "abc"}])
    assert (prepared.message.prompt_token_ids, prepared.prompt) == ([97, 98, 99], None)


@pytest.mark.parametrize("method", ["prepare_batch", "prepare_chat_batch"])
def test_prompts_that_share_parameters_have_them_worked_on_once(method):
    processor = make_processor()
    names = ["0", "1", "2"]
    prompts = (
        names
        if method == "prepare_batch"
        else [[{"role": "user", "content": name}] for name in names]
    )
    prepared = getattr(processor, method)(
        names, prompts, SamplingParams(bad_words=["ab"], extra_args={"loud_times": 1})
    )
    # The word, what the plugin asks for, and three prompts.
    assert processor.renderer.num_calls == 1 + 1 + 3
    assert [(one.message.request_id, one.message.prompt_token_ids) for one in prepared] == [
        (name, [ord(name)]) for name in names
    ]
    assert len({id(one.message.inputs.forbidden_texts) for one in prepared}) == 1
    assert prepared[0].message.inputs.forbidden_texts.steps.to_numpy().tolist() == [[97, 0, 1]]


@pytest.mark.parametrize(
    ("params", "read"),
    [({"truncate_prompt_tokens": 2}, "cd"), ({"truncate_prompt_tokens": -1}, "abcd")],
)
def test_the_text_is_that_of_the_prompt_that_is_read(params, read):
    prepared = make_processor().prepare("r", "abcd", SamplingParams(max_tokens=4, **params))
    assert (prepared.prompt, len(prepared.message.prompt_token_ids)) == (read, len(read))


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ({"prompt_token_ids": [5, -1]}, {}, "prompt_token_ids"),
        ({"prompt_token_ids": [VOCAB]}, {}, "prompt_token_ids"),
        ("\u00e9", {}, "prompt_token_ids"),  # the renderer knows more tokens than the model
        ("a", {"allowed_token_ids": [3, VOCAB]}, "allowed_token_ids"),
        ("a", {"stop_token_ids": [3, VOCAB]}, "stop_token_ids"),
        ("a", {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ("a", {"bad_words": ["\u00e9"]}, "bad_words"),
        ("a", {"n": 129}, "n"),
        ("a", {"extra_args": {"nothing": 1}}, "nothing"),
        ("a", {"extra_args": {"loud_word": 1}}, "loud_word"),
        ("a", {"extra_args": {"loud_word": "two words"}}, "loud_word"),
        ("a", {"extra_args": {"loud_times": 3}}, "loud_times"),
    ],
)
def test_what_the_model_cannot_take_is_refused_by_its_parameter(prompt, params, param):
    with pytest.raises(RequestError) as error:
        make_processor().prepare("r", prompt, SamplingParams(**params))
    assert error.value.param == param


CHECKED = {
    "generate": lambda processor, ids: processor.prepare("r", {"prompt_token_ids": ids}),
    "text": lambda processor, ids: processor.prepare("r", "".join(map(chr, ids))),
    "chat": lambda processor, ids: processor.prepare_chat(
        "r", [{"role": "user", "content": {"prompt_token_ids": ids}}]
    ),
    "embed": lambda processor, ids: prepare_pooling(processor, {"prompt_token_ids": ids}),
    "embed a text": lambda processor, ids: prepare_pooling(processor, "".join(map(chr, ids))),
}


def prepare_pooling(processor, prompt):
    [prepared] = processor.pooling.prepare_batch(["r"], [prompt], [PoolingParams()])
    if isinstance(prepared, RequestError):
        raise prepared


@pytest.mark.parametrize("how", CHECKED)
def test_token_ids_are_checked_once(how, monkeypatch):
    checked = []

    def check(token_ids, vocab_size, param="prompt_token_ids"):
        checked.append((list(token_ids), vocab_size))
        check_token_ids(token_ids, vocab_size, param)

    for module in ("processor", "pooling_processor"):
        monkeypatch.setattr(f"toolkit_lm.processing.{module}.check_token_ids", check)
    rules = {"embed": PoolingRules(True, True, 8)} if "embed" in how else None
    processor = make_processor(rules, runner="pooling" if rules else "generate")
    CHECKED[how](processor, [97, 98])
    assert checked == [([97, 98], VOCAB)]
    for token_id in (VOCAB, 255) if "text" in how else (-1, VOCAB, 2**40, 2**70):
        checked.clear()
        with pytest.raises(
            RequestError,
            match=f"token id {token_id} is not in the vocabulary, which has the ids from 0 to 127",
        ) as raised:
            CHECKED[how](processor, [97, token_id])
        assert raised.value.param == "prompt_token_ids" and len(checked) == 1


def test_the_vocabulary_is_that_of_the_text_model():
    processor = make_processor(hf_config={"text_config": {"vocab_size": 100}, "vocab_size": VOCAB})
    processor.prepare("r", {"prompt_token_ids": [99]})
    with pytest.raises(RequestError, match="token id 100 "):
        processor.prepare("r", {"prompt_token_ids": [100]})


def test_what_a_logits_processor_makes_of_its_parameters():
    def inputs(**extra):
        return (
            make_processor()
            .prepare("r", "a", SamplingParams(extra_args=extra))
            .message.inputs.logits_processors
        )

    assert inputs(loud_times=2, loud_word="b") == {"loud": {"token_ids": [98], "times": 2}}
    assert inputs(loud_word="b") == inputs() == {}
    with pytest.raises(RequestError, match="loud_word must be one token"):
        inputs(loud_word="bc")
    with pytest.raises(
        RequestError,
        match=r"plugin 'brings' .* failed in prepare\(\) of logits processor 'loud': KeyError: "
        r"'three'",
    ):
        inputs(loud_times=3)


def test_a_prompt_that_is_too_long_is_refused_in_one_wording():
    for prepare in (
        lambda p: p.prepare("r", "a" * 16),
        lambda p: p.prepare_chat("r", [{"role": "user", "content": "a" * 16}]),
    ):
        with pytest.raises(
            ContextLengthError,
            match="the prompt has 16 tokens; this model's maximum context length is 16 tokens",
        ):
            prepare(make_processor())


def test_what_is_wrong_with_one_text_spares_the_others():
    processor = make_processor({"embed": PoolingRules(True, True, 8)}, runner="pooling")
    texts = ["abc", "", {"prompt_token_ids": [VOCAB]}, "ab"]
    found = processor.pooling.prepare_batch(list("1234"), texts, [PoolingParams()] * 4)
    assert [isinstance(one, RequestError) for one in found] == [False, True, True, False]
    assert found[0].message.arrival_time == found[3].message.arrival_time
    with pytest.raises(RequestError, match="Unsupported task: 'classify'"):
        processor.pooling.prepare_batch(["1"], ["a"], [PoolingParams(task="classify")])


def test_an_engine_that_pools_needs_what_reads_its_texts():
    def make(**options):
        config = VllmConfig.default({"vocab_size": VOCAB}, max_model_len=16, **options)
        return Processor(config, CountingRenderer(config), Plugins.load(PluginsConfig(plugins=[])))

    for options in ({"runner": "pooling"}, {"extra_tasks": ["embed"]}):
        with pytest.raises(
            ConfigError,
            match=r"reads the texts of pooling requests\..*not in use, and might add it: "
            r".*pooling_adapters",
        ):
            make(**options)
    with pytest.raises(RequestError, match="no loaded plugin reads the texts of pooling requests"):
        make().pooling.scoring("a", "b")


def test_the_option_stop_scope_is_carried_and_checked():
    made = make_processor().prepare("r", "ab", SamplingParams(stop="a"), {"stop_scope": str})
    assert made.stop_scope is str
    with pytest.raises(RequestError, match="stop_scope must be a function") as raised:
        make_processor().prepare("r", "ab", None, {"stop_scope": "</think>"})
    assert raised.value.param == "stop_scope"
