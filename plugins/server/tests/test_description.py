"""The description of the API: what generators of clients read of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from toolkit_lm_server.app import create_app
from toolkit_lm_server.field_kinds import KINDS, exactly
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.request_fields import Verdict, described_others

TYPED = {"type", "anyOf", "$ref"}


_MADE: dict[str, Any] = {}
"""The description. Its tests take it as it is made for the first."""


@pytest.fixture
def document(engine) -> dict[str, Any]:
    if not _MADE:
        options = ServerOptions(tokenizer_info=True, max_stored_responses=4)
        _MADE.update(create_app(engine, options).openapi())
    return _MADE


def bodies(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref")
            if reference is not None:
                yield path, document["components"]["schemas"][reference.rpartition("/")[2]]


def test_each_field_of_a_request_has_a_type_and_a_text(document):
    found = dict(bodies(document))
    assert {"/v1/chat/completions", "/v1/embeddings", "/tokenize"} <= found.keys()
    for path, body in found.items():
        for name, schema in body["properties"].items():
            assert TYPED & schema.keys(), (path, name)
            assert schema.get("description"), (path, name)


def test_each_field_of_an_answer_has_a_type_and_a_text(document):
    for name, schema in document["components"]["schemas"].items():
        for field, part in schema.get("properties", {}).items():
            assert (TYPED | {"const", "enum"}) & part.keys(), (name, field)
            assert part.get("description"), (name, field)


def test_enumerations_are_of_one_type(document):
    """Generators make classes of them."""

    def check(part: Any) -> None:
        if isinstance(part, dict):
            values = part.get("enum")
            if isinstance(values, list):
                assert len({type(value) for value in values}) == 1, part
            part = [*part.values()]
        if isinstance(part, list):
            for one in part:
                check(one)

    check(document)


def test_messages_and_tools_have_shapes(document):
    schemas = document["components"]["schemas"]
    chat = schemas["StoringChatBody"]["properties"]
    assert chat["messages"]["items"] == {"$ref": "#/components/schemas/ChatMessage"}
    message = schemas["ChatMessage"]
    assert message["required"] == ["role"] and message["additionalProperties"] is True
    content, _ = message["properties"]["content"]["anyOf"][:2]
    assert content == {"type": "string"}
    assert set(schemas["MessagePart"]["properties"]) >= {"type", "text", "image_url", "input_audio"}
    assert "function" in schemas["Tool"]["properties"]


def test_renamed_fields_have_the_type_of_the_other(document):
    chat = document["components"]["schemas"]["StoringChatBody"]["properties"]
    types = {name: chat[name]["anyOf"] for name in ("max_tokens", "max_new_tokens")}
    assert types["max_tokens"] == types["max_new_tokens"]


@pytest.mark.parametrize("value", [None, True, 0, 1.5, "auto", ["text"], {"type": "text"}])
def test_a_value_has_a_schema_that_takes_no_other(value):
    [schema] = [exactly(value)]
    assert "type" in schema and "enum" not in schema
    if isinstance(value, dict):
        assert schema["additionalProperties"] is False and schema["required"] == ["type"]


def test_a_field_without_a_known_type_may_have_any():
    told = described_others({"surely_new": Verdict("idle", "no")}, {})["surely_new"]
    assert len(told["type"]) == 6 and "surely_new" not in KINDS
