"""openai (npm): `runTools`, streamed too, `parse`, responses."""

from __future__ import annotations

import shutil

import pytest
from programs import run
from weather import ANSWER, ASKED

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")


def test_the_program(tools_url, key):
    printed = run("openai.mjs", tools_url, key)
    assert (printed["text"], printed["streamed"]) == (ANSWER, ANSWER)
    assert printed["asked"] == 2 * ASKED
    assert isinstance(printed["output"]["warm"], bool)
    assert printed["response"]
