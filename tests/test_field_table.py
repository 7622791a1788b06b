"""The table of request fields: a field that would change the answer is obeyed, or refused by
name."""

from __future__ import annotations

import importlib.util
import json
from itertools import permutations
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from msgspec import structs
from openai.types import completion_create_params, embedding_create_params
from openai.types.audio import transcription_create_params, translation_create_params
from openai.types.chat import (
    chat_completion_stream_options_param,
    completion_create_params as chat_create_params,
)
from openai.types.responses import response_create_params, response_text_config_param
from openai.types.shared_params import reasoning
from pydantic import ValidationError
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.params import SamplingParams
from toolkit_lm_server.app import create_app
from toolkit_lm_server.caller import CALLER, Caller
from toolkit_lm_server.peer_fields import PEER_FIELDS
from toolkit_lm_server.protocol import Body
from toolkit_lm_server.request_fields import COMMON, Verdict, renamed
from toolkit_lm_server.unknown_fields import UnknownFields

DOCS = Path(__file__).parents[1] / "docs"


def _generator():
    spec = importlib.util.spec_from_file_location(
        "generate_request_fields", DOCS / "generate_request_fields.py"
    )
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


GENERATOR = _generator()
BODIES = GENERATOR.bodies()
JSON = {route: body for route, body in BODIES.items() if issubclass(body, Body)}
NEEDED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "a"},
    "/infill": {"input_prefix": "a"},
    "/completion": {"prompt": "a"},
    "/generate": {"text": "a"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [], "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": []},
    "/v2/chat": {"messages": []},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["a"]},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def client():
    options = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "num_kv_blocks": 64,
        "engine_process": False,
    }
    engine = AsyncLLM(VllmConfig.make(model="tiny", **options))
    yield TestClient(create_app(engine))
    engine.close()


@pytest.fixture(autouse=True)
def unknown():
    """Ignored fields of a request, if fields are not strict."""
    CALLER.set(Caller(unknown=(found := UnknownFields(lenient=True))))
    return found


def test_the_page_is_made_of_the_table():
    assert (DOCS / "request_fields.md").read_text(encoding="utf-8") == GENERATOR.page(), (
        "run python docs/generate_request_fields.py"
    )


@pytest.mark.parametrize("route", PEER_FIELDS)
def test_each_field_of_the_others_has_a_verdict(route):
    for peer, names in PEER_FIELDS[route].items():
        for name in names.split():
            try:
                GENERATOR.verdict(BODIES[route], name)
            except KeyError:
                pytest.fail(
                    f"{route}: nothing says what becomes of {peer}'s field {name}: a row in "
                    "request_fields.py"
                )


CLIENT = {
    "/v1/chat/completions": [chat_create_params.CompletionCreateParamsStreaming],
    "/v1/completions": [completion_create_params.CompletionCreateParamsStreaming],
    "/v1/embeddings": [embedding_create_params.EmbeddingCreateParams],
    "/v1/responses": [response_create_params.ResponseCreateParamsStreaming],
    "/v1/audio/transcriptions": [transcription_create_params.TranscriptionCreateParamsStreaming],
    "/v1/audio/translations": [translation_create_params.TranslationCreateParams],
}
INSIDE = [
    (
        "/v1/chat/completions",
        "stream_options",
        chat_completion_stream_options_param.ChatCompletionStreamOptionsParam,
    ),
    ("/v1/responses", "stream_options", response_create_params.StreamOptions),
    ("/v1/responses", "reasoning", reasoning.Reasoning),
    ("/v1/responses", "text", response_text_config_param.ResponseTextConfigParam),
]
ARRAYS = {"include", "known_speaker_names", "known_speaker_references", "timestamp_granularities"}
"""Fields of forms, which have [] at the end of their names."""


def names_of(kind) -> set[str]:
    return set(kind.__required_keys__ | kind.__optional_keys__)


@pytest.mark.parametrize("route", CLIENT)
def test_each_field_of_the_openai_client_has_a_row(route):
    """With the installed version: a field of a newer one fails here on the day that it comes."""
    named = {
        f"{name}[]" if "audio" in route and name in ARRAYS else name
        for kind in CLIENT[route]
        for name in names_of(kind)
    }
    named |= {
        f"{outer}.{name}"
        for where, outer, kind in INSIDE
        if where == route
        for name in names_of(kind)
    }
    assert named - set(PEER_FIELDS[route]["OpenAI"].split()) == set()


def rows(becomes: str) -> list[tuple[str, str, Verdict]]:
    return [
        (route, name, one)
        for route, body in JSON.items()
        for name, one in body.verdicts.items()
        if one.becomes == becomes
    ]


def loaded(route: str, **fields):
    return BODIES[route].model_validate({**NEEDED.get(route, {}), **fields})


def asking(row: Verdict) -> object:
    """A value that is not neutral."""
    return next(value for value in (5, False, True, "x") if not row.is_neutral(value))


def test_refused_fields_are_refused_by_name(unknown):
    for route, name, row in rows("refused"):
        if name in BODIES[route].model_fields:
            continue
        beside = dict.fromkeys(row.qualifies[:1], 1.5)
        with pytest.raises(ValidationError) as error:
            loaded(route, **{name: asking(row)}, **beside)
        told = error.value.errors()[0]
        assert (told["type"], told["ctx"]["param"], told["ctx"]["why"]) == (
            "unsupported",
            name,
            row.note,
        ), (route, name)
    assert not unknown.names


def test_neutral_values_pass(unknown):
    for route, name, row in rows("refused"):
        if name in BODIES[route].model_fields:
            continue
        for value in (
            None,
            *row.neutral,
            *([] if row.false_asks or True in row.neutral else [False, "", []]),
        ):
            loaded(route, **{name: value})
        if row.qualifies:
            loaded(route, **{name: asking(row)})
    assert not unknown.names


def test_fields_without_effect_pass_in_silence(unknown):
    for route, name, _ in rows("idle"):
        if name in BODIES[route].model_fields:
            continue
        assert loaded(route, **{name: 5}) == loaded(route), (route, name)
    assert not unknown.names


def test_ignored_fields_are_told():
    for route, name, _ in rows("told"):
        CALLER.set(Caller(unknown=(found := UnknownFields(lenient=False))))
        assert loaded(route, **{name: 5}) == loaded(route)
        assert list(found.names) == [name]


VALUES = {
    "repetition_penalty": (1.5, 1.25),
    "include_stop_str_in_output": (True, False),
    "use_activation": (False, True),
    "normalize": (False, True),
    "timings": (True, False),
}
"""Two of each kind; others have whole numbers."""


def test_other_names_are_obeyed():
    for route, name, row in rows("renamed"):
        assert row.note in BODIES[route].model_fields, (route, name)
        value, _ = VALUES.get(row.note, (3, 4))
        assert loaded(route, **{name: value}) != loaded(route), (route, name)
        if name not in BODIES[route].model_fields:
            assert loaded(route, **{name: value}) == loaded(route, **{row.note: value}), (
                route,
                name,
            )


def test_a_field_has_one_value_under_all_of_its_names():
    for route in JSON:
        names: dict[str, list[str]] = {}
        for _, name, row in (one for one in rows("renamed") if one[0] == route):
            names.setdefault(row.note, [row.note]).append(name)
        for ours, alike in names.items():
            value, other = VALUES.get(ours, (3, 4))
            for first, second in permutations(alike, 2):
                loaded(route, **{first: value, second: value})
                loaded(route, **{first: value, second: None})
                with pytest.raises(ValidationError) as error:
                    loaded(route, **{first: value, second: other})
                told = error.value.errors()[0]
                assert told["type"] == "two_names" and {
                    told["ctx"]["param"],
                    told["ctx"]["other"],
                } == {first, second}, (route, told)


def test_another_name_is_of_a_field_that_the_body_has():
    with pytest.raises(TypeError, match="'mine' is another name of 'yours'"):
        type("WrongBody", (Body,), {"verdicts": renamed(mine="yours"), "__module__": __name__})


@pytest.mark.parametrize("route", ["/rerank", "/score", "/classify", "/v2/embed"])
def test_a_name_of_what_a_route_does_not_have_is_refused(route):
    for name in (
        "normalize",
        "normalized",
        *(["use_activation", "activation", "softmax"] if route == "/v2/embed" else []),
    ):
        loaded(route, **{name: None})
        for value in (True, False):
            with pytest.raises(ValidationError) as error:
                loaded(route, **{name: value})
            assert error.value.errors()[0]["ctx"]["param"] == name


def test_what_is_inside_of_objects():
    cases = [
        ("/v1/responses", {"text": {"verbosity": "low"}}, None, None),
        ("/v1/responses", {"reasoning": {"summary": "detailed"}}, None, "reasoning.summary"),
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            None,
            None,
        ),
        (
            "/v1/chat/completions",
            {"stream": True, "stream_options": {"includeusage": True}},
            None,
            "stream_options.includeusage",
        ),
        ("/api/chat", {"options": {"tfs_z": 0.5}}, "options.tfs_z", None),
        (
            "/api/chat",
            {
                "options": {
                    "num_ctx": 4096,
                    "tfs_z": 1,
                    "penalize_newline": True,
                    "repeat_last_n": 64,
                }
            },
            None,
            None,
        ),
        (
            "/api/chat",
            {"options": {"repeat_last_n": 64, "repeat_penalty": 1.1}},
            "options.repeat_last_n",
            None,
        ),
        ("/api/chat", {"options": {"temprature": 1}}, None, "options.temprature"),
        ("/api/embed", {"options": {"temperature": 1, "num_ctx": 1}}, None, None),
        ("/v1/messages", {"output_config": {"task_budget": {}}}, None, None),
        (
            "/v1/messages",
            {"output_config": {"task_budget": {"total": 5}}},
            "output_config.task_budget",
            None,
        ),
        (
            "/v1/messages",
            {"thinking": {"type": "enabled", "display": "omitted"}},
            None,
            "thinking.display",
        ),
        (
            "/v1/messages",
            {"tool_choice": {"type": "auto", "which": "x"}},
            None,
            "tool_choice.which",
        ),
    ]
    for route, fields, refused, ignored in cases:
        CALLER.set(Caller(unknown=(found := UnknownFields(lenient=True))))
        if refused is None:
            loaded(route, **fields)
        else:
            with pytest.raises(ValidationError) as error:
                loaded(route, **fields)
            assert error.value.errors()[0]["ctx"]["param"] == refused
        assert list(found.names) == ([] if ignored is None else [ignored]), fields


def test_what_nobody_knows_is_never_silent(unknown):
    """Whatever its value, but null and what is empty."""
    for route in JSON:
        for value in (False, True, 0, "x", {"a": 1}):
            unknown.names.clear()
            loaded(route, nobody_knows=value)
            assert list(unknown.names) == ["nobody_knows"], (route, value)
    for name in ("adapter_id", "lora_request", "extra_body", "grammar_triggers"):
        assert name in COMMON


SAMPLES = {
    "model": "m",
    "prompt_cache_retention": "24h",
    "kv_cache_retention_config": {"decode_retention_priority": 50},
    "kv_transfer_params": {"do_remote_decode": True},
    "cache_control": {"type": "ephemeral"},
    "messages": [{"role": "user", "content": "other"}],
    "prompt": "other",
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "bad_words": ["x"],
    "structured_outputs": {"regex": "a"},
    "response_format": {"type": "json_object"},
    "begun_token_ids": [5],
    "allowed_token_ids": [5],
    "logprob_token_ids": [5],
    "stop_token_ids": [5],
    "skip_special_tokens": False,
    "temperature": 0.5,
    "top_p": 0.5,
    "min_p": 0.5,
    "repetition_penalty": 1.5,
    "presence_penalty": 1.5,
    "frequency_penalty": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.5,
    "mirostat": 2,
    "mirostat_eta": 0.5,
    "dry_sequence_breakers": ["x"],
    "guided_json": {},
    "guided_choice": ["x"],
    "truncation_side": "left",
    "cache_salt": "x",
    "documents": [{"text": "x"}],
    "chat_template_kwargs": {"a": 1},
    "mm_processor_kwargs": {"a": 1},
    "reasoning_effort": "low",
    "text": {"format": {"type": "json_object"}},
    "reasoning": {"effort": "low"},
    "tools": [{"type": "function", "name": "f", "function": {"name": "f"}, "input_schema": {}}],
    "include": ["message.output_text.logprobs"],
    "instructions": "x",
    "input": "other",
    "truncation": "auto",
    "stop_sequences": ["x"],
    "system": "x",
    "thinking": {"type": "enabled"},
    "output_config": {"effort": "low"},
    "format": "json",
    "think": True,
    "options": {"seed": 3},
    "input_extra": [{"text": "x"}],
    "max_tokens": 9,
    "images": ["iVBORw0KGgo="],
    "adapters": [{"name": "x"}],
    "lora": [{"id": 0, "scale": 0.5}],
    "trace_decode_token_ids": [5],
    "vllm_xargs": {"x": 1},
    "hidden_states_of": "output",
}
ON_SHAPE = {
    "/v1/chat/completions": "tools tool_choice parallel_tool_calls include_reasoning echo "
    "return_token_ids return_tokens_as_token_ids timings service_tier verbosity "
    "stream_options truncation_side chat_template model",
    "/v1/completions": "suffix encoder_prompt decoder_prompt add_special_tokens echo "
    "return_token_ids return_tokens_as_token_ids timings "
    "stream_options truncation_side model",
    "/v1/responses": "tool_choice max_tool_calls metadata store previous_response_id conversation "
    "background enable_response_messages "
    "stream_options include top_logprobs return_token_ids return_tokens_as_token_ids timings "
    "prompt_logprobs n best_of use_beam_search "
    "beam_width length_penalty early_stopping logprob_token_ids truncation_side",
    "/v1/messages": "tool_choice thinking",
    "/v2/chat": "tool_choice strict_tools thinking logprobs",
    "/api/chat": "stream",
}
"""Fields that a route reads by itself, for the shape of its answer or to refuse them: tests of the
routes have them."""
BEAMS = {"beam_width", "length_penalty", "early_stopping"}


def reached(route: str, **fields) -> object:
    """All that a body asks of the engine."""
    body = loaded(route, **fields)
    match route:
        case "/v1/responses":
            return body.chat([], body.own_messages())
        case "/v1/messages" | "/v2/chat" | "/api/chat" | "/api/generate":
            return body.chat()
    if route == "/infill":
        body = body.completion(BODIES["/v1/completions"], 64)
        return structs.asdict(body.params()), body.prompt, body.suffix
    rendering = (body.render_options(), body.messages) if hasattr(body, "messages") else body.prompt
    return structs.asdict(body.params()), body.request_options({}), rendering


@pytest.mark.parametrize(
    "route", ["/v1/chat/completions", "/v1/completions", "/infill", *list(ON_SHAPE)[2:]]
)
def test_each_field_that_is_read_reaches_the_engine(route):
    shape = set(ON_SHAPE.get(route, "").split()) | BEAMS | {"use_beam_search", "model"}
    missing = []
    if route == "/infill":
        shape |= {
            "stream_options",
            "truncation_side",
            "priority",
            "timeout",
            "cache_salt",
            "stream",
        }
        shape |= {"n", "input_prefix"}
    shape |= NEVER_ASKED.get(route, set())
    for name in sorted(set(BODIES[route].model_fields) - shape):
        beside = {
            "top_logprobs": {"logprobs": True},
            "logprob_token_ids": {"logprobs": True if "chat" in route else 1},
            "mirostat_eta": {"mirostat": 2},
        }.get(name, {})
        kind = str(BODIES[route].model_fields[name].annotation)
        usual = [one for word, one in (("bool", True), ("int", 3), ("float", 0.5)) if word in kind]
        value = SAMPLES.get(name, [*usual, "x"][0])
        if (route, name) == ("/v1/messages", "tools"):
            value = [{"name": "f", "input_schema": {}}]
        if name in NEEDED.get(route, {}) and value == NEEDED[route][name]:
            value = [{"role": "user", "content": "z"}]
        if reached(route, **beside, **{name: value}) == reached(route, **beside):
            missing.append(name)
    assert not missing


@pytest.fixture
def templates():
    """Requests may have a chat template."""
    before = CALLER.set(Caller(takes_templates=True))
    yield
    CALLER.reset(before)


NEVER_ASKED = {
    "/infill": {
        "prompt_logprobs",
        "logprob_token_ids",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_hidden_states",
        "return_routed_experts",
        "timings",
        "kv_transfer_params",
    }
}
NEVER_ASKED["/v1/responses"] = NEVER_ASKED["/infill"] - {"logprob_token_ids"}
"""Fields of all bodies with sampling parameters that a route refuses for the shape of its answers.
The page does not list them."""


@pytest.mark.parametrize(
    "route",
    ["/v1/chat/completions", "/v1/completions", "/infill", *list(ON_SHAPE)[2:], "/api/generate"],
)
def test_what_a_route_always_refuses_is_a_row_of_the_table(route, templates):
    """Else the page calls it obeyed."""
    always = set()
    for name in BODIES[route].model_fields:
        given = [
            SAMPLES.get(name, "x"),
            [{"name": "f", "input_schema": {}}],
            True,
            3,
            0.5,
            "x",
            ["x"],
            {},
            {"type": "disabled"},
            "disabled",
            1,
        ]
        beside = {"stream_options": {"stream": True}, "beam_width": {"use_beam_search": True}}.get(
            name, {}
        )
        problems = []
        for value in given:
            try:
                reached(route, **beside, **{name: value})
            except ValidationError:
                continue
            except RequestError as error:
                problems.append(error)
            else:
                break
        else:
            always |= (
                {name}
                if any(one.param == name and "only" not in str(one) for one in problems)
                else set()
            )
    assert always == NEVER_ASKED.get(route, set())
    listed = set(" ".join(PEER_FIELDS[route].values()).split())
    assert not always & listed


SHAPE_OF_VECTORS = {
    "model",
    "input",
    "messages",
    "prompt_name",
    "truncate_prompt_tokens",
    "truncation_side",
    "add_special_tokens",
}
SHAPE_OF_VECTORS |= {"encoding_format", "embed_dtype", "endianness", "documents", "chat_template"}
SHAPE_OF_VECTORS |= {"sparse"}
"""Fields that the routes of pooling models read themselves."""


@pytest.mark.parametrize("route", ["/v1/embeddings", "/classify", "/pooling"])
def test_each_field_of_a_pooling_route_reaches_the_engine(route):
    values = {
        "dimensions": 3,
        "normalize": False,
        "use_activation": False,
        "task": "classify",
    }
    values |= {
        "step_tag_id": 3,
        "returned_token_ids": [3],
        "continue_final_message": True,
        "add_generation_prompt": True,
    }
    beside = {"task": "embed"} if route == "/pooling" else {}

    def asked(**fields):
        body = loaded(route, **{**beside, **fields})
        return body.params(), body.request_options({}), body.render_options()

    missing = []
    # Jina's task names an adapter and a prompt.
    own = SHAPE_OF_VECTORS | ({"task"} if route == "/v1/embeddings" else set())
    for name in sorted(set(BODIES[route].model_fields) - own):
        value = values.get(name, SAMPLES.get(name, 3))
        if asked(**{name: value}) == asked():
            missing.append(name)
    assert not missing


@pytest.mark.parametrize("path", ["/v1/embeddings", "/tokenize"])
def test_what_only_a_conversation_has_is_refused_of_a_text(client, path):
    for fields in (
        {"chat_template_kwargs": {"a": 1}},
        {"continue_final_message": True},
        {"mm_processor_kwargs": {"a": 1}},
    ):
        reply = client.post(path, json={"input" if "embed" in path else "prompt": "a", **fields})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, next(iter(fields))), (
            reply.text
        )


def test_logprob_token_ids_need_log_probabilities():
    for route in ("/v1/chat/completions", "/v1/completions"):
        with pytest.raises(RequestError, match="only with logprobs"):
            loaded(route, logprob_token_ids=[5]).params()
    assert SamplingParams(logprob_token_ids=[5]).num_logprobs == 0


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "is_right"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"ebnf": 'root ::= "yes" | "no"'}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}"}, lambda text: len(text) == 3 and text.isdigit()),
        ({"json_schema": SCHEMA}, lambda text: list(json.loads(text)) == ["ok"]),
        ({"json_schema": json.dumps(SCHEMA)}, lambda text: list(json.loads(text)) == ["ok"]),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            lambda text: list(json.loads(text)) == ["ok"],
        ),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA}},
            lambda text: list(json.loads(text)) == ["ok"],
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            lambda text: list(json.loads(text)) == ["ok"],
        ),
        ({"repeat_penalty": 1.9}, lambda text: text != "The capital of France is Paris."),
        ({"n_predict": 2, "max_tokens": None}, lambda text: text == "The capital"),
        (
            {"n_predict": -1, "max_tokens": None},
            lambda text: text == "The capital of France is Paris.",
        ),
        (
            {"prediction": {"type": "content", "content": "x"}},
            lambda text: text == "The capital of France is Paris.",
        ),
        (
            {"mirostat": 0, "mirostat_tau": 5.0},
            lambda text: text == "The capital of France is Paris.",
        ),
        (
            {"grammar": "", "lora": [], "adapter_id": None, "top_n_sigma": -1},
            lambda text: text == "The capital of France is Paris.",
        ),
    ],
)
def test_an_answer_is_as_its_fields_ask(client, fields, is_right):
    ask = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    reply = client.post("/v1/chat/completions", json={**ask, **fields})
    assert reply.status_code == 200 and "x-ignored-fields" not in reply.headers, reply.text
    text = reply.json()["choices"][0]["message"]["content"]
    assert is_right(text), text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"lora_request": {"a": 1}}, "lora_request"),
        ({"adapter_id": "x"}, "adapter_id"),
        ({"extra_body": {"top_k": 1}}, "extra_body"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"response_format": {"type": "json_object", "shema": SCHEMA}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"scheme": {}}}},
            "response_format",
        ),
        ({"grammar": 'root ::= "a"', "json_schema": SCHEMA}, "json_schema"),
        ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.25}, "repeat_penalty"),
        ({"mirostat": 1}, "mirostat"),
    ],
)
def test_what_is_refused_is_named(client, path, fields, param):
    body = (
        {"prompt": "a"}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "hi"}]}
    )
    reply = client.post(path, json={**body, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_log_probabilities_of_named_tokens(client):
    ask = {"prompt": "Once", "max_tokens": 2, "temperature": 0, "logprobs": 20}
    every = client.post("/v1/completions", json=ask).json()["choices"][0]["logprobs"][
        "top_logprobs"
    ]
    named = client.post("/v1/completions", json={**ask, "logprob_token_ids": [30, 40]}).json()[
        "choices"
    ][0]["logprobs"]
    texts = [
        client.post("/detokenize", json={"tokens": [token]}).json()["prompt"] for token in (30, 40)
    ]
    for own, told, known in zip(named["tokens"], named["top_logprobs"], every, strict=True):
        assert set(told) == {own, *texts}
        assert all(
            told[text] == pytest.approx(known[text], abs=1e-4) for text in set(told) & set(known)
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Once upon", " a", "\N{GRINNING FACE} it"])
def test_offsets_are_of_the_text_whatever_tokens_are_called(client, prompt, stream):
    ask = {
        "prompt": prompt,
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "stream": stream,
    }

    def told(**fields) -> tuple[str, list[str], list[int]]:
        reply = client.post("/v1/completions", json={**ask, **fields})
        parts = [
            json.loads(line.removeprefix("data: "))
            for line in reply.text.splitlines()
            if "{" in line
        ]
        choices = [choice for part in parts for choice in part["choices"]]
        tables = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        lists = (
            [one for table in tables for one in table[name]] for name in ("tokens", "text_offset")
        )
        return "".join(choice["text"] for choice in choices), *lists

    text, tokens, offsets = told()
    named = told(return_tokens_as_token_ids=True)
    assert named[0] == text and all(one.startswith("token_id:") for one in named[1])
    assert named[2] == offsets
    for token, offset in zip(tokens, offsets, strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token), (token, offset)
