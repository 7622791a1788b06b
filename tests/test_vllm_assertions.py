"""What vLLM's tests of its OpenAI-compatible server assert without regard to the model, asked of ours.

Each check names the test of vLLM (tests/entrypoints, 2026) whose assertions it makes. docs/vllm_checks.md is made of them and of
NOT_HELD: run this file to write it.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import toolkit_lm_tiny
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

PAGE = Path(__file__).parents[1] / "docs" / "vllm_checks.md"
CHECKS: dict[str, Callable[..., None]] = {}
NOT_HELD = {
    "openai/chat_completion/test_chat.py::test_single_chat_session": (
        "`usage` equal to one without `prompt_tokens_details`: they are always there, as OpenAI gives them; vLLM needs a flag for them."
    ),
    "openai/chat_completion/test_chat.py::test_long_seed": (
        "The error's text has pydantic's word `less_than_equal`: ours says the bound. The status is 400 in both."
    ),
    "openai/chat_completion/test_chat_echo.py::test_prompt_logprobs, test_top_logprobs": (
        "-1 for the log probabilities of the whole vocabulary is refused: `--max-logprobs` bounds how many there are."
    ),
    "openai/completion/test_prompt_validation.py::test_empty_prompt": (
        "The error's text names `prompt_embeds`, which this server does not take. The status is 400 in both."
    ),
    "openai/completion/test_completion.py::test_completion_truncation_side_controls_prompt_truncation": (
        "`truncation_side` right is refused: prompts that generate are cut at their beginning."
    ),
    "pooling/classify/test_online.py::test_score, test_rerank": (
        "`{'detail': 'Not Found'}` where the model does not score: our routes are there for each model, and say what it serves (400)."
    ),
    "pooling/classify/test_online.py::test_pooling_not_supported": (
        "The error's type is `BadRequestError`: ours is OpenAI's, `invalid_request_error`."
    ),
    "pooling/embed/test_online.py::test_params_not_supported": (
        "The error's text has pydantic's word `literal_error` and the bad value: ours says which values there are. Both are 400."
    ),
    "pooling/embed/test_online.py::test_bytes_embed_dtype_and_endianness": (
        "`encoding_format` bytes, and fp8 types: vectors come as floats or base64, in float32, float16 or bfloat16."
    ),
}
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "engine_process": False, "num_kv_blocks": 256, "max_num_seqs": 16}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}
CONFIGS = {
    "embedder": LLAMA,
    "classifier": {**BERT, "id2label": {"0": "Default", "1": "Spoiled"}},
    "scorer": {**BERT, "id2label": {"0": "LABEL_0"}},
}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot: {% endif %}"
TALK = [{"role": "system", "content": "you are a helpful assistant"}, {"role": "user", "content": "what is 1+1?"}]
LONG_TALK = [*TALK, {"role": "assistant", "content": "It is two."}, {"role": "user", "content": "Sure?"}]
PROMPT, IDS = "Once upon a time there was", [5, 6, 7, 8, 9]


class Asked:
    """A server over one engine, asked by OpenAI's client and over plain HTTP."""

    def __init__(self, http: TestClient, model: str) -> None:
        self.http = http
        self.model = model
        self.openai = openai.OpenAI(http_client=http, base_url="http://testserver/v1", api_key="none", max_retries=0)

    def post(self, path: str, **body: Any) -> Any:
        return self.http.post(path, json={"model": self.model, **body})

    def ok(self, path: str, **body: Any) -> dict[str, Any]:
        reply = self.post(path, **body)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found

    def refused(self, path: str, **body: Any) -> str:
        reply = self.post(path, **body)
        assert reply.status_code == 400 and "error" in reply.json(), reply.text
        message: str = reply.json()["error"]["message"]
        return message

    def complete(self, **options: Any) -> Any:
        return self.openai.completions.create(**{"model": self.model, "prompt": IDS, "max_tokens": 5, "temperature": 0.0, **options})

    def chat(self, **options: Any) -> Any:
        return self.openai.chat.completions.create(
            **{"model": self.model, "messages": TALK, "max_completion_tokens": 5, "temperature": 0.0, **options}
        )


def check(test: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a check under the name of vLLM's test."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        assert test not in CHECKS
        CHECKS[test] = function
        return function

    return register


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Callable[[str], Asked]]:
    """served(name): the server of `tiny`, or of one of CONFIGS with random weights."""
    made: dict[str, tuple[Asked, AsyncLLM]] = {}

    def get(name: str) -> Asked:
        if name not in made:
            options: dict[str, Any] = {"model": "tiny"}
            if name != "tiny":
                folder = tmp_path_factory.mktemp(name)
                write_checkpoint(folder, CONFIGS[name])
                options = {"model": str(folder), "load_format": "dummy", "chat_template": TEMPLATE, "served_model_name": name}
                options |= {"convert": "embed"} if name == "embedder" else {}
            engine = AsyncLLM(VllmConfig.make(**SMALL, **options))
            http = TestClient(create_app(engine, ServerOptions(tokenizer_info=True), metrics=Metrics()))
            http.__enter__()
            made[name] = Asked(http, name), engine
        return made[name][0]

    yield get
    for asked, engine in made.values():
        asked.http.__exit__()
        engine.close()


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(["<s>", "</s>", *letters])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pair, marks = "<s> $A </s> $B:1 </s>:1", [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair=pair, special_tokens=marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps(config))


# Completions


@check("openai/completion/test_completion.py::test_single_completion")
def single_completion(tiny: Asked) -> None:
    reply = tiny.complete(prompt=PROMPT)
    [choice] = reply.choices
    assert reply.id is not None and len(choice.text) >= 5 and choice.finish_reason == "length"
    usage = reply.usage
    assert usage.completion_tokens == 5 and usage.total_tokens == usage.prompt_tokens + 5
    assert usage.prompt_tokens_details.cached_tokens == 0
    reply = tiny.complete()
    assert len(reply.choices[0].text) >= 1 and reply.choices[0].prompt_logprobs is None


@check("openai/completion/test_completion.py::test_no_logprobs")
def no_logprobs(tiny: Asked) -> None:
    assert tiny.complete(logprobs=None).choices[0].logprobs is None


@check("openai/completion/test_completion.py::test_zero_logprobs")
def zero_logprobs(tiny: Asked) -> None:
    logprobs = tiny.complete(logprobs=0).choices[0].logprobs
    assert logprobs.token_logprobs is not None and len(logprobs.top_logprobs[0]) == 1


@check("openai/completion/test_completion.py::test_some_logprobs")
def some_logprobs(tiny: Asked) -> None:
    logprobs = tiny.complete(logprobs=5).choices[0].logprobs
    assert logprobs.token_logprobs is not None and 5 <= len(logprobs.top_logprobs[0]) <= 6


@check("openai/completion/test_completion.py::test_too_many_completion_logprobs")
def too_many_completion_logprobs(tiny: Asked) -> None:
    for options in ({"logprobs": 21}, {"logprobs": 30, "stream": True}):
        with pytest.raises(openai.BadRequestError):
            list(tiny.complete(**options))
    assert len(tiny.complete().choices[0].text) >= 0


@check("openai/completion/test_completion.py::test_prompt_logprobs_completion")
def prompt_logprobs_completion(tiny: Asked) -> None:
    prompts = ["A robot may not injure another robot", "My name is"]
    with pytest.raises(openai.BadRequestError):
        tiny.complete(prompt=prompts, extra_body={"prompt_logprobs": -1})
    for count in (0, 1):
        reply = tiny.complete(prompt=prompts, extra_body={"prompt_logprobs": count})
        assert all(len(choice.prompt_logprobs) > 0 for choice in reply.choices)
    assert tiny.complete(prompt=prompts).choices[0].prompt_logprobs is None


@check("openai/completion/test_completion.py::test_completion_streaming")
def completion_streaming(tiny: Asked) -> None:
    whole = tiny.complete(prompt=PROMPT).choices[0].text
    choices = [chunk.choices[0] for chunk in tiny.complete(prompt=PROMPT, stream=True)]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert choices[-1].finish_reason == "length" and choices[-1].text
    assert "".join(choice.text for choice in choices) == whole


@check("openai/completion/test_completion.py::test_parallel_no_streaming")
def parallel_no_streaming(tiny: Asked) -> None:
    reply = tiny.complete(prompt=PROMPT, n=3, max_tokens=50, temperature=1.0, logprobs=0, seed=42)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert all(choice.finish_reason for choice in reply.choices) and len({choice.text for choice in reply.choices}) == 3
    assert all(1 <= len(choice.logprobs.tokens) <= 50 for choice in reply.choices)


@check("openai/completion/test_completion.py::test_parallel_streaming")
def parallel_streaming(tiny: Asked) -> None:
    choices = [chunk.choices[0] for chunk in tiny.complete(prompt=PROMPT, n=3, max_tokens=50, temperature=1.0, stream=True, seed=42)]
    assert Counter(choice.index for choice in choices if choice.finish_reason) == {0: 1, 1: 1, 2: 1}
    texts = {index: "".join(choice.text for choice in choices if choice.index == index) for index in range(3)}
    assert len(set(texts.values())) == 3 and max(Counter(choice.index for choice in choices).values()) <= 50


@check("openai/completion/test_completion.py::test_completion_stream_options")
def completion_stream_options(tiny: Asked) -> None:
    for options in ({"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}, {}):
        assert all(chunk.usage is None for chunk in tiny.complete(stream=True, stream_options=options))
    for continuous in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        *chunks, last = tiny.complete(stream=True, stream_options=options)
        assert last.choices == [] and all((chunk.usage is not None) == continuous for chunk in chunks)
        for chunk in [*(chunks if continuous else []), last]:
            assert chunk.usage.prompt_tokens > 0 and chunk.usage.completion_tokens > 0
            assert chunk.usage.total_tokens == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
    for name in ("include_usage", "continuous_usage_stats"):
        for value in (None, True):
            with pytest.raises(openai.BadRequestError):
                tiny.complete(stream=False, stream_options={name: value})


@check("openai/completion/test_completion.py::test_batch_completions")
def batch_completions(tiny: Asked) -> None:
    for prompts in ([PROMPT] * 2, [IDS] * 2):
        first, second = tiny.complete(prompt=prompts).choices
        assert first.text == second.text
        texts = [choice.text for choice in tiny.complete(prompt=prompts, n=2, extra_body={"use_beam_search": True}).choices]
        assert len(texts) == 4 and texts[0] != texts[1] and texts[:2] == texts[2:]
        streamed = ["", ""]
        for chunk in tiny.complete(prompt=prompts, stream=True):
            [choice] = chunk.choices
            streamed[choice.index] += choice.text
        assert streamed[0] == streamed[1] == first.text


@check("openai/completion/test_completion.py::test_echo_logprob_completion")
def echo_logprob_completion(tiny: Asked) -> None:
    for count in (0, 1):
        for prompt in (PROMPT, IDS):
            [choice] = tiny.complete(prompt=prompt, echo=True, logprobs=count).choices
            text = prompt if isinstance(prompt, str) else tiny.ok("/detokenize", tokens=prompt)["prompt"]
            assert choice.text.startswith(text)
            logprobs = choice.logprobs
            assert len(logprobs.text_offset) == len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) > 5
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            assert all(max(count, 1) <= len(table) <= count + 1 for table in logprobs.top_logprobs[1:])


@check("openai/completion/test_completion.py::test_invalid_json_schema, test_invalid_regex, test_invalid_grammar")
def invalid_structured_outputs(tiny: Asked) -> None:
    schema = {"type": "object", "properties": {"brand": {"type": "string"}, "foo": "bar"}, "required": ["brand"]}
    for wanted in ({"json": schema}, {"regex": r"[.*"}, {"grammar": "root ::= missing rule ("}):
        with pytest.raises(openai.BadRequestError):
            tiny.complete(extra_body={"structured_outputs": wanted})


@check("openai/completion/test_empty_prompt_list.py, test_prompt_validation.py::test_empty_prompt")
def empty_prompt(tiny: Asked) -> None:
    for prompt in ("", [], None):
        with pytest.raises(openai.BadRequestError):
            tiny.complete(prompt=prompt, extra_body={"prompt_embeds": []})


@check("openai/completion/test_prompt_validation.py::test_out_of_vocab_token_ids")
def out_of_vocab_token_ids(tiny: Asked) -> None:
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        tiny.complete(prompt=[999_999])


@check("openai/basic/test_return_token_ids.py::test_basic_completion_with_emoji, test_chat_completion_with_emoji_and_token_ids")
def return_token_ids(tiny: Asked) -> None:
    wanted = {"return_token_ids": True}
    [choice] = tiny.complete(prompt=PROMPT, extra_body=wanted).choices
    assert choice.prompt_token_ids == tiny.ok("/tokenize", prompt=PROMPT)["tokens"] and len(choice.token_ids) == 5
    choices = [chunk.choices[0] for chunk in tiny.complete(prompt=PROMPT, extra_body=wanted, stream=True)]
    assert choices[0].prompt_token_ids == choice.prompt_token_ids
    assert [token for one in choices for token in one.token_ids] == choice.token_ids
    reply = tiny.chat(extra_body=wanted)
    assert reply.prompt_token_ids == tiny.ok("/tokenize", messages=TALK)["tokens"] and reply.choices[0].token_ids
    plain = tiny.chat()
    assert plain.prompt_token_ids is None and plain.choices[0].token_ids is None
    first, *chunks = tiny.chat(extra_body=wanted, stream=True)
    assert first.prompt_token_ids == reply.prompt_token_ids
    assert not any("prompt_token_ids" in chunk.model_dump() for chunk in chunks)
    found = [token for chunk in chunks for token in chunk.choices[0].model_dump().get("token_ids") or ()]
    assert found == reply.choices[0].token_ids


@check("openai/basic/test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs")
def token_ids_as_tokens(tiny: Asked) -> None:
    named = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    [choice] = tiny.complete(prompt=PROMPT, echo=True, logprobs=1, extra_body={**named, "prompt_logprobs": 1}).choices
    tokens = [int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens]
    assert tokens == choice.prompt_token_ids + choice.token_ids and choice.prompt_logprobs is not None
    chunks = [chunk.choices[0] for chunk in tiny.complete(prompt=PROMPT, logprobs=1, stream=True, extra_body=named)]
    streamed = [int(token.removeprefix("token_id:")) for one in chunks for token in one.logprobs.tokens]
    assert chunks[0].prompt_token_ids and streamed == [token for one in chunks for token in one.token_ids] == choice.token_ids


# Chats


@check("openai/chat_completion/test_chat.py::test_no_logprobs_chat, test_zero_logprobs_chat, test_some_logprobs_chat")
def logprobs_chat(tiny: Asked) -> None:
    assert tiny.chat(logprobs=False).choices[0].logprobs is None
    for count in (0, 5):
        content = tiny.chat(logprobs=True, top_logprobs=count).choices[0].logprobs.content
        assert len(content[0].top_logprobs) == count


@check("openai/chat_completion/test_chat.py::test_too_many_chat_logprobs")
def too_many_chat_logprobs(tiny: Asked) -> None:
    for options in ({"top_logprobs": 21, "stream": True}, {"top_logprobs": 30}):
        with pytest.raises(openai.BadRequestError):
            list(tiny.chat(logprobs=True, **options))
    assert tiny.chat().choices[0].message.content is not None


@check("openai/chat_completion/test_chat.py::test_prompt_logprobs_chat, test_more_than_one_prompt_logprobs_chat")
def prompt_logprobs_chat(tiny: Asked) -> None:
    with pytest.raises(openai.BadRequestError):
        tiny.chat(messages=LONG_TALK, extra_body={"prompt_logprobs": -1})
    assert tiny.chat(messages=LONG_TALK).prompt_logprobs is None
    assert len(tiny.chat(messages=LONG_TALK, extra_body={"prompt_logprobs": 0}).prompt_logprobs) > 0
    one, two = [tiny.chat(messages=LONG_TALK, extra_body={"prompt_logprobs": count}).prompt_logprobs for count in (1, 2)]
    assert all(count <= len(table) <= count + 1 for count, found in ((1, one), (2, two)) for table in found[1:])


@check("openai/chat_completion/test_chat.py::test_chat_streaming")
def chat_streaming(tiny: Asked) -> None:
    [whole] = tiny.chat(max_completion_tokens=4).choices
    choices = [chunk.choices[0] for chunk in tiny.chat(max_completion_tokens=4, stream=True)]
    assert {choice.delta.role for choice in choices if choice.delta.role} == {"assistant"}
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [whole.finish_reason]
    assert choices[-1].finish_reason == whole.finish_reason
    assert choices[-1].delta.content or whole.finish_reason != "length"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content


@check("openai/chat_completion/test_chat.py::test_chat_completion_stream_options")
def chat_stream_options(tiny: Asked) -> None:
    options = {"extra_body": {"min_tokens": 10}, "max_completion_tokens": 10, "stream": True}
    assert all(chunk.usage is None for chunk in tiny.chat(**options, stream_options={"include_usage": False}))
    *chunks, last = tiny.chat(**options, stream_options={"include_usage": True, "continuous_usage_stats": False})
    assert all(chunk.usage is None for chunk in chunks) and last.choices == [] and last.usage.completion_tokens == 10
    seen = 0
    for chunk in tiny.chat(**options, stream_options={"include_usage": True, "continuous_usage_stats": True}):
        usage = chunk.usage
        assert usage.prompt_tokens >= 0 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert seen == 0 or usage.completion_tokens > seen or (not chunk.choices and usage.completion_tokens == seen)
        seen = usage.completion_tokens
    assert seen == 10
    for value in (None, True):
        with pytest.raises(openai.BadRequestError):
            tiny.chat(stream=False, stream_options={"include_usage": value})
    more = {**options, "extra_body": {"min_tokens": 10, "min_characters": 10}}
    assert len("".join(chunk.choices[0].delta.content for chunk in tiny.chat(**more, stream_options={"include_usage": False}))) >= 10


@check("openai/chat_completion/test_chat.py::test_structured_outputs_choice_chat, test_structured_outputs_regex_chat")
def structured_outputs_chat(tiny: Asked) -> None:
    words = ["Python", "Rust", "C++"]
    reply = tiny.chat(extra_body={"structured_outputs": {"choice": words}}, max_completion_tokens=10)
    assert reply.choices[0].message.content in words
    reply = tiny.chat(extra_body={"structured_outputs": {"regex": r"[0-9]{3}"}}, max_completion_tokens=10)
    assert reply.choices[0].message.content.isdigit() and len(reply.choices[0].message.content) == 3


@check("openai/chat_completion/test_chat.py::test_structured_outputs_type_error")
def structured_outputs_type_error(tiny: Asked) -> None:
    with pytest.raises(openai.BadRequestError):
        tiny.chat(extra_body={"structured_outputs": {"regex": {1: "Python", 2: "C++"}}})


@check("openai/chat_completion/test_chat.py::test_structured_outputs_choice_chat_logprobs")
def structured_outputs_logprobs(tiny: Asked) -> None:
    reply = tiny.chat(logprobs=True, top_logprobs=5, extra_body={"structured_outputs": {"choice": ["one", "two"]}})
    assert all(one.logprob >= -9999.0 for one in reply.choices[0].logprobs.content[0].top_logprobs)


@check("openai/chat_completion/test_chat.py::test_response_format_json_schema, test_response_format_text")
def response_formats(tiny: Asked) -> None:
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "foo_test", "schema": schema}}
    content = tiny.chat(response_format=wanted, max_completion_tokens=100).choices[0].message.content
    assert isinstance(json.loads(content)["yes"], bool)
    assert tiny.chat(response_format={"type": "text"}).choices[0].message.content is not None


@check("openai/chat_completion/test_chat.py::test_extra_fields_allowed")
def extra_fields_allowed(tiny: Asked) -> None:
    message = {**TALK[1], "extra_field": "0"}
    assert tiny.chat(messages=[message], seed=0).choices[0].message.content is not None


@check("openai/chat_completion/test_chat.py::test_complex_message_content, test_custom_role")
def complex_message_content(tiny: Asked) -> None:
    for role in ("user", "my-custom-role"):
        contents = ("what is 1+1?", [{"type": "text", "text": "what is 1+1?"}])
        first, second = [tiny.chat(messages=[{"role": role, "content": one}], seed=0).choices[0].message.content for one in contents]
        assert first == second


@check("openai/chat_completion/test_chat.py::test_invocations")
def invocations_chat(tiny: Asked) -> None:
    body = {"messages": TALK, "max_completion_tokens": 5, "temperature": 0.0, "logprobs": False}
    one, other = tiny.ok("/v1/chat/completions", **body), tiny.ok("/invocations", **body)
    assert one.keys() == other.keys() and one["choices"] == other["choices"]


@check("openai/chat_completion/test_chat.py::test_chat_completion_n_parameter_non_streaming and streaming, n_with_seed, n_equals_1")
def chat_n(tiny: Asked) -> None:
    for n in (1, 3):
        choices = tiny.chat(n=n, temperature=0.7, seed=42, max_completion_tokens=15).choices
        assert [choice.index for choice in choices] == list(range(n)) and all(choice.message.content for choice in choices)
    texts = ["", ""]
    for chunk in tiny.chat(n=2, temperature=0.7, stream=True, max_completion_tokens=15):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(texts)


@check("openai/chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_*")
def chat_logit_bias(tiny: Asked) -> None:
    size = json.loads((Path(toolkit_lm_tiny.__file__).parent / "checkpoint" / "config.json").read_text())["vocab_size"]
    assert tiny.chat(logit_bias={str(size - 1): 1.0}).choices[0].message.content is not None
    for bias, words in (
        ({str(size + 1): 1.0}, (str(size + 1), str(size))),
        ({"not_a_token_id": 50}, ("not_a_token_id", "logit_bias")),
        ({"1": "not_a_number"}, ("logit_bias",)),
        ({"bad1": 50.0, "bad2": 20.0}, ("bad1", "bad2")),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            tiny.chat(logit_bias=bias)
        assert all(word in str(refused.value) for word in words), refused.value


@check("openai/chat_completion/test_chat_echo.py::test_chat_session_with_echo_and_continue_final_message")
def chat_echo(tiny: Asked) -> None:
    saying = "Paris is the"
    messages = [*TALK, {"role": "assistant", "content": saying}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    whole, bare = [tiny.chat(messages=messages, extra_body={**options, "echo": echo}).choices[0].message for echo in (True, False)]
    assert whole.role == "assistant" and whole.content == saying + bare.content
    chunks = tiny.chat(messages=messages, extra_body={**options, "echo": True}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.content


@check("openai/chat_completion/test_non_object_body_validation.py::test_chat_completion_request_rejects_non_object_body")
def non_object_body(tiny: Asked) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        for body in ([], "text", None, 5):
            reply = tiny.http.post(path, json=body)
            assert reply.status_code == 400 and "error" in reply.json()


# The server


@check("openai/basic/test_basic.py::test_show_version, test_check_health, test_server_load")
def about_the_server(tiny: Asked) -> None:
    assert set(tiny.http.get("/version").json()) == {"version"}
    assert tiny.http.get("/health").status_code == 200
    assert tiny.http.get("/load").json() == {"server_load": 0}


@check("openai/basic/test_basic.py::test_request_wrong_content_type")
def wrong_content_type(tiny: Asked) -> None:
    with pytest.raises(openai.APIStatusError):
        tiny.chat(extra_headers={"Content-Type": "application/x-www-form-urlencoded"})


@check("openai/models/test_models.py::test_check_models")
def check_models(tiny: Asked) -> None:
    [model] = tiny.openai.models.list().data
    assert model.id == model.root == tiny.model and model.permission[0]["allow_sampling"] and model.max_model_len > 0
    with pytest.raises(openai.NotFoundError):
        tiny.chat(model="nothing")


# Tokenization


@check("openai/test_tokenization.py::test_tokenize_completions, test_detokenize")
def tokenize_completions(tiny: Asked) -> None:
    prompt = "vllm1 This is a test prompt."
    for special in (False, True):
        found = tiny.ok("/tokenize", prompt=prompt, add_special_tokens=special)
        assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 512 and found["token_strs"] is None
    bare = tiny.ok("/tokenize", prompt=prompt, add_special_tokens=False)["tokens"]
    assert tiny.ok("/detokenize", tokens=bare) == {"prompt": prompt}


@check("openai/test_tokenization.py::test_tokenize_chat, test_tokenize_chat_with_tools")
def tokenize_chat(tiny: Asked) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
    for more in ({}, {"tools": [tool]}):
        for generation in (False, True):
            for special in (False, True):
                options = {"add_generation_prompt": generation, "add_special_tokens": special, **more}
                found = tiny.ok("/tokenize", messages=TALK, **options)
                assert found["count"] == len(found["tokens"]) and found["token_strs"] is None
        final = [*TALK, {"role": "assistant", "content": "Sure,"}]
        continued = tiny.ok("/tokenize", messages=final, continue_final_message=True, add_generation_prompt=False, **more)
        whole = tiny.ok("/tokenize", messages=final, add_generation_prompt=False, **more)
        assert continued["tokens"] == whole["tokens"][: continued["count"]] and continued["count"] < whole["count"]


@check("openai/test_tokenization.py::test_tokenize_with_return_token_strs")
def tokenize_with_token_strs(tiny: Asked) -> None:
    found = tiny.ok("/tokenize", prompt="Once upon a time", return_token_strs=True)
    assert len(found["token_strs"]) == found["count"] and any(text.startswith("Ġ") for text in found["token_strs"])


@check("openai/test_tokenization.py::test_tokenizer_info_basic, schema, added_tokens_structure, consistency_with_tokenize, chat_template")
def tokenizer_info(tiny: Asked) -> None:
    found = tiny.http.get("/tokenizer_info").json()
    assert isinstance(found["tokenizer_class"], str) and found["tokenizer_class"]
    kinds = {"add_bos_token": bool, "bos_token": str, "eos_token": str, "pad_token": str, "chat_template": str, "model_max_length": int}
    assert all(isinstance(found[name], kind) for name, kind in kinds.items() if found.get(name) is not None)
    for token_id, token in (found.get("added_tokens_decoder") or {}).items():
        assert isinstance(token_id, str) and isinstance(token["special"], bool) and "content" in token
    assert found["chat_template"].strip()
    assert found.get("model_max_length", 10**9) >= tiny.ok("/tokenize", prompt="a")["max_model_len"]


# Pooling


@check("pooling/embed/test_online.py::test_completion_request, test_completion_request_batched")
def embeddings(embedder: Asked) -> None:
    tokens = embedder.ok("/tokenize", prompt="some text")["tokens"]
    for given, count in (("some text", 1), (tokens, 1), (["some text"] * 10, 10), ([tokens] * 10, 10)):
        reply = embedder.openai.embeddings.create(model="embedder", input=given, encoding_format="float")
        assert reply.id is not None and [len(one.embedding) for one in reply.data] == [32] * count
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == len(tokens) * count


@check("pooling/embed/test_online.py::test_truncate_prompt_tokens")
def truncated_embeddings(embedder: Asked) -> None:
    for given in ("a text of many tokens", list(range(5, 26))):
        reply = embedder.openai.embeddings.create(model="embedder", input=given, extra_body={"truncate_prompt_tokens": 10})
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == 10
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        embedder.openai.embeddings.create(model="embedder", input="a", extra_body={"truncate_prompt_tokens": 8193})


@check("pooling/embed/test_online.py::test_chat_request")
def embeddings_of_a_chat(embedder: Asked) -> None:
    text = "".join(f"{one['role']}: {one['content']}\n" for one in TALK)
    chat = embedder.ok("/v1/embeddings", messages=TALK, encoding_format="float")
    plain = embedder.ok("/v1/embeddings", input=text, encoding_format="float", add_special_tokens=False)
    assert np.allclose(chat["data"][0]["embedding"], plain["data"][0]["embedding"], atol=1e-5)
    assert chat["usage"] == plain["usage"]
    count = chat["usage"]["prompt_tokens"]
    for options, more in (({"add_generation_prompt": True}, 5), ({"continue_final_message": True}, -1), ({"add_special_tokens": True}, 2)):
        assert embedder.ok("/v1/embeddings", messages=TALK, **options)["usage"]["prompt_tokens"] == count + more
    message = embedder.refused("/v1/embeddings", messages=TALK, continue_final_message=True, add_generation_prompt=True)
    assert "Cannot set both `continue_final_message` and `add_generation_prompt` to True." in message


@check("pooling/embed/test_online.py::test_invocations_completion_request, test_invocations_chat_request")
def invocations_embed(embedder: Asked) -> None:
    for body in ({"input": "some text"}, {"messages": TALK}):
        one, other = embedder.ok("/v1/embeddings", **body), embedder.ok("/invocations", **body)
        assert one.keys() == other.keys() and one["data"][0].keys() == other["data"][0].keys()
        assert np.allclose(one["data"][0]["embedding"], other["data"][0]["embedding"], atol=1e-5)


@check("pooling/embed/test_online.py::test_base64_embedding, test_base64_embed_dtype_and_endianness")
def base64_embeddings(embedder: Asked) -> None:
    expected = embedder.ok("/v1/embeddings", input="hi", encoding_format="float")["data"][0]["embedding"]
    for dtype, kind in (("float32", "f4"), ("float16", "f2")):
        for order, mark in (("native", "<"), ("little", "<"), ("big", ">")):
            options = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": order}
            data = base64.b64decode(embedder.ok("/v1/embeddings", input="hi", **options)["data"][0]["embedding"])
            assert np.allclose(np.frombuffer(data, mark + kind), expected, atol=1e-3)
    assert "embed_dtype" in embedder.refused("/v1/embeddings", input="hi", encoding_format="base64", embed_dtype="bad")


@check("pooling/embed/test_online.py::test_use_activation")
def normalized_embeddings(embedder: Asked) -> None:
    def vector(**options: Any) -> np.ndarray:
        return np.array(embedder.ok("/v1/embeddings", input="hi", **options)["data"][0]["embedding"])

    default, with_it, without = vector(use_activation=None), vector(use_activation=True), vector(use_activation=False)
    assert np.allclose(default, with_it, atol=1e-2) and not np.allclose(with_it, without, atol=1e-2)
    assert np.allclose(with_it, without / np.linalg.norm(without), atol=1e-2)


@check("pooling/embed/test_online.py::test_pooling_embed")
def pooling_tasks(embedder: Asked) -> None:
    [one] = embedder.ok("/pooling", input="hi", task="embed", encoding_format="float")["data"]
    assert len(one["data"]) == 32


@check("pooling/classify/test_online.py::test_completion_request, test_completion_request_batched, test_chat_request")
def classes(classifier: Asked) -> None:
    tokens = classifier.ok("/tokenize", prompt="some text")["tokens"]
    for body, count in (
        ({"input": "some text"}, 1),
        ({"input": tokens}, 1),
        ({"input": ["some text"] * 10}, 10),
        ({"input": [tokens] * 10}, 10),
        ({"messages": TALK}, 1),
        ({"messages": TALK, "add_generation_prompt": True}, 1),
    ):
        reply = classifier.ok("/classify", **body)
        assert (reply["object"], reply["model"], len(reply["data"])) == ("list", "classifier", count)
        for index, one in enumerate(reply["data"]):
            assert one["index"] == index and len(one["probs"]) == one["num_classes"] == 2 and one["label"] in ("Default", "Spoiled")


@check("pooling/classify/test_online.py::test_empty_input_error")
def empty_inputs(classifier: Asked) -> None:
    for given in ("", []):
        classifier.refused("/classify", input=given)


@check("pooling/classify/test_online.py::test_truncate_prompt_tokens")
def truncated_classes(classifier: Asked) -> None:
    usage = classifier.ok("/classify", input="hello " * 600, truncate_prompt_tokens=5)["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == 5
    assert "truncate_prompt_tokens" in classifier.refused("/classify", input="test", truncate_prompt_tokens=513)


@check("pooling/classify/test_online.py::test_add_special_tokens, test_invocations_completion_request, test_invocations_chat_request")
def other_classes(classifier: Asked) -> None:
    for special in (False, True):
        assert len(classifier.ok("/classify", input="some text", add_special_tokens=special)["data"]) == 1
    for body in ({"input": "some text"}, {"messages": TALK}):
        one, other = classifier.ok("/classify", **body), classifier.ok("/invocations", **body)
        assert one.keys() == other.keys() and one["data"][0]["probs"] == pytest.approx(other["data"][0]["probs"], rel=0.01)


@check("pooling/classify/test_online.py::test_use_activation, test_pooling_classify")
def activation(classifier: Asked) -> None:
    def probs(**options: Any) -> np.ndarray:
        return np.array(classifier.ok("/classify", input="some text", **options)["data"][0]["probs"])

    default, with_it, without = probs(use_activation=None), probs(use_activation=True), probs(use_activation=False)
    assert np.allclose(default, with_it, atol=1e-2)
    assert np.allclose(np.exp(without) / np.exp(without).sum(), with_it, atol=1e-2)
    [one] = classifier.ok("/pooling", input="some text", task="classify", encoding_format="float")["data"]
    assert len(one["data"]) == 2


@check("pooling/scoring/test_cross_encoder_online.py::test_score_api_*")
def scores(scorer: Asked) -> None:
    one, many = "What is it?", ["It is this.", "It is that."]
    assert len(scorer.ok("/score", queries=one, documents=many[0])["data"]) == 1
    assert len(scorer.ok("/score", queries=one, documents=many)["data"]) == 2
    names = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))
    found = [[entry["score"] for entry in scorer.ok("/v1/score", **{first: many, second: many})["data"]] for first, second in names]
    assert np.allclose(found, [found[0]] * 4) and len(found[0]) == 2


@check("pooling/scoring/test_cross_encoder_online.py::test_rerank_api_texts, test_rerank_api_top_n, test_invocations")
def ranks(scorer: Asked) -> None:
    documents = ["one text", "two texts", "a third one"]
    for count in (2, 3):
        body = {"query": "which?", "documents": documents, "top_n": count}
        reply, other = scorer.ok("/rerank", **body), scorer.ok("/invocations", **body)
        results = reply["results"]
        assert reply["id"] and len(results) == count and reply.keys() == other.keys()
        assert results == sorted(results, key=lambda one: -one["relevance_score"])
        assert all(documents[one["index"]] == one["document"]["text"] for one in results)


@check("pooling/scoring/test_cross_encoder_online.py::test_rerank_api_max_model_len, test_score_api_max_model_len")
def too_long_to_score(scorer: Asked) -> None:
    long = "What is the capital of France?" * 20
    for path, name in (("/rerank", "query"), ("/score", "queries")):
        body = {name: long, "documents": ["one", "two"]}
        assert "Please reduce the length of the input prompt" in scorer.refused(path, **body)
        assert "Please request a smaller truncation size." in scorer.refused(path, **body, truncate_prompt_tokens=513)


@check("pooling/scoring/test_cross_encoder_online.py::test_use_activation, test_pooling_classify, test_rerank_max_tokens_per_doc*")
def other_ranks(scorer: Asked) -> None:
    def score(**options: Any) -> float:
        found: float = scorer.ok("/rerank", query="a", documents=["b"], **options)["results"][0]["relevance_score"]
        return found

    assert score() == pytest.approx(score(use_activation=True))
    assert 1 / (1 + np.exp(-score(use_activation=False))) == pytest.approx(score(use_activation=True), abs=1e-2)
    [one] = scorer.ok("/pooling", input="a", task="classify", encoding_format="float")["data"]
    assert len(one["data"]) == 1
    counts = [scorer.ok("/rerank", query="a", documents=["word " * 12], **more)["usage"] for more in ({}, {"max_tokens_per_doc": 10})]
    assert counts[0]["prompt_tokens"] > counts[1]["prompt_tokens"] > 0


@pytest.mark.parametrize("name", CHECKS)
def test_holds(name, served):
    function = CHECKS[name]
    [engine] = [argument for argument in function.__annotations__ if argument != "return"]
    function(served(engine))


def page() -> str:
    """docs/vllm_checks.md."""
    lines = [
        "# Checks of vLLM's tests",
        "",
        "vLLM's tests of its OpenAI-compatible server assert much that has nothing to do with a model. These assertions, retyped, are",
        "asked of this server, with `tiny` and with random weights: `tests/test_vllm_assertions.py`. The names are those of vLLM's tests,",
        "in tests/entrypoints.",
        "",
        "## What does not hold",
        "",
        "| test of vLLM | what differs |",
        "| --- | --- |",
        *(f"| `{name}` | {why} |" for name, why in NOT_HELD.items()),
        "",
        "Left out is what needs a certain model or adapters (LoRA, prompt embeddings), and what calls vLLM's own classes.",
        "",
        "## What holds",
        "",
        *(f"- `{name}`" for name in CHECKS),
    ]
    return "\n".join(lines) + "\n"


def test_the_page_says_so():
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/vllm_checks.md is out of date: run python tests/test_vllm_assertions.py"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
