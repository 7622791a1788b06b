"""The description of the vendors' routes: each field of a request has a type and a text."""

from __future__ import annotations

PATHS = (
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v2/chat",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
)


def test_each_field_of_a_request_has_a_type_and_a_text(apps):
    document = apps("generate").openapi()
    for path in PATHS:
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        body = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]
        assert len(body["properties"]) > 40
        for name, schema in body["properties"].items():
            assert {"type", "anyOf", "$ref"} & schema.keys(), (path, name)
            assert schema.get("description"), (path, name)
