"""The render servers that there are pass the tests of render servers: one of the standard library
alone, and `toolkit render`."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonschema_rs
import pytest
from toolkit_lm_renderer_remote.conformance import RenderServerConformance
from toolkit_lm_renderer_remote.wire import RENDER_CHAT, RENDER_PROMPTS, schema

HERE = Path(__file__).parent
SCHEMA = HERE.parents[2] / "docs" / "renderer.schema.json"
UPDATE = (
    "python -c 'from toolkit_lm_renderer_remote.wire import write_schema; "
    'write_schema("docs/renderer.schema.json")\''
)
PICTURES = (b"P6 2 3 255\n" + bytes(range(18)), b"P6 3 2 255\n" + bytes(range(18)))


@contextmanager
def served(*command: str) -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        try:
            assert found is not None
            yield found[0]
        finally:
            process.kill()


class TestStandardLibrary(RenderServerConformance):
    images = PICTURES

    @pytest.fixture(scope="class")
    @staticmethod
    def url() -> Iterator[str]:
        # No site-packages: what is not of the standard library cannot be imported.
        with served("-I", "-S", str(HERE / "stdlib_server.py")) as url:
            yield url

    def test_its_answers_are_what_the_schema_says(self, client):
        parts = [
            {"type": "text", "text": "a"},
            {"type": "image_url", "image_url": {"url": "data:;base64,UDYgMSAxIDI1NQphYmM="}},
        ]
        chat = client.post(
            RENDER_CHAT, json={"messages": [{"role": "user", "content": parts}]}
        ).json()
        assert validator("RenderedPrompt").is_valid(chat)
        assert not validator("RenderedPrompt").is_valid(chat | {"token_ids": ["a"]})
        assert validator("RenderedPrompts").is_valid(
            client.post(RENDER_PROMPTS, json={"prompt": "a"}).json()
        )
        assert validator("ErrorAnswer").is_valid(
            client.post(RENDER_PROMPTS, json={"prompt": ""}).json()
        )


class TestToolkitRender(RenderServerConformance):
    speaks_msgpack = True

    @pytest.fixture(scope="class")
    @staticmethod
    def url() -> Iterator[str]:
        with served(
            "-c", "from toolkit_lm_cli import main; main()", "render", "tiny", "--port", "0"
        ) as url:
            yield url

    def test_its_answers_are_what_the_schema_says(self, client):
        chat = client.post(
            RENDER_CHAT, json={"messages": [{"role": "user", "content": "a"}]}
        ).json()
        assert validator("RenderedPrompt").is_valid(chat)
        assert validator("RenderedPrompts").is_valid(
            client.post(RENDER_PROMPTS, json={"prompt": "a"}).json()
        )
        assert validator("ErrorAnswer").is_valid(
            client.post(RENDER_PROMPTS, json={"prompt": ""}).json()
        )


def validator(name: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(
        {**json.loads(SCHEMA.read_text()), "$ref": f"#/$defs/{name}"}
    )


def test_the_published_schema_is_up_to_date():
    assert json.loads(SCHEMA.read_text()) == schema(), f"write it again: {UPDATE}"


def test_one_is_of_the_standard_library_alone():
    tree = ast.parse((HERE / "stdlib_server.py").read_text())
    names = {
        name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names
    }
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names
