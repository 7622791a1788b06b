"""Assertions of vLLM's tests of its OpenAI-compatible server that do not depend on the model,
asked of ours.

Each check names the test of vLLM (tests/entrypoints, 2026) whose assertions it makes.
docs/vllm_checks.md is made of them and of NOT_HELD: run this file to write it.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import openai
import pytest
import toolkit_lm_tiny
import torch
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.errors import as_api_error
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

PAGE = Path(__file__).parents[1] / "docs" / "vllm_checks.md"
CHECKS: dict[str, Callable[..., None]] = {}
CHAT = "openai/chat_completion"
COMPLETION = "openai/completion"
RESPONSES = "openai/responses"
NOT_HELD = {
    f"{CHAT}/test_chat.py::test_single_chat_session": (
        "`usage` equal to one without `prompt_tokens_details`: they are always there, as "
        "OpenAI gives them; vLLM needs a flag for them."
    ),
    "pooling/classify/test_online.py::test_pooling_not_supported": "`token_classify` of a classifier is served, and not refused.",
    "pooling/token_classify/test_online.py::test_pooling_not_supported": "`classify` of a classifier is served, and not refused.",
    "serve/exception_handling/test_validation_exception_handler.py::test_param_falls_back_to_loc": (
        "`param` is `messages`, as OpenAI has it, and not `body.messages`."
    ),
    f"{CHAT}/test_chat.py::test_long_seed; "
    f"{RESPONSES}/test_sampling_params.py::test_seed_bounds_validation; "
    "pooling/embed/test_online.py::test_params_not_supported; "
    "pooling/pooling/test_online.py::test_params_not_supported; "
    "serve/exception_handling/test_validation_exception_handler.py::"
    "test_small_input_is_still_reported_verbatim, test_union_loc_is_cleaned_in_the_message": (
        "Wrong values are refused and named, in plain words: pydantic's messages and names of "
        "errors are not repeated."
    ),
}
ELSEWHERE = {
    "serve/instrumentator/test_basic.py::test_request_cancellation": "tests/test_faults.py::test_a_client_that_leaves_frees_its_blocks",
    "serve/instrumentator/test_basic.py::test_health_check_engine_dead_error": (
        "tests/test_faults.py::test_a_dead_engine_is_told_and_ends_the_server"
    ),
    "serve/instrumentator/test_basic.py::test_server_load": "plugins/server/tests/test_other_routes.py::test_load_counts_what_is_under_way",
    f"{CHAT}/test_chat_error.py::test_chat_error_non_stream, test_chat_error_stream; "
    f"{COMPLETION}/test_completion_error.py::test_completion_error_non_stream, "
    "test_completion_error_stream": (
        "plugins/server/tests/test_app.py::test_internal_errors_tell_nothing"
    ),
}
"""Tests of ours that make the assertions, with servers that this file has not."""
LEFT_OUT = {
    "it asserts what a certain model says, or that it reasons": (
        f"{RESPONSES}/test_basic.py::test_simple_input, test_instructions, test_chat; "
        f"{RESPONSES}/test_simple.py::test_reasoning_item, "
        "test_streaming_reasoning_tokens_e2e, test_non_streaming_reasoning_tokens_e2e; "
        f"{RESPONSES}/test_function_call.py::test_function_tool_use; "
        f"{CHAT}/test_chat.py::test_structured_outputs_json_lora; "
        "pooling/classify/test_online.py::test_basic; pooling/embed/test_online.py::test_basic; "
        "pooling/pooling/test_online.py::test_basic; "
        "pooling/scoring/test_cross_encoder_online.py::test_basic; "
        "pooling/scoring/test_bi_encoder_online.py::test_basic"
    ),
    "it is about adapters (LoRA)": "openai/models/test_models.py::test_retrieve_lora_model",
    "it is about prompt embeddings or hidden states": (
        f"{COMPLETION}/test_prompt_validation.py::test_load_prompt_embeds, "
        "test_disable_prompt_embeds, "
        "test_inline_hidden_states_rejects_unsupported_http_shapes, "
        "test_inline_hidden_states_rejects_multiple_completion_prompts, "
        "test_inline_hidden_states_with_concurrent_streaming"
    ),
    "it calls vLLM's own functions or looks at its log, and nothing of it is seen by a client": (
        f"{CHAT}/test_chat_error.py::test_system_message_warns_on_image, "
        "test_user_message_accepts_image, "
        "test_system_message_warns_on_audio, test_system_message_warns_on_video; "
        f"{CHAT}/test_batched_chat_completions.py::test_batched_harmony_response_format_uses_structural_tag, "
        "test_batch_rejects_kv_transfer_prompt_token_ids, "
        "test_batched_parser_receives_prompt_token_ids; "
        f"{CHAT}/test_serving_chat.py::all; "
        f"{RESPONSES}/test_errors.py::all; {RESPONSES}/test_serving_stateless.py::all; "
        f"{RESPONSES}/test_protocol.py::all; "
        f"{RESPONSES}/test_structured_output.py::TestConstraintToContentFormat; "
        "serve/instrumentator/test_basic.py::test_health_decode_*, test_stat_logger_manager_*; "
        "serve/instrumentator/test_metrics.py::test_metrics_exist_run_batch; "
        "serve/tokenize/test_serving_tokenization.py::test_tokenize_chat_skips_mm_cache_for_renderer_only_path, "
        "test_tokenize_completion_skips_mm_cache_for_renderer_only_path, "
        "test_server_error_still_returns_internal_server_error; "
        "serve/exception_handling/test_validation_exception_handler.py::test_unassigned_request_id_ignores_header, "
        "test_validation_error_log_uses_assigned_id, "
        "test_param_fallback_does_not_crash_on_non_dict_error, test_strips_internal_markers, "
        "test_all_internal_falls_back_to_raw_join; "
        "serve/exception_handling/test_error_sanitization.py::all"
    ),
}
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "engine_process": False,
    "num_kv_blocks": 256,
    "max_num_seqs": 16,
}
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
    "matryoshka": {**LLAMA, "matryoshka_dimensions": [8, 16]},
    "classifier": {**BERT, "id2label": {"0": "Default", "1": "Spoiled"}},
    "scorer": {**BERT, "id2label": {"0": "LABEL_0"}},
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}bot: {% endif %}"
)
TALK = [
    {"role": "system", "content": "you are a helpful assistant"},
    {"role": "user", "content": "what is 1+1?"},
]
LONG_TALK = [
    *TALK,
    {"role": "assistant", "content": "It is two."},
    {"role": "user", "content": "Sure?"},
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "on": {"type": "boolean"}},
    "required": ["name", "on"],
    "additionalProperties": False,
}
# Values after ten requests with a prompt of five tokens and ten of output each.
METRICS = {
    **{
        f"{name}_count": 10
        for name in (
            *(
                "time_to_first_token_seconds",
                "e2e_request_latency_seconds",
                "request_queue_time_seconds",
                "request_inference_time_seconds",
            ),
            *(
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
                "request_num_preemptions",
                "request_prompt_tokens",
            ),
            *("request_generation_tokens", "request_params_n", "request_params_max_tokens"),
        )
    },
    "inter_token_latency_seconds_count": 90,
    "request_prompt_tokens_sum": 50,
    "request_generation_tokens_sum": 100,
    "request_params_max_tokens_sum": 100,
    "prompt_tokens_total": 50,
    "generation_tokens_total": 100,
    "request_success_total": 10,
}
GAUGES = (
    *(
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "cache_config_info",
    ),
    *(
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "num_preemptions_total",
        "iteration_tokens_total_bucket",
    ),
)
FP8 = (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2))
PROMPT = "Once upon a time there was"
IDS = [5, 6, 7, 8, 9]


class Profile(BaseModel):
    name: Literal["Ada", "Alan"]
    on: bool


class Asked:
    """A server over one engine, asked by OpenAI's client and over plain HTTP."""

    def __init__(self, http: TestClient, model: str) -> None:
        self.http = http
        self.model = model
        self.openai = openai.OpenAI(
            http_client=http, base_url="http://testserver/v1", api_key="none", max_retries=0
        )

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
        return self.openai.completions.create(
            **{"model": self.model, "prompt": IDS, "max_tokens": 5, "temperature": 0.0, **options}
        )

    def respond(self, **options: Any) -> Any:
        return self.openai.responses.create(**{"model": self.model, "temperature": 0.0, **options})

    def metrics(self) -> dict[str, float]:
        """Metrics by name, without labels: values of one name are added."""
        found: Counter[str] = Counter()
        for name, value in re.findall(
            r"^(vllm:\w+)(?:\{.*\})? (\S+)$", self.http.get("/metrics").text, re.MULTILINE
        ):
            found[name] += float(value)
        return found

    def chat(self, **options: Any) -> Any:
        return self.openai.chat.completions.create(
            **{
                "model": self.model,
                "messages": TALK,
                "max_completion_tokens": 5,
                "temperature": 0.0,
                **options,
            }
        )


def check(*tests: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a check under the names of vLLM's tests, of one file or several."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = "; ".join(tests)
        assert name not in CHECKS
        CHECKS[name] = function
        return function

    return register


IN_OWN_WORDS: dict[str, Callable[..., None]] = {}


def in_own_words(function: Callable[..., None]) -> Callable[..., None]:
    """Registers a check of what tests of NOT_HELD ask, with words of ours in place of vLLM's."""
    IN_OWN_WORDS[function.__name__] = function
    return function


def each(name: str) -> list[tuple[str, str]]:
    """File and function of each test that a name names."""
    return [
        (file, function)
        for part in name.split("; ")
        for file, _, functions in [part.partition("::")]
        for function in functions.split(", ")
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Callable[[str], Asked]]:
    """served(name): the server of `tiny`, or of one of CONFIGS with random weights."""
    made: dict[str, tuple[Asked, AsyncLLM]] = {}

    def get(name: str) -> Asked:
        if name not in made:
            options: dict[str, Any] = {"model": "tiny", "served_model_name": name}
            if name == "roomy":
                options |= {"max_logprobs": vocabulary_size()}
            elif name != "tiny":
                folder = tmp_path_factory.mktemp(name)
                write_checkpoint(folder, CONFIGS[name])
                options = {
                    "model": str(folder),
                    "load_format": "dummy",
                    "chat_template": TEMPLATE,
                    "served_model_name": name,
                }
                options |= {"convert": "embed"} if name in ("embedder", "matryoshka") else {}
            metrics = Metrics()
            engine = AsyncLLM(VllmConfig.make(**SMALL, **options), plugins=[metrics])
            wanted = ServerOptions(
                tokenizer_info=True, max_stored_responses=100, force_include_usage=name == "roomy"
            )
            http = TestClient(create_app(engine, wanted, metrics=metrics))
            http.__enter__()
            made[name] = Asked(http, name), engine
        return made[name][0]

    yield get
    for asked, engine in made.values():
        asked.http.__exit__()
        engine.close()


def vocabulary_size() -> int:
    size: int = json.loads(
        (Path(toolkit_lm_tiny.__file__).parent / "checkpoint" / "config.json").read_text()
    )["vocab_size"]
    return size


def are_nested(events: list[Any]) -> None:
    """Each event that ends something ends what began last: OpenAI's items, parts, texts and
    arguments."""
    begun: list[str] = []
    for kind in (event.type.removeprefix("response.") for event in events):
        if kind.endswith((".added", ".delta")) or kind == "created":
            if not (kind.endswith(".delta") and begun[-1] == kind):
                begun.append(kind)
        elif kind.endswith(".done") or kind == "completed":
            name, _, _ = kind.rpartition(".")
            assert begun.pop() in (
                {"created"} if kind == "completed" else {f"{name}.added", f"{name}.delta"}
            ), kind
    assert begun == []


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(
            vocab={letter: number for number, letter in enumerate(["<s>", "</s>", *letters])},
            merges=[],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pair = "<s> $A </s> $B:1 </s>:1"
    marks = [("<s>", 0), ("</s>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=marks
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
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


@check(
    "openai/completion/test_completion.py::test_completion_truncation_side_controls_prompt_truncation"
)
def truncation_sides(tiny: Asked) -> None:
    ids = list(range(5, 13))
    wanted = {"return_token_ids": True, "truncate_prompt_tokens": 4}
    for side, kept in (("right", ids[:4]), ("left", ids[-4:]), (None, ids[-4:])):
        [choice] = tiny.complete(
            prompt=ids, max_tokens=1, extra_body={**wanted, "truncation_side": side}
        ).choices
        assert choice.prompt_token_ids == kept
    [choice] = tiny.complete(
        prompt=PROMPT, max_tokens=1, extra_body={**wanted, "truncation_side": "right"}
    ).choices
    assert choice.prompt_token_ids == tiny.ok("/tokenize", prompt=PROMPT)["tokens"][:4]
    assert "plain completions" in tiny.refused(
        "/v1/chat/completions", messages=TALK, truncate_prompt_tokens=4, truncation_side="right"
    )
    for more in ({"suffix": "a"}, {"truncate_prompt_tokens": -1}):
        tiny.refused(
            "/v1/completions",
            **{"prompt": PROMPT, "truncate_prompt_tokens": 4, "truncation_side": "right", **more},
        )


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
    assert (
        all(choice.finish_reason for choice in reply.choices)
        and len({choice.text for choice in reply.choices}) == 3
    )
    assert all(1 <= len(choice.logprobs.tokens) <= 50 for choice in reply.choices)


@check("openai/completion/test_completion.py::test_parallel_streaming")
def parallel_streaming(tiny: Asked) -> None:
    choices = [
        chunk.choices[0]
        for chunk in tiny.complete(
            prompt=PROMPT, n=3, max_tokens=50, temperature=1.0, stream=True, seed=42
        )
    ]
    assert Counter(choice.index for choice in choices if choice.finish_reason) == {0: 1, 1: 1, 2: 1}
    texts = {
        index: "".join(choice.text for choice in choices if choice.index == index)
        for index in range(3)
    }
    assert (
        len(set(texts.values())) == 3
        and max(Counter(choice.index for choice in choices).values()) <= 50
    )


@check("openai/completion/test_completion.py::test_completion_stream_options")
def completion_stream_options(tiny: Asked) -> None:
    for options in (
        {"include_usage": False},
        {"include_usage": False, "continuous_usage_stats": True},
        {},
    ):
        assert all(
            chunk.usage is None for chunk in tiny.complete(stream=True, stream_options=options)
        )
    for continuous in (False, True):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        *chunks, last = tiny.complete(stream=True, stream_options=options)
        assert last.choices == [] and all(
            (chunk.usage is not None) == continuous for chunk in chunks
        )
        for chunk in [*(chunks if continuous else []), last]:
            assert chunk.usage.prompt_tokens > 0 and chunk.usage.completion_tokens > 0
            assert (
                chunk.usage.total_tokens
                == chunk.usage.prompt_tokens + chunk.usage.completion_tokens
            )
    for name in ("include_usage", "continuous_usage_stats"):
        for value in (None, True):
            with pytest.raises(openai.BadRequestError):
                tiny.complete(stream=False, stream_options={name: value})


@check("openai/completion/test_completion.py::test_batch_completions")
def batch_completions(tiny: Asked) -> None:
    for prompts in ([PROMPT] * 2, [IDS] * 2):
        first, second = tiny.complete(prompt=prompts).choices
        assert first.text == second.text
        texts = [
            choice.text
            for choice in tiny.complete(
                prompt=prompts, n=2, extra_body={"use_beam_search": True}
            ).choices
        ]
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
            text = (
                prompt
                if isinstance(prompt, str)
                else tiny.ok("/detokenize", tokens=prompt)["prompt"]
            )
            assert choice.text.startswith(text)
            logprobs = choice.logprobs
            assert (
                len(logprobs.text_offset)
                == len(logprobs.tokens)
                == len(logprobs.token_logprobs)
                == len(logprobs.top_logprobs)
                > 5
            )
            assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
            assert all(
                max(count, 1) <= len(table) <= count + 1 for table in logprobs.top_logprobs[1:]
            )


@check(
    "openai/completion/test_completion.py::test_invalid_json_schema, test_invalid_regex, "
    "test_invalid_grammar"
)
def invalid_structured_outputs(tiny: Asked) -> None:
    schema = {
        "type": "object",
        "properties": {"brand": {"type": "string"}, "foo": "bar"},
        "required": ["brand"],
    }
    for wanted in ({"json": schema}, {"regex": r"[.*"}, {"grammar": "root ::= missing rule ("}):
        with pytest.raises(openai.BadRequestError):
            tiny.complete(extra_body={"structured_outputs": wanted})


@check(
    "openai/completion/test_empty_prompt_list.py::test_empty_prompt_list_rejected, "
    "test_nonempty_prompt_list_ok"
)
def empty_prompt(tiny: Asked) -> None:
    for prompt in ("", [], None):
        with pytest.raises(openai.BadRequestError):
            tiny.complete(prompt=prompt, extra_body={"prompt_embeds": []})


@check("openai/completion/test_prompt_validation.py::test_out_of_vocab_token_ids")
def out_of_vocab_token_ids(tiny: Asked) -> None:
    with pytest.raises(openai.BadRequestError, match="out of vocabulary"):
        tiny.complete(prompt=[999_999])


@check(
    "openai/basic/test_return_token_ids.py::test_basic_completion_with_emoji, "
    "test_chat_completion_with_emoji_and_token_ids, test_chat_completion_with_tool_use"
)
def return_token_ids(tiny: Asked) -> None:
    wanted = {"return_token_ids": True}
    [choice] = tiny.complete(prompt=PROMPT, extra_body=wanted).choices
    assert (
        choice.prompt_token_ids == tiny.ok("/tokenize", prompt=PROMPT)["tokens"]
        and len(choice.token_ids) == 5
    )
    choices = [
        chunk.choices[0] for chunk in tiny.complete(prompt=PROMPT, extra_body=wanted, stream=True)
    ]
    assert choices[0].prompt_token_ids == choice.prompt_token_ids
    assert [token for one in choices for token in one.token_ids] == choice.token_ids
    reply = tiny.chat(extra_body=wanted)
    assert (
        reply.prompt_token_ids == tiny.ok("/tokenize", messages=TALK)["tokens"]
        and reply.choices[0].token_ids
    )
    plain = tiny.chat()
    assert plain.prompt_token_ids is None and plain.choices[0].token_ids is None
    first, *chunks = tiny.chat(extra_body=wanted, stream=True)
    assert first.prompt_token_ids == reply.prompt_token_ids
    assert not any("prompt_token_ids" in chunk.model_dump() for chunk in chunks)
    found = [
        token for chunk in chunks for token in chunk.choices[0].model_dump().get("token_ids") or ()
    ]
    assert found == reply.choices[0].token_ids


@check("openai/basic/test_return_token_ids.py::test_comparison_with_prompt_logprobs_and_logprobs")
def token_ids_as_tokens(tiny: Asked) -> None:
    named = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    [choice] = tiny.complete(
        prompt=PROMPT, echo=True, logprobs=1, extra_body={**named, "prompt_logprobs": 1}
    ).choices
    tokens = [int(token.removeprefix("token_id:")) for token in choice.logprobs.tokens]
    assert (
        tokens == choice.prompt_token_ids + choice.token_ids and choice.prompt_logprobs is not None
    )
    chunks = [
        chunk.choices[0]
        for chunk in tiny.complete(prompt=PROMPT, logprobs=1, stream=True, extra_body=named)
    ]
    streamed = [
        int(token.removeprefix("token_id:")) for one in chunks for token in one.logprobs.tokens
    ]
    assert (
        chunks[0].prompt_token_ids
        and streamed == [token for one in chunks for token in one.token_ids] == choice.token_ids
    )


# Chats


@check("openai/chat_completion/test_chat_echo.py::test_prompt_logprobs")
def logprobs_of_the_whole_vocabulary(roomy: Asked) -> None:
    """With `--max-logprobs` of the vocabulary's size."""
    size = vocabulary_size()
    found = roomy.chat(max_completion_tokens=1, extra_body={"prompt_logprobs": -1}).prompt_logprobs
    assert len(found) > 1 and {len(table) for table in found[1:]} == {size}
    [entry] = (
        roomy.chat(max_completion_tokens=1, logprobs=True, top_logprobs=-1)
        .choices[0]
        .logprobs.content
    )
    assert len(entry.top_logprobs) == size
    assert sum(np.exp(one.logprob) for one in entry.top_logprobs) == pytest.approx(1, abs=1e-3)


@check(
    "openai/chat_completion/test_enable_force_include_usage.py::test_chat_with_enable_force_include_usage"
)
def usage_that_nobody_asked_for(roomy: Asked) -> None:
    """With `--force-include-usage`."""
    for stream in (
        roomy.chat(stream=True, max_completion_tokens=4),
        roomy.complete(stream=True, max_tokens=4),
    ):
        counts = [chunk.usage.completion_tokens for chunk in stream]
        assert counts == sorted(counts) and counts[-1] == 4


@check(
    "openai/chat_completion/test_chat.py::test_no_logprobs_chat, test_zero_logprobs_chat, "
    "test_some_logprobs_chat"
)
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


@check(
    "openai/chat_completion/test_chat.py::test_prompt_logprobs_chat, "
    "test_more_than_one_prompt_logprobs_chat"
)
def prompt_logprobs_chat(tiny: Asked) -> None:
    with pytest.raises(openai.BadRequestError):
        tiny.chat(messages=LONG_TALK, extra_body={"prompt_logprobs": -1})
    assert tiny.chat(messages=LONG_TALK).prompt_logprobs is None
    assert len(tiny.chat(messages=LONG_TALK, extra_body={"prompt_logprobs": 0}).prompt_logprobs) > 0
    one, two = [
        tiny.chat(messages=LONG_TALK, extra_body={"prompt_logprobs": count}).prompt_logprobs
        for count in (1, 2)
    ]
    assert all(
        count <= len(table) <= count + 1
        for count, found in ((1, one), (2, two))
        for table in found[1:]
    )


@check("openai/chat_completion/test_chat.py::test_chat_streaming")
def chat_streaming(tiny: Asked) -> None:
    [whole] = tiny.chat(max_completion_tokens=4).choices
    choices = [chunk.choices[0] for chunk in tiny.chat(max_completion_tokens=4, stream=True)]
    assert {choice.delta.role for choice in choices if choice.delta.role} == {"assistant"}
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == [
        whole.finish_reason
    ]
    assert choices[-1].finish_reason == whole.finish_reason
    assert choices[-1].delta.content or whole.finish_reason != "length"
    assert "".join(choice.delta.content or "" for choice in choices) == whole.message.content


@check("openai/chat_completion/test_chat.py::test_chat_completion_stream_options")
def chat_stream_options(tiny: Asked) -> None:
    options = {"extra_body": {"min_tokens": 10}, "max_completion_tokens": 10, "stream": True}
    assert all(
        chunk.usage is None
        for chunk in tiny.chat(**options, stream_options={"include_usage": False})
    )
    *chunks, last = tiny.chat(
        **options, stream_options={"include_usage": True, "continuous_usage_stats": False}
    )
    assert (
        all(chunk.usage is None for chunk in chunks)
        and last.choices == []
        and last.usage.completion_tokens == 10
    )
    seen = 0
    for chunk in tiny.chat(
        **options, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ):
        usage = chunk.usage
        assert (
            usage.prompt_tokens >= 0
            and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        )
        assert (
            seen == 0
            or usage.completion_tokens > seen
            or (not chunk.choices and usage.completion_tokens == seen)
        )
        seen = usage.completion_tokens
    assert seen == 10
    for value in (None, True):
        with pytest.raises(openai.BadRequestError):
            tiny.chat(stream=False, stream_options={"include_usage": value})
    more = {**options, "extra_body": {"min_tokens": 10, "min_characters": 10}}
    assert (
        len(
            "".join(
                chunk.choices[0].delta.content
                for chunk in tiny.chat(**more, stream_options={"include_usage": False})
            )
        )
        >= 10
    )


@check(
    "openai/chat_completion/test_chat.py::test_structured_outputs_choice_chat, "
    "test_structured_outputs_regex_chat"
)
def structured_outputs_chat(tiny: Asked) -> None:
    words = ["Python", "Rust", "C++"]
    reply = tiny.chat(
        extra_body={"structured_outputs": {"choice": words}}, max_completion_tokens=10
    )
    assert reply.choices[0].message.content in words
    reply = tiny.chat(
        extra_body={"structured_outputs": {"regex": r"[0-9]{3}"}}, max_completion_tokens=10
    )
    assert reply.choices[0].message.content.isdigit() and len(reply.choices[0].message.content) == 3


@check("openai/chat_completion/test_chat.py::test_structured_outputs_type_error")
def structured_outputs_type_error(tiny: Asked) -> None:
    with pytest.raises(openai.BadRequestError):
        tiny.chat(extra_body={"structured_outputs": {"regex": {1: "Python", 2: "C++"}}})


@check("openai/chat_completion/test_chat.py::test_structured_outputs_choice_chat_logprobs")
def structured_outputs_logprobs(tiny: Asked) -> None:
    reply = tiny.chat(
        logprobs=True, top_logprobs=5, extra_body={"structured_outputs": {"choice": ["one", "two"]}}
    )
    assert all(one.logprob >= -9999.0 for one in reply.choices[0].logprobs.content[0].top_logprobs)


@check(
    "openai/chat_completion/test_chat.py::test_response_format_json_schema, "
    "test_response_format_text"
)
def response_formats(tiny: Asked) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "foo_test", "schema": schema}}
    content = (
        tiny.chat(response_format=wanted, max_completion_tokens=100).choices[0].message.content
    )
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
        first, second = [
            tiny.chat(messages=[{"role": role, "content": one}], seed=0).choices[0].message.content
            for one in contents
        ]
        assert first == second


@check("openai/chat_completion/test_chat.py::test_invocations")
def invocations_chat(tiny: Asked) -> None:
    body = {"messages": TALK, "max_completion_tokens": 5, "temperature": 0.0, "logprobs": False}
    one = tiny.ok("/v1/chat/completions", **body)
    other = tiny.ok("/invocations", **body)
    assert one.keys() == other.keys() and one["choices"] == other["choices"]


@check(
    "openai/chat_completion/test_chat.py::test_chat_completion_n_parameter_non_streaming, "
    "test_chat_completion_n_parameter_streaming, "
    "test_chat_completion_n_with_seed, test_chat_completion_n_equals_1"
)
def chat_n(tiny: Asked) -> None:
    for n in (1, 3):
        choices = tiny.chat(n=n, temperature=0.7, seed=42, max_completion_tokens=15).choices
        assert [choice.index for choice in choices] == list(range(n)) and all(
            choice.message.content for choice in choices
        )
    texts = ["", ""]
    for chunk in tiny.chat(n=2, temperature=0.7, stream=True, max_completion_tokens=15):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(texts)


@check(
    "openai/chat_completion/test_chat_logit_bias_validation.py::test_chat_logit_bias_valid, "
    "test_chat_logit_bias_invalid, "
    "test_chat_logit_bias_non_integer_key, test_chat_logit_bias_non_numeric_value, "
    "test_chat_logit_bias_multiple_non_integer_keys"
)
def chat_logit_bias(tiny: Asked) -> None:
    size = vocabulary_size()
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


@check(
    "openai/chat_completion/test_chat_echo.py::test_chat_session_with_echo_and_continue_final_message"
)
def chat_echo(tiny: Asked) -> None:
    saying = "Paris is the"
    messages = [*TALK, {"role": "assistant", "content": saying}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    whole, bare = [
        tiny.chat(messages=messages, extra_body={**options, "echo": echo}).choices[0].message
        for echo in (True, False)
    ]
    assert whole.role == "assistant" and whole.content == saying + bare.content
    chunks = tiny.chat(messages=messages, extra_body={**options, "echo": True}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.content


@check(
    "openai/chat_completion/test_non_object_body_validation.py::test_chat_completion_request_rejects_non_object_body"
)
def non_object_body(tiny: Asked) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        for body in ([], "text", None, 5):
            reply = tiny.http.post(path, json=body)
            assert reply.status_code == 400 and "error" in reply.json()


@check(
    "openai/chat_completion/test_non_object_body_validation.py::test_chat_completion_request_cache_salt_still_validated_on_dict"
)
def empty_cache_salt(tiny: Asked) -> None:
    assert "cache_salt" in tiny.refused("/v1/chat/completions", messages=TALK, cache_salt="")


@check(
    "openai/chat_completion/test_chat_error.py::test_system_message_accepts_text, "
    "test_system_message_accepts_text_array",
)
def chat_bodies(tiny: Asked) -> None:
    for content in (TALK[0]["content"], [{"type": "text", "text": TALK[0]["content"]}]):
        assert (
            tiny.chat(messages=[{"role": "system", "content": content}, TALK[1]])
            .choices[0]
            .message.content
            is not None
        )


@check(
    "openai/chat_completion/test_chat_error.py::test_json_schema_response_format_missing_schema",
    "openai/completion/test_completion_error.py::test_json_schema_response_format_missing_schema",
)
def no_schema(tiny: Asked) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": TALK}),
        ("/v1/completions", {"prompt": PROMPT}),
    ):
        assert re.search(
            "json_schema.*must be provided",
            tiny.refused(path, **body, response_format={"type": "json_schema"}),
        )


@check(
    "openai/completion/test_completion_error.py::test_negative_prompt_token_ids_nested, "
    "test_negative_prompt_token_ids_flat"
)
def completion_bodies(tiny: Asked) -> None:
    for prompt in ([[-1]], [-1]):
        assert "greater than or equal to 0" in tiny.refused("/v1/completions", prompt=prompt)


@check(
    "openai/chat_completion/test_chat_stop_token_ids_validation.py::test_chat_stop_token_ids_valid, "
    "test_chat_stop_token_ids_out_of_vocab, "
    "test_chat_stop_token_ids_negative"
)
def stop_token_ids(tiny: Asked) -> None:
    size = vocabulary_size()
    assert (
        tiny.chat(extra_body={"stop_token_ids": [size - 1]}).choices[0].message.content is not None
    )
    message = tiny.refused("/v1/chat/completions", messages=TALK, stop_token_ids=[size + 1])
    assert str(size + 1) in message and str(size) in message
    tiny.refused("/v1/chat/completions", messages=TALK, stop_token_ids=[-1])


@check(
    "openai/chat_completion/test_chat.py::test_structured_outputs_json_chat, "
    "test_response_format_json_object"
)
def json_chats(tiny: Asked) -> None:
    content = (
        tiny.chat(extra_body={"structured_outputs": {"json": SCHEMA}}, max_completion_tokens=200)
        .choices[0]
        .message.content
    )
    jsonschema.validate(json.loads(content), SCHEMA)
    for _ in range(2):
        choice = tiny.chat(
            response_format={"type": "json_object"}, max_completion_tokens=300
        ).choices[0]
        assert choice.finish_reason == "length" or isinstance(
            json.loads(choice.message.content), dict
        )


@check(
    "openai/chat_completion/test_chat.py::test_chat_completion_request_n_parameter_to_sampling_params, "
    "test_chat_completion_request_n_parameter_default"
)
def chat_n_by_default(tiny: Asked) -> None:
    assert [len(tiny.chat(**more).choices) for more in ({"n": 3}, {})] == [3, 1]


@check(
    "openai/chat_completion/test_completion_with_function_calling.py::test_named_tool_use, "
    "test_inconsistent_tool_choice_and_tools"
)
def named_tools(tiny: Asked) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": "profile", "description": "A profile.", "parameters": SCHEMA},
        }
    ]
    choice = {"type": "function", "function": {"name": "profile"}}
    options = {"tools": tools, "tool_choice": choice, "max_completion_tokens": 300}
    message = tiny.chat(**options).choices[0].message
    assert not message.content
    jsonschema.validate(json.loads(message.tool_calls[0].function.arguments), SCHEMA)
    choices = [chunk.choices[0] for chunk in tiny.chat(**options, stream=True)]
    assert not any(one.delta.content for one in choices) and {
        one.delta.role for one in choices if one.delta.role
    } == {"assistant"}
    assert [one.finish_reason is not None for one in choices] == [False] * (len(choices) - 1) + [
        True
    ]
    calls = [call for one in choices for call in one.delta.tool_calls or ()]
    jsonschema.validate(
        json.loads("".join(call.function.arguments or "" for call in calls)), SCHEMA
    )
    other = {"type": "function", "function": {"name": "undefined"}}
    for body in (
        {"tool_choice": choice},
        {"tools": tools, "tool_choice": other},
        {"tools": tools, "tool_choice": {}},
    ):
        tiny.refused("/v1/chat/completions", messages=TALK, **body)


@check(
    "openai/chat_completion/test_completion_with_function_calling.py::test_function_tool_use, "
    "test_no_args_tool_call"
)
def tools(tiny: Asked) -> None:
    """But for its reasoning, and for calls that the model may leave out."""
    # A call that its tokens do not finish is left out, so that none may go on for ever.
    none = {"type": "object", "properties": {}, "required": [], "additionalProperties": False}
    for parameters in (SCHEMA, none):
        tools = [{"type": "function", "function": {"name": "profile", "parameters": parameters}}]
        for choice in ("required", {"type": "function", "function": {"name": "profile"}}):
            options = {"tools": tools, "tool_choice": choice, "max_completion_tokens": 300}
            message = tiny.chat(**options).choices[0].message
            assert message.tool_calls
            assert [
                call
                for chunk in tiny.chat(**options, stream=True)
                for call in chunk.choices[0].delta.tool_calls or ()
            ]
    for arguments in ("{}", ""):
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "profile", "arguments": arguments},
        }
        talk = [
            *TALK,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
        ]
        assert (
            tiny.chat(messages=talk, max_completion_tokens=10).choices[0].message.content
            is not None
        )


@check(
    "openai/chat_completion/test_completion_with_function_calling.py::test_max_tokens_with_tool_choice_required"
)
def too_few_tokens_for_tools(tiny: Asked) -> None:
    tools = [{"type": "function", "function": {"name": "profile", "parameters": SCHEMA}}]
    for choice in ("required", {"type": "function", "function": {"name": "profile"}}):
        [one] = tiny.chat(tools=tools, tool_choice=choice, max_completion_tokens=1).choices
        assert one.finish_reason == "length" and not one.message.tool_calls


@check(
    "openai/chat_completion/test_batched_chat_completions.py::test_batched_chat_completions, "
    "test_batched_chat_completions_with_json_schema, "
    "test_batched_chat_completions_logprobs_not_token_id_placeholders, "
    "test_batched_chat_completions_return_tokens_as_token_ids, "
    "test_batched_echo_does_not_prepend_user_prompt, "
    "test_batched_echo_prepends_matching_assistant_prefix"
)
def batched_chats(tiny: Asked) -> None:
    path = "/v1/chat/completions/batch"
    talks = [TALK, LONG_TALK]
    options = {"max_tokens": 300, "temperature": 0, "echo": True}
    one, other = tiny.ok(path, messages=talks, **options)["choices"]
    assert [one["index"], other["index"]] == [0, 1]
    for talk, choice in zip(talks, (one, other), strict=True):
        assert (
            choice["message"]["content"]
            == tiny.chat(messages=talk, max_completion_tokens=300).choices[0].message.content
        )
    wanted = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
    }
    for choice in tiny.ok(path, messages=talks, response_format=wanted, **options)["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
    for more, named in (
        ({"return_token_ids": True}, False),
        ({"return_tokens_as_token_ids": True}, True),
    ):
        [choice] = tiny.ok(path, messages=[TALK], logprobs=True, top_logprobs=1, **options, **more)[
            "choices"
        ]
        assert {
            token["token"].startswith("token_id:")
            for entry in choice["logprobs"]["content"]
            for token in (entry, *entry["top_logprobs"])
        } == {named}
    begun = [*TALK, {"role": "assistant", "content": "Paris is "}]
    final = {"continue_final_message": True, "add_generation_prompt": False}
    for choice in tiny.ok(path, messages=[begun, begun], n=2, **options, **final)["choices"]:
        assert choice["message"]["content"].startswith("Paris is ")


# Responses


@check(
    "openai/responses/test_simple.py::test_basic, test_max_tokens, test_extra_sampling_params, "
    "test_input_history_openai_shape_e2e, "
    "test_input_history_openresponses_shape_e2e, test_multiturn_history_replay_without_ids_e2e"
)
def responses(tiny: Asked) -> None:
    reply = tiny.respond(input="What is the capital of France?", reasoning={"effort": "none"})
    assert reply.status == "completed" and reply.incomplete_details is None
    cut = tiny.respond(input="Once upon a time", reasoning={"effort": "low"}, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    extra = {"top_k": 40, "repetition_penalty": 1.2, "seed": 42}
    drawn = tiny.respond(
        input="Write", temperature=0.7, top_p=0.9, max_output_tokens=50, extra_body=extra
    )
    assert drawn.status in ("completed", "incomplete") and drawn.output[0].content[0].text
    ask = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Is it?"}]}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "Yes."}],
    }
    thought = {"type": "reasoning", "summary": [], "encrypted_content": None}
    told = [{"id": "msg_1", "status": "completed"}, {"id": "rs_1", "status": "completed"}]
    for said_more, thought_more in (told, ({}, {})):
        again = tiny.respond(
            input=[ask, {**said, **said_more}, {**thought, **thought_more}, ask],
            max_output_tokens=200,
        )
        assert again.status in ("completed", "incomplete") and again.output_text is not None


@check("openai/responses/test_simple.py::test_streaming_output_consistency, test_streaming_types")
def response_events(tiny: Asked) -> None:
    events = list(
        tiny.respond(
            input="What is the capital of France?",
            stream=True,
            tools=[],
            background=False,
            reasoning={"effort": "low"},
        )
    )
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == events[-1].response.output_text
    )
    assert [event.type for event in events].index("response.in_progress") == 1
    are_nested(events)


@check(
    "openai/responses/test_simple.py::test_streaming_logprobs",
    "openai/responses/test_basic.py::test_logprobs",
)
def response_logprobs(tiny: Asked) -> None:
    options = {
        "input": "What is the capital of France?",
        "top_logprobs": 3,
        "include": ["message.output_text.logprobs"],
    }
    events = list(tiny.respond(**options, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert deltas and events[-1].response.status == "completed"
    for delta in deltas:
        assert delta.logprobs and all(
            one.logprob <= 0 and 0 < len(one.top_logprobs) <= 3 for one in delta.logprobs
        )
    assert len(tiny.respond(**options).output[-1].content[-1].logprobs[0].top_logprobs) == 3


@check("openai/responses/test_basic.py::test_chat_with_input_type, test_streaming")
def response_inputs(tiny: Asked) -> None:
    content = [{"type": "input_text", "text": "What is the capital of France?"}]
    assert tiny.respond(input=[{"role": "user", "content": content}]).status == "completed"
    events = list(tiny.respond(input=[{"role": "user", "content": content}], stream=True))
    assert {"response.created", "response.output_text.delta", "response.completed"} <= {
        event.type for event in events
    }


@check(
    "openai/responses/test_structured_output.py::test_structured_output, "
    "test_structured_output_with_parse"
)
def structured_responses(tiny: Asked) -> None:
    """But for what the model says."""
    wanted = {
        "type": "json_schema",
        "name": "event",
        "schema": SCHEMA,
        "description": "An event.",
        "strict": True,
    }
    reply = tiny.respond(input=TALK, text={"format": wanted}, max_output_tokens=300)
    jsonschema.validate(json.loads(reply.output[-1].content[0].text), SCHEMA)
    parsed = tiny.openai.responses.parse(
        model=tiny.model,
        instructions="Extract.",
        input="On Friday.",
        text_format=Profile,
        temperature=0,
    )
    assert isinstance(parsed.output_parsed, Profile)


@check(
    "openai/responses/test_function_call.py::test_named_tool_use, "
    "test_function_calling_with_streaming_expected_arguments, "
    "test_function_calling_with_streaming_types"
)
def functions_of_responses(tiny: Asked) -> None:
    """The model calls where it must."""
    tool = {
        "type": "function",
        "name": "profile",
        "description": "A profile.",
        "parameters": SCHEMA,
        "strict": True,
    }
    options = {
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "profile"},
        "max_output_tokens": 300,
    }
    [call] = [
        item for item in tiny.respond(input=TALK, **options).output if item.type == "function_call"
    ]
    assert call.name == "profile"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    assert tiny.respond(input=[*TALK, call, told], max_output_tokens=50).output_text is not None
    events = list(tiny.respond(input=TALK, stream=True, **options))
    [begun] = [
        event.item
        for event in events
        if event.type == "response.output_item.added" and event.item.type == "function_call"
    ]
    [done] = [
        event.item
        for event in events
        if event.type == "response.output_item.done" and event.item.type == "function_call"
    ]
    streamed = "".join(
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    )
    assert begun.name == done.name == "profile" and streamed == done.arguments
    are_nested(events)


@check("openai/responses/test_function_call.py::test_max_tokens_with_tool_choice_required")
def too_few_tokens_for_functions(tiny: Asked) -> None:
    """But for the reasoning that is there in place of a call."""
    tool = {"type": "function", "name": "profile", "parameters": SCHEMA, "strict": True}
    reply = tiny.respond(input=TALK, tools=[tool], tool_choice="required", max_output_tokens=3)
    assert all(item.type != "function_call" for item in reply.output)
    assert reply.incomplete_details.reason == "max_output_tokens"


@check(
    "openai/responses/test_sampling_params.py::test_basic_sampling_params, "
    "test_extra_sampling_params, test_stop_string_conversion, "
    "test_default_values, test_structured_outputs_passed_through, "
    "test_text_format_json_object_enables_structured_outputs"
)
def parameters_of_responses(tiny: Asked) -> None:
    text = tiny.respond(input="What is the capital of France?").output_text
    for stop in (text.split()[2], [text.split()[2]]):
        assert text.startswith(
            tiny.respond(
                input="What is the capital of France?", extra_body={"stop": stop}
            ).output_text.rstrip()
        )
    reply = tiny.respond(
        input="hi",
        max_output_tokens=9,
        extra_body={"ignore_eos": True, "repetition_penalty": 1.2, "seed": 42, "top_k": 50},
    )
    assert reply.usage.output_tokens == 9
    wanted = {"structured_outputs": {"choice": ["one", "two"]}}
    assert tiny.respond(input="hi", extra_body=wanted).output_text in ("one", "two")
    cut = tiny.respond(input="hi", text={"format": {"type": "json_object"}}, max_output_tokens=300)
    assert cut.status == "incomplete" or isinstance(json.loads(cut.output_text), dict)


@check("openai/responses/test_sampling_params.py::test_structured_outputs_and_json_schema_conflict")
def two_formats(tiny: Asked) -> None:
    both = {
        "text": {"format": {"type": "json_schema", "name": "test", "schema": {"type": "object"}}}
    }
    message = tiny.refused(
        "/v1/responses", input="hi", structured_outputs={"choice": ["one"]}, **both
    )
    assert "Cannot specify both structured_outputs and text.format" in message


@in_own_words
def long_seeds(tiny: Asked) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": TALK, "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ):
        for seed, word in ((-(2**63) - 1, "at least"), (2**63, "at most")):
            assert word in tiny.refused(path, **body, seed=seed)
        for seed in (-(2**63), 2**63 - 1, -1):
            one, other = (tiny.ok(path, **body, seed=seed, temperature=1.0) for _ in range(2))
            assert one["usage"] == other["usage"]


@check(
    "openai/responses/test_stateful.py::test_background_error, test_background, "
    "test_background_cancel"
)
def background(tiny: Asked) -> None:
    message = tiny.refused("/v1/responses", input="hi", background=True, store=False)
    assert "background can only be used when `store` is true" in message

    def state(reply: Any, left: set[str]) -> Any:
        deadline = time.monotonic() + 30
        while reply.status in left and time.monotonic() < deadline:
            time.sleep(0.01)
            reply = tiny.openai.responses.retrieve(reply.id)
        return reply

    reply = tiny.respond(input="Hello!", background=True)
    assert reply.status == "queued" and reply.background
    assert (
        state(reply, {"queued", "in_progress"}).output_text
        == tiny.respond(input="Hello!").output_text
    )
    long = {"max_output_tokens": 400, "extra_body": {"ignore_eos": True}}
    reply = tiny.respond(input="Write a long story about a cat.", background=True, **long)
    assert reply.status == "queued"
    reply = tiny.openai.responses.cancel(state(reply, {"queued"}).id)
    for _ in range(10):
        assert reply.status == "cancelled"
        time.sleep(0.05)
        reply = tiny.openai.responses.retrieve(reply.id)


@check("openai/responses/test_simple.py::test_enable_response_messages")
def raw_messages(tiny: Asked) -> None:
    reply = tiny.ok(
        "/v1/responses",
        input="What is the capital of France?",
        temperature=0,
        enable_response_messages=True,
    )
    assert reply["status"] == "completed"
    for name, count in (("input_messages", "input_tokens"), ("output_messages", "output_tokens")):
        [message] = reply[name]
        assert message["type"] == "raw_message_tokens" and len(message["message"]) > 10
        assert len(message["tokens"]) == reply["usage"][count] and type(message["tokens"][0]) is int


@check("openai/chat_completion/test_chat_echo.py::test_top_logprobs")
def all_logprobs(roomy: Asked) -> None:
    reply = roomy.chat(max_completion_tokens=1, extra_body={"top_logprobs": -1, "logprobs": "true"})
    assert len(reply.choices[0].logprobs.content[0].top_logprobs) == vocabulary_size()


@check("openai/completion/test_prompt_validation.py::test_empty_prompt")
def no_prompt(tiny: Asked) -> None:
    message = tiny.refused("/v1/completions", prompt=None, prompt_embeds=[])
    assert "Either prompt or prompt_embeds must be provided and non-empty." in message


@check(
    "openai/chat_completion/test_logprob_token_ids.py::test_logprob_token_ids_returns_requested_ids",
    "openai/chat_completion/test_batched_chat_completions.py::test_batched_chat_completions_logprob_token_ids",
)
def named_logprobs(tiny: Asked) -> None:
    ask = {"logprob_token_ids": [20, 30, 40], "return_tokens_as_token_ids": True}
    reply = tiny.chat(logprobs=True, top_logprobs=3, max_completion_tokens=1, extra_body=ask)
    [batched] = tiny.ok(
        "/v1/chat/completions/batch",
        messages=[TALK],
        logprobs=True,
        top_logprobs=5,
        max_tokens=1,
        temperature=0,
        **ask,
    )["choices"]
    for [content] in (
        reply.choices[0].logprobs.model_dump()["content"],
        batched["logprobs"]["content"],
    ):
        assert {one["token"] for one in content["top_logprobs"]} == {
            content["token"],
            "token_id:20",
            "token_id:30",
            "token_id:40",
        }
        assert all(-1e9 < one["logprob"] <= 0 for one in content["top_logprobs"])


@check("pooling/embed/test_online_dimensions.py::test_matryoshka")
def matryoshka(embedder: Asked, matryoshka: Asked) -> None:
    for asked in (embedder, matryoshka):
        whole = len(
            asked.openai.embeddings.create(model=asked.model, input="The chef").data[0].embedding
        )
        for wrong in (-1, 0, whole + 1):
            with pytest.raises(openai.BadRequestError):
                asked.openai.embeddings.create(
                    model=asked.model, input="The chef", dimensions=wrong
                )
    assert (
        len(
            matryoshka.openai.embeddings.create(model="matryoshka", input="The chef", dimensions=8)
            .data[0]
            .embedding
        )
        == 8
    )
    with pytest.raises(openai.BadRequestError):
        embedder.openai.embeddings.create(model="embedder", input="The chef", dimensions=8)


@check(
    "openai/chat_completion/test_logprob_token_ids.py::test_logprob_token_ids_default_behavior_unchanged"
)
def natural_logprobs(tiny: Asked) -> None:
    found = (
        tiny.chat(logprobs=True, top_logprobs=5, max_completion_tokens=1)
        .choices[0]
        .logprobs.content[0]
        .top_logprobs
    )
    assert len(found) == 5 and all(one.logprob <= 0 for one in found)


@check(
    "openai/responses/test_stateful.py::test_store, test_cancel_completed, "
    "test_previous_response_id, test_two_responses_with_same_prev_id"
)
def stored_responses(tiny: Asked) -> None:
    """With `--max-stored-responses`; the model's memory is told by the tokens that it read."""
    first = tiny.respond(input="Hello!", max_output_tokens=3)
    assert tiny.openai.responses.retrieve(first.id).status == first.status
    unkept = tiny.respond(input="Hello!", store=False, max_output_tokens=3)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
        tiny.openai.responses.retrieve(unkept.id)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        tiny.openai.responses.cancel(first.id)
    second, other = [
        tiny.respond(input=text, previous_response_id=first.id, max_output_tokens=3)
        for text in ("And?", "And so?")
    ]
    third = tiny.respond(input="And then?", previous_response_id=second.id, max_output_tokens=3)
    assert (
        first.usage.input_tokens
        < second.usage.input_tokens
        < third.usage.input_tokens
        > other.usage.input_tokens
    )


# The server


@check("serve/instrumentator/test_basic.py::test_show_version, test_check_health")
def about_the_server(tiny: Asked) -> None:
    assert set(tiny.http.get("/version").json()) == {"version"}
    assert tiny.http.get("/health").status_code == 200


@check("serve/instrumentator/test_basic.py::test_request_wrong_content_type")
def wrong_content_type(tiny: Asked) -> None:
    with pytest.raises(openai.APIStatusError):
        tiny.chat(extra_headers={"Content-Type": "application/x-www-form-urlencoded"})


@check(
    "openai/models/test_models.py::test_check_models, test_retrieve_base_model, "
    "test_retrieve_unknown_model"
)
def check_models(tiny: Asked) -> None:
    [model] = tiny.openai.models.list().data
    assert (
        model.id == model.root == tiny.model
        and model.permission[0]["allow_sampling"]
        and model.max_model_len > 0
    )
    assert tiny.openai.models.retrieve(tiny.model).root == tiny.model
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        tiny.openai.models.retrieve("nothing")
    with pytest.raises(openai.NotFoundError):
        tiny.chat(model="nothing")


@check("serve/instrumentator/test_metrics.py::test_metrics_exist, test_metrics_counts")
def metrics_counts(tiny: Asked) -> None:
    before = tiny.metrics()
    for _ in range(10):
        tiny.complete(max_tokens=10, extra_body={"ignore_eos": True})
    found = tiny.metrics()
    for name, expected in METRICS.items():
        assert found[f"vllm:{name}"] - before[f"vllm:{name}"] == expected, name
    assert all(f"vllm:{name}" in found for name in GAUGES)
    [labels] = re.findall(r"vllm:cache_config_info\{(.*)\} 1\.0", tiny.http.get("/metrics").text)
    assert re.search(r'kv_cache_size_tokens="\d+"', labels) and re.search(
        r'kv_cache_max_concurrency="[\d.]+"', labels
    )


@check("serve/instrumentator/test_metrics.py::test_abort_metrics_reset")
def metrics_after_aborts(tiny: Asked) -> None:
    stream = tiny.complete(max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    for _ in range(100):
        found = tiny.metrics()
        if not any(
            found[f"vllm:{name}"]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        ):
            return
        time.sleep(0.1)
    raise AssertionError(found)


# Tokenization


@check("serve/tokenize/test_tokenization.py::test_tokenize_completions, test_detokenize")
def tokenize_completions(tiny: Asked) -> None:
    prompt = "vllm1 This is a test prompt."
    for special in (False, True):
        found = tiny.ok("/tokenize", prompt=prompt, add_special_tokens=special)
        assert (
            found["count"] == len(found["tokens"])
            and found["max_model_len"] == 512
            and found["token_strs"] is None
        )
    bare = tiny.ok("/tokenize", prompt=prompt, add_special_tokens=False)["tokens"]
    assert tiny.ok("/detokenize", tokens=bare) == {"prompt": prompt}


@check("serve/tokenize/test_tokenization.py::test_tokenize_chat, test_tokenize_chat_with_tools")
def tokenize_chat(tiny: Asked) -> None:
    tool = {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
    }
    for more in ({}, {"tools": [tool]}):
        for generation in (False, True):
            for special in (False, True):
                options = {
                    "add_generation_prompt": generation,
                    "add_special_tokens": special,
                    **more,
                }
                found = tiny.ok("/tokenize", messages=TALK, **options)
                assert found["count"] == len(found["tokens"]) and found["token_strs"] is None
        final = [*TALK, {"role": "assistant", "content": "Sure,"}]
        continued = tiny.ok(
            "/tokenize",
            messages=final,
            continue_final_message=True,
            add_generation_prompt=False,
            **more,
        )
        whole = tiny.ok("/tokenize", messages=final, add_generation_prompt=False, **more)
        assert (
            continued["tokens"] == whole["tokens"][: continued["count"]]
            and continued["count"] < whole["count"]
        )


@check("serve/tokenize/test_tokenization.py::test_tokenize_with_return_token_strs")
def tokenize_with_token_strs(tiny: Asked) -> None:
    found = tiny.ok("/tokenize", prompt="Once upon a time", return_token_strs=True)
    assert len(found["token_strs"]) == found["count"] and any(
        text.startswith("Ġ") for text in found["token_strs"]
    )


@check(
    "serve/tokenize/test_tokenization.py::test_tokenizer_info_basic, test_tokenizer_info_schema, "
    "test_tokenizer_info_consistency_with_tokenize, "
    "test_tokenizer_info_chat_template"
)
def tokenizer_info(tiny: Asked) -> None:
    found = tiny.http.get("/tokenizer_info").json()
    assert isinstance(found["tokenizer_class"], str) and found["tokenizer_class"]
    kinds = {
        "add_bos_token": bool,
        "bos_token": str,
        "eos_token": str,
        "pad_token": str,
        "chat_template": str,
        "model_max_length": int,
    }
    assert all(
        isinstance(found[name], kind) for name, kind in kinds.items() if found.get(name) is not None
    )
    for token_id, token in (found.get("added_tokens_decoder") or {}).items():
        assert (
            isinstance(token_id, str) and isinstance(token["special"], bool) and "content" in token
        )
    assert found["chat_template"].strip()
    assert found.get("model_max_length", 10**9) >= tiny.ok("/tokenize", prompt="a")["max_model_len"]


# Pooling


@check("pooling/embed/test_online.py::test_completion_request, test_completion_request_batched")
def embeddings(embedder: Asked) -> None:
    tokens = embedder.ok("/tokenize", prompt="some text")["tokens"]
    for given, count in (
        ("some text", 1),
        (tokens, 1),
        (["some text"] * 10, 10),
        ([tokens] * 10, 10),
    ):
        reply = embedder.openai.embeddings.create(
            model="embedder", input=given, encoding_format="float"
        )
        assert reply.id is not None and [len(one.embedding) for one in reply.data] == [32] * count
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == len(tokens) * count


@check("pooling/embed/test_online.py::test_truncate_prompt_tokens")
def truncated_embeddings(embedder: Asked) -> None:
    for given in ("a text of many tokens", list(range(5, 26))):
        reply = embedder.openai.embeddings.create(
            model="embedder", input=given, extra_body={"truncate_prompt_tokens": 10}
        )
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == 10
    with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
        embedder.openai.embeddings.create(
            model="embedder", input="a", extra_body={"truncate_prompt_tokens": 8193}
        )


@check("pooling/embed/test_online.py::test_chat_request")
def embeddings_of_a_chat(embedder: Asked) -> None:
    text = "".join(f"{one['role']}: {one['content']}\n" for one in TALK)
    chat = embedder.ok("/v1/embeddings", messages=TALK, encoding_format="float")
    plain = embedder.ok(
        "/v1/embeddings", input=text, encoding_format="float", add_special_tokens=False
    )
    assert np.allclose(chat["data"][0]["embedding"], plain["data"][0]["embedding"], atol=1e-5)
    assert chat["usage"] == plain["usage"]
    count = chat["usage"]["prompt_tokens"]
    for options, more in (
        ({"add_generation_prompt": True}, 5),
        ({"continue_final_message": True}, -1),
        ({"add_special_tokens": True}, 2),
    ):
        assert (
            embedder.ok("/v1/embeddings", messages=TALK, **options)["usage"]["prompt_tokens"]
            == count + more
        )
    message = embedder.refused(
        "/v1/embeddings", messages=TALK, continue_final_message=True, add_generation_prompt=True
    )
    assert (
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True." in message
    )


@check(
    "pooling/embed/test_online.py::test_invocations_completion_request, "
    "test_invocations_chat_request"
)
def invocations_embed(embedder: Asked) -> None:
    for body in ({"input": "some text"}, {"messages": TALK}):
        one = embedder.ok("/v1/embeddings", **body)
        other = embedder.ok("/invocations", **body)
        assert one.keys() == other.keys() and one["data"][0].keys() == other["data"][0].keys()
        assert np.allclose(one["data"][0]["embedding"], other["data"][0]["embedding"], atol=1e-5)


@check("pooling/embed/test_online.py::test_base64_embedding")
def base64_embeddings(embedder: Asked) -> None:
    expected = embedder.ok("/v1/embeddings", input="hi", encoding_format="float")["data"][0][
        "embedding"
    ]
    for dtype, kind in (("float32", "f4"), ("float16", "f2")):
        for order, mark in (("native", "<"), ("little", "<"), ("big", ">")):
            options = {"encoding_format": "base64", "embed_dtype": dtype, "endianness": order}
            data = base64.b64decode(
                embedder.ok("/v1/embeddings", input="hi", **options)["data"][0]["embedding"]
            )
            assert np.allclose(np.frombuffer(data, mark + kind), expected, atol=1e-3)
    assert "embed_dtype" in embedder.refused(
        "/v1/embeddings", input="hi", encoding_format="base64", embed_dtype="bad"
    )


@check(
    "pooling/embed/test_online.py::test_base64_embed_dtype_and_endianness, "
    "test_bytes_embed_dtype_and_endianness, "
    "test_bytes_only_embed_dtype_and_endianness",
    "pooling/pooling/test_online.py::test_base64_embed_dtype_and_endianness, "
    "test_bytes_embed_dtype_and_endianness, "
    "test_bytes_only_embed_dtype_and_endianness",
)
def packed_embeddings(embedder: Asked) -> None:
    for path, more, name in (
        ("/v1/embeddings", {}, "embedding"),
        ("/pooling", {"task": "embed"}, "data"),
    ):
        body = {"input": ["some text"] * 3, **more}
        floats = np.array(
            [one[name] for one in embedder.ok(path, encoding_format="float", **body)["data"]]
        )
        for dtype, kind in (
            ("float32", torch.float32),
            ("float16", torch.float16),
            ("bfloat16", torch.bfloat16),
            *FP8,
        ):
            for order in ("native", "little", "big"):
                options = {"embed_dtype": dtype, "endianness": order, **body}

                def vector(data: bytes, order: str = order, kind: torch.dtype = kind) -> np.ndarray:
                    numbers = np.frombuffer(
                        data, (">" if order == "big" else "<") + f"i{kind.itemsize}"
                    ).astype(f"i{kind.itemsize}")
                    found: np.ndarray = torch.from_numpy(numbers).view(kind).float().numpy()
                    return found

                coded = embedder.ok(path, encoding_format="base64", **options)["data"]
                assert np.allclose(
                    [vector(base64.b64decode(one[name])) for one in coded],
                    floats,
                    rtol=0.13,
                    atol=0.01,
                )
                whole, bare = [
                    embedder.post(path, encoding_format=form, **options)
                    for form in ("bytes", "bytes_only")
                ]
                items = json.loads(whole.headers["metadata"])["data"]
                assert np.allclose(
                    [vector(whole.content[one["start"] : one["end"]]) for one in items],
                    floats,
                    rtol=0.13,
                    atol=0.01,
                )
                assert [(one["embed_dtype"], one["endianness"]) for one in items] == [
                    (dtype, order)
                ] * 3
                assert "metadata" not in bare.headers and bare.content == whole.content


@check("pooling/embed/test_online.py::test_use_activation")
def normalized_embeddings(embedder: Asked) -> None:
    def vector(**options: Any) -> np.ndarray:
        return np.array(
            embedder.ok("/v1/embeddings", input="hi", **options)["data"][0]["embedding"]
        )

    default = vector(use_activation=None)
    with_it = vector(use_activation=True)
    without = vector(use_activation=False)
    assert np.allclose(default, with_it, atol=1e-2) and not np.allclose(with_it, without, atol=1e-2)
    assert np.allclose(with_it, without / np.linalg.norm(without), atol=1e-2)


@check("pooling/embed/test_online.py::test_pooling_embed")
def pooling_tasks(embedder: Asked) -> None:
    [one] = embedder.ok("/pooling", input="hi", task="embed", encoding_format="float")["data"]
    assert len(one["data"]) == 32


@check(
    "pooling/classify/test_online.py::test_completion_request, test_completion_request_batched, "
    "test_chat_request"
)
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
        assert (reply["object"], reply["model"], len(reply["data"])) == (
            "list",
            "classifier",
            count,
        )
        for index, one in enumerate(reply["data"]):
            assert (
                one["index"] == index
                and len(one["probs"]) == one["num_classes"] == 2
                and one["label"] in ("Default", "Spoiled")
            )


@check("pooling/classify/test_online.py::test_empty_input_error")
def empty_inputs(classifier: Asked) -> None:
    for given in ("", []):
        classifier.refused("/classify", input=given)


@check("pooling/classify/test_online.py::test_truncate_prompt_tokens")
def truncated_classes(classifier: Asked) -> None:
    usage = classifier.ok("/classify", input="hello " * 600, truncate_prompt_tokens=5)["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] == 5
    assert "truncate_prompt_tokens" in classifier.refused(
        "/classify", input="test", truncate_prompt_tokens=513
    )


@check(
    "pooling/classify/test_online.py::test_add_special_tokens, "
    "test_invocations_completion_request, test_invocations_chat_request"
)
def other_classes(classifier: Asked) -> None:
    for special in (False, True):
        assert (
            len(classifier.ok("/classify", input="some text", add_special_tokens=special)["data"])
            == 1
        )
    for body in ({"input": "some text"}, {"messages": TALK}):
        one = classifier.ok("/classify", **body)
        other = classifier.ok("/invocations", **body)
        assert one.keys() == other.keys() and one["data"][0]["probs"] == pytest.approx(
            other["data"][0]["probs"], rel=0.01
        )


@check("pooling/classify/test_online.py::test_use_activation, test_pooling_classify")
def activation(classifier: Asked) -> None:
    def probs(**options: Any) -> np.ndarray:
        return np.array(
            classifier.ok("/classify", input="some text", **options)["data"][0]["probs"]
        )

    default = probs(use_activation=None)
    with_it = probs(use_activation=True)
    without = probs(use_activation=False)
    assert np.allclose(default, with_it, atol=1e-2)
    assert np.allclose(np.exp(without) / np.exp(without).sum(), with_it, atol=1e-2)
    [one] = classifier.ok("/pooling", input="some text", task="classify", encoding_format="float")[
        "data"
    ]
    assert len(one["data"]) == 2


@check(
    "pooling/scoring/test_cross_encoder_online.py::test_score_api_queries_str_1_documents_str_1, "
    "test_score_api_queries_str_1_documents_str_n, "
    "test_score_api_queries_str_n_documents_str_n, test_score_api_queries_vs_documents, "
    "test_score_api_queries_vs_items, "
    "test_score_api_text_1_vs_text_2, test_score_api_data_1_vs_data_2"
)
def scores(scorer: Asked) -> None:
    one = "What is it?"
    many = ["It is this.", "It is that."]
    assert len(scorer.ok("/score", queries=one, documents=many[0])["data"]) == 1
    assert len(scorer.ok("/score", queries=one, documents=many)["data"]) == 2
    names = (
        ("queries", "documents"),
        ("queries", "items"),
        ("text_1", "text_2"),
        ("data_1", "data_2"),
    )
    found = [
        [entry["score"] for entry in scorer.ok("/v1/score", **{first: many, second: many})["data"]]
        for first, second in names
    ]
    assert np.allclose(found, [found[0]] * 4) and len(found[0]) == 2


@check(
    "pooling/scoring/test_cross_encoder_online.py::test_rerank_api_texts, test_rerank_api_top_n, "
    "test_invocations"
)
def ranks(scorer: Asked) -> None:
    documents = ["one text", "two texts", "a third one"]
    for count in (2, 3):
        body = {"query": "which?", "documents": documents, "top_n": count}
        reply = scorer.ok("/rerank", **body)
        other = scorer.ok("/invocations", **body)
        results = reply["results"]
        assert reply["id"] and len(results) == count and reply.keys() == other.keys()
        assert results == sorted(results, key=lambda one: -one["relevance_score"])
        assert all(documents[one["index"]] == one["document"]["text"] for one in results)


@check(
    "pooling/scoring/test_cross_encoder_online.py::test_rerank_api_max_model_len, "
    "test_score_api_max_model_len"
)
def too_long_to_score(scorer: Asked) -> None:
    long = "What is the capital of France?" * 20
    for path, name in (("/rerank", "query"), ("/score", "queries")):
        body = {name: long, "documents": ["one", "two"]}
        assert "Please reduce the length of the input prompt" in scorer.refused(path, **body)
        assert "Please request a smaller truncation size." in scorer.refused(
            path, **body, truncate_prompt_tokens=513
        )


@check(
    "pooling/scoring/test_cross_encoder_online.py::test_use_activation, test_pooling_classify, "
    "test_rerank_max_tokens_per_doc, test_rerank_max_tokens_per_doc_reduces_tokens"
)
def other_ranks(scorer: Asked) -> None:
    def score(**options: Any) -> float:
        found: float = scorer.ok("/rerank", query="a", documents=["b"], **options)["results"][0][
            "relevance_score"
        ]
        return found

    assert score() == pytest.approx(score(use_activation=True))
    assert 1 / (1 + np.exp(-score(use_activation=False))) == pytest.approx(
        score(use_activation=True), abs=1e-2
    )
    [one] = scorer.ok("/pooling", input="a", task="classify", encoding_format="float")["data"]
    assert len(one["data"]) == 1
    counts = [
        scorer.ok("/rerank", query="a", documents=["word " * 12], **more)["usage"]
        for more in ({}, {"max_tokens_per_doc": 10})
    ]
    assert counts[0]["prompt_tokens"] > counts[1]["prompt_tokens"] > 0


@check("pooling/embed/test_online.py::test_pooling_token_embed")
def token_embeddings(embedder: Asked) -> None:
    count = embedder.ok("/tokenize", prompt="some text")["count"]
    [one] = embedder.ok("/pooling", input="some text", task="token_embed", encoding_format="float")[
        "data"
    ]
    assert len(one["data"]) == count and {len(vector) for vector in one["data"]} == {32}


@check(
    "pooling/scoring/test_cross_encoder_online.py::test_pooling_token_classify",
    "pooling/token_classify/test_online.py::test_pooling_token_classify",
)
def token_classes(scorer: Asked, classifier: Asked) -> None:
    for server, size in ((scorer, 1), (classifier, 2)):
        count = server.ok("/tokenize", prompt="some text")["count"]
        [one] = server.ok(
            "/pooling", input="some text", task="token_classify", encoding_format="float"
        )["data"]
        assert len(one["data"]) == count and {len(vector) for vector in one["data"]} == {size}


@check(
    "pooling/pooling/test_online.py::test_completion_request, test_completion_request_batched, "
    "test_conversation_pooling, "
    "test_batch_base64_pooling, test_invocations, test_invocations_conversation"
)
def pooled(embedder: Asked) -> None:
    tokens = embedder.ok("/tokenize", prompt="some text")["tokens"]
    for given, count in (
        ("some text", 1),
        (tokens, 1),
        (["some text"] * 10, 10),
        ([tokens] * 10, 10),
    ):
        reply = embedder.ok("/pooling", input=given, task="token_embed", encoding_format="float")
        assert reply["id"] and [len(one["data"]) for one in reply["data"]] == [len(tokens)] * count
        assert (
            reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == len(tokens) * count
        )
        assert not reply["usage"].get("completion_tokens")
    text = "".join(f"{one['role']}: {one['content']}\n" for one in TALK)
    chat = embedder.ok("/pooling", messages=TALK, task="embed", encoding_format="float")
    plain = embedder.ok(
        "/pooling", input=text, task="embed", add_special_tokens=False, encoding_format="float"
    )
    assert (
        np.allclose(chat["data"][0]["data"], plain["data"][0]["data"], atol=1e-5)
        and chat["usage"] == plain["usage"]
    )
    floats, coded = [
        embedder.ok("/pooling", input=["a", "b"], task="embed", encoding_format=kind)["data"]
        for kind in ("float", "base64")
    ]
    for one, other in zip(floats, coded, strict=True):
        assert np.allclose(
            np.frombuffer(base64.b64decode(other["data"]), "<f4"),
            np.array(one["data"]).ravel(),
            atol=1e-5,
        )
    for body in ({"input": "some text"}, {"messages": TALK}):
        one, other = [
            embedder.ok(path, **body, task="embed", encoding_format="float")
            for path in ("/pooling", "/invocations")
        ]
        assert one.keys() == other.keys() and np.allclose(
            one["data"][0]["data"], other["data"][0]["data"], atol=1e-5
        )


@check(
    "pooling/scoring/test_bi_encoder_online.py::test_score_api_queries_str_1_documents_str_1, "
    "test_score_api_queries_str_1_documents_str_n, "
    "test_score_api_queries_str_n_documents_str_n, test_rerank_api_texts, test_rerank_api_top_n, "
    "test_rerank_api_max_model_len, "
    "test_score_api_max_model_len, test_invocations, test_pooling_embed"
)
def scores_by_embeddings(embedder: Asked) -> None:
    one = "What is it?"
    many = ["It is this.", "It is that."]
    for queries, documents, count in ((one, many[0], 1), (one, many, 2), (many, many, 2)):
        assert len(embedder.ok("/score", queries=queries, documents=documents)["data"]) == count
    vectors = [
        np.array(entry["embedding"])
        for entry in embedder.ok("/v1/embeddings", input=[one, many[0]])["data"]
    ]
    [found] = embedder.ok("/score", queries=one, documents=many[0])["data"]
    assert found["score"] == pytest.approx(float(vectors[0] @ vectors[1]), abs=1e-4)
    for count in (1, 2):
        body = {"query": one, "documents": many, "top_n": count}
        reply = embedder.ok("/rerank", **body)
        other = embedder.ok("/invocations", **body)
        assert len(reply["results"]) == count and reply["id"] and reply.keys() == other.keys()
    long = "What is the capital of France?" * 20
    for path, name in (("/rerank", "query"), ("/score", "queries")):
        assert "Please reduce the length of the input prompt" in embedder.refused(
            path, **{name: long}, documents=many
        )
        cut = embedder.refused(path, **{name: long}, documents=many, truncate_prompt_tokens=513)
        assert "Please request a smaller truncation size." in cut
    [pooling] = embedder.ok("/pooling", input="some text", task="embed", encoding_format="float")[
        "data"
    ]
    assert len(pooling["data"]) == 32


# Errors


@check(
    "pooling/embed/test_online.py::test_pooling_not_supported",
    "pooling/scoring/test_bi_encoder_online.py::test_pooling_not_supported",
)
def tasks_that_are_not_there(embedder: Asked, classifier: Asked) -> None:
    """`classifier`: the tasks that its own tests refuse, but for those that it serves here."""
    for server, tasks in (
        (embedder, ("classify", "token_classify", "plugin")),
        (classifier, ("embed", "token_embed", "plugin")),
    ):
        for task in tasks:
            error = server.post(
                "/pooling", input="some text", task=task, encoding_format="float"
            ).json()["error"]
            start = (
                "No IOProcessor plugin installed."
                if task == "plugin"
                else f"Unsupported task: {task!r}"
            )
            assert error["type"] == "BadRequestError" and error["message"].startswith(start)


@check("pooling/classify/test_online.py::test_score, test_rerank")
def classifiers_do_not_score(classifier: Asked) -> None:
    for path, body in (
        ("/score", {"queries": "ping", "documents": "pong"}),
        ("/rerank", {"query": "ping", "documents": ["pong"]}),
    ):
        assert classifier.post(path, **body).json()["detail"] == "Not Found"


@in_own_words
def bad_formats(embedder: Asked) -> None:
    for path, more in (("/v1/embeddings", {}), ("/pooling", {"task": "embed"})):
        for name in ("encoding_format", "embed_dtype", "endianness"):
            message = embedder.refused(
                path, input="a", **{"encoding_format": "base64", **more, name: f"bad_{name}"}
            )
            assert "it must be '" in message and f"bad_{name}" in message


@check(
    "serve/tokenize/test_serving_tokenization.py::test_overflow_error_returns_bad_request, "
    "test_value_error_returns_bad_request, "
    "test_vllm_validation_error_returns_bad_request, test_vllm_not_found_error_returns_not_found, "
    "test_tokenize_and_detokenize_agree_on_client_errors",
)
def tokenization_errors(tiny: Asked) -> None:
    for tokens in ([2**40], [10**30], [-1]):
        reply = tiny.post("/detokenize", tokens=tokens)
        assert (
            reply.status_code == 400
            and reply.json()["error"].items()
            >= {"param": "tokens", "type": "BadRequestError"}.items()
        )
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        for model, status, kind in (("nothing", 404, "NotFoundError"), (5, 400, "BadRequestError")):
            reply = tiny.http.post(path, json={"model": model, **body})
            assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)


@check(
    "serve/exception_handling/test_validation_exception_handler.py::test_many_errors_are_capped, "
    "test_container_input_is_described_not_echoed, test_long_string_input_is_truncated, "
    "test_handler_strips_endpoint_file_context, "
    "test_handler_strips_endpoint_path_only_variant",
)
def bounded_errors(tiny: Asked) -> None:
    """Inputs of vLLM's tests of its handler, given to ours."""

    def told(*loc: int | str, kind: str = "string_type", what: Any = None, count: int = 1) -> str:
        errors = [
            {"type": kind, "loc": ("body", *loc), "msg": "Input should be valid", "input": what}
            for _ in range(count)
        ]
        for index, error in enumerate(errors if count > 1 else ()):
            error["loc"] = ("body", *loc, index)
        response = as_api_error(RequestValidationError(errors)).response()
        assert response.status_code == 400 and len(response.body) < 4000
        message: str = json.loads(bytes(response.body))["error"]["message"]
        return message

    many = told("input", what=[{"type": "input_text", "text": 1}] * 500, count=5000)
    assert many.startswith("5000 validation errors:") and "more errors" in many
    listed = told("input", what=[{"text": "payload"}] * 300)
    assert "<list of 300 items>" in listed and "payload" not in listed
    assert "[truncated]" in told("max_tokens", kind="int_type", what="A" * 100_000)
    small = told("messages", kind="list_type", what="not-a-list")
    assert small == "Invalid value for 'messages': it must be a list, not \"not-a-list\"."
    union = told(
        "input",
        "list[union[EasyInputMessageParam,Message,ResponseOutputMessageParam]]",
        0,
        "content",
        what=12345,
    )
    assert "'input[0].content'" in union and "EasyInputMessageParam" not in union
    assert tiny.refused("/v1/chat/completions", messages="not-a-list") == small
    for path, body in (
        ("/v1/responses", {"input": [{"type": "input_text", "text": 1}] * 5000}),
        ("/v1/chat/completions", {"messages": [{"role": 1, "content": "payload"}] * 300}),
        ("/v1/completions", {"prompt": "a", "max_tokens": "A" * 100_000}),
    ):
        reply = tiny.post(path, **body)
        assert reply.status_code == 400 and len(reply.content) < 4000
        assert not re.search(r"\.py|site-packages|payload|EasyInputMessage|create_", reply.text)
    reply = tiny.post("/v1/chat/completions")
    assert reply.status_code == 400 and "messages" in reply.json()["error"]["param"]


@pytest.mark.parametrize("name", CHECKS | IN_OWN_WORDS)
def test_holds(name, served):
    check = (CHECKS | IN_OWN_WORDS)[name]
    check(*(served(argument) for argument in check.__annotations__ if argument != "return"))


def page() -> str:
    """docs/vllm_checks.md."""
    held, differing = [
        [one for names in group for name in names for one in each(name)]
        for group in ((CHECKS, ELSEWHERE), (NOT_HELD,))
    ]
    total = len(held) + len(differing)

    def listed(name: str) -> str:
        files: dict[str, list[str]] = {}
        for file, function in each(name):
            files.setdefault(file, []).append(function)
        return "; ".join(f"`{file}::{', '.join(functions)}`" for file, functions in files.items())

    lines = [
        "# Checks of vLLM's tests",
        "",
        "<!-- summary: Which checks of vLLM's own server tests hold here -->",
        "",
        (
            "vLLM's tests of its OpenAI-compatible server assert much that has nothing to do "
            "with a model. These assertions, retyped, are"
        ),
        (
            "asked of this server, with `tiny` and with random weights: "
            "`tests/test_vllm_assertions.py`. The names are those of vLLM's tests,"
        ),
        (
            "in tests/entrypoints, of chats, completions, tokenization, embeddings, ranks, "
            "scores, classes, responses, errors and metrics."
        ),
        ("A test holds where all that it asserts does, the words and types of errors among it."),
        "",
        "| tests that do not depend on a model | how many | |",
        "| --- | --- | --- |",
        f"| hold | {len(held)} | {len(held) / total:.0%} |",
        f"| differ | {len(differing)} | {len(differing) / total:.0%} |",
        "",
        "## What differs",
        "",
        "| test of vLLM | what differs |",
        "| --- | --- |",
        *(f"| {listed(name)} | {why} |" for name, why in NOT_HELD.items()),
        "",
        "## What is left out",
        "",
        "| test of vLLM | why |",
        "| --- | --- |",
        *(f"| {listed(name)} | {why} |" for why, name in LEFT_OUT.items()),
        "",
        (
            "Files that are not named here were not compared: vision, audio, gpt-oss, MCP, "
            "WebSockets, LoRA and vLLM's development routes."
        ),
        "",
        "## What holds",
        "",
        *(f"- {listed(name)}" for name in CHECKS),
        *(f"- {listed(name)}, by `{ours}`" for name, ours in ELSEWHERE.items()),
    ]
    return "\n".join(lines) + "\n"


def test_the_page_says_so():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "docs/vllm_checks.md is out of date: run python tests/test_vllm_assertions.py"
    )


def test_each_test_of_vllm_has_one_verdict():
    found = Counter(
        one for name in (*CHECKS, *ELSEWHERE, *NOT_HELD, *LEFT_OUT.values()) for one in each(name)
    )
    assert not [one for one, count in found.items() if count > 1]


@pytest.mark.parametrize("name", ELSEWHERE.values())
def test_our_other_tests_are_there(name):
    path, _, function = name.partition("::")
    assert re.search(
        rf"^(async )?def {function}\(", (PAGE.parents[1] / path).read_text(), re.MULTILINE
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
