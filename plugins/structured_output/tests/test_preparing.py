"""Which backend serves, and what the limits are: the same for all."""

from __future__ import annotations

import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_structured_output.checks import (
    MAX_CHOICES,
    MAX_SCHEMA,
    MAX_TEXT,
    choices_of,
    schema_of,
    text_of,
)
from toolkit_lm_structured_output.preparing import _reader
from toolkit_lm_structured_output.wishes import Wish


def plugins(**options):
    return Plugins.load(VllmConfig.make(model="any", **options).plugins)


def test_llguidance_is_the_default():
    assert _reader(plugins()).compiler == "toolkit_lm_llguidance.backend:LLGuidanceCompiler"


def test_a_backend_that_is_not_there():
    with pytest.raises(RequestError, match=r"names 'lguidance'. Did you mean 'llguidance'\?"):
        _reader(plugins(plugin_option=["structured_output.backend=lguidance"]))
    with pytest.raises(
        RequestError,
        match="nothing that compiles grammars is installed; pip install toolkit-lm-llguidance",
    ):
        _reader(plugins(disable_plugins=["llguidance", "xgrammar"]))


def wish(kind, value):
    return Wish("structured_outputs", kind, value)


@pytest.mark.parametrize(
    ("check", "value", "reason"),
    [
        (choices_of, ["a"] * (MAX_CHOICES + 1), "5001 choices"),
        (choices_of, "a", "a list of texts"),
        (schema_of, {"enum": ["a" * MAX_SCHEMA]}, "at most 262144"),
        (schema_of, "{", "not JSON"),
        (schema_of, [], "a mapping, not a list"),
    ],
)
def test_limits(check, value, reason):
    with pytest.raises(RequestError, match=reason):
        check(wish("json" if check is schema_of else "choice", value))


def test_texts_have_limits_too():
    with pytest.raises(RequestError, match="at most 32768"):
        text_of(wish("regex", "a" * (MAX_TEXT + 1)), "regular expression")
    assert text_of(wish("regex", "a"), "regular expression") == "a"
