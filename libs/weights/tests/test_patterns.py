"""Patterns of somebody else's files: matched as `re` does, in a bounded number of steps."""

from __future__ import annotations

import re
import time

import pytest
from toolkit_lm_weights.patterns import PatternError, begins, ends, finds, matches

NAMES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.up_proj",
    "model.vision_tower.layers.3.self_attn.k_proj",
    "lm_head",
    "transformer.h.1.attn.c_attn",
    "",
)
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)"
    r".*?(?:q_proj|k_proj|v_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\."
    r"(?:(?:q_proj|up_proj)))"
)
PATTERNS = (
    r".*\.(k_proj|up_proj)",
    r"^(?!.*vision).*(?:q_proj|k_proj)",
    r"model\.layers\.(0|[1-3]\d?)\.self_attn\..*",
    r"model.layers.\d+.\w+.[^k]_proj$",
    r".*(?<=self_attn\.)[qk]_proj",
    r"(a|b|)*lm_head\b",
    r"(\w+\.){2,}\d{1,2}(\.\w*)*",
    r".{5}.{3,}?\D+\S(?=_proj).*",
    "(?:x?)*",
    UNSLOTH,
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_matches_are_those_of_re(pattern):
    for name in NAMES:
        assert matches(pattern, name) == bool(re.fullmatch(pattern, name)), name
        of_all = ends(pattern, name, range(len(name) + 1))
        assert begins(pattern, name) == bool(re.match(pattern, name)), name
        assert finds(pattern, name) == bool(re.search(pattern, name)) == bool(of_all), name
        assert (len(name) in ends(pattern, name, [0])) == bool(re.fullmatch(pattern, name)), name


def test_no_pattern_takes_long():
    """`re` takes years for these."""
    begun = time.thread_time()
    name = "a" * 60
    assert not matches("(a+)+b", name)
    assert not matches("((a|a)*)*b", name)
    assert not matches("(a|a)" * 50 + "b", name)
    assert matches(".*" * 60 + "a", name)
    for pattern in (
        "(?=.*" * 9 + "b" + ")" * 9,
        "((((((a*)*)*)*)*)*)*b" * 30,
        "(a{1,60}){1,60}b" * 9,
    ):
        try:
            assert not matches(pattern, name)
        except PatternError as error:
            assert "takes more than 20000 steps" in str(error)
        for way in (begins, finds):
            try:
                way(pattern, name)
            except PatternError as error:
                assert "takes more than 20000 steps" in str(error)
    assert time.thread_time() - begun < 5


def test_usual_patterns_are_left_to_re():
    """Thousands of them are matched at a start: each in some microseconds."""
    begun = time.thread_time()
    name = "model.language_model.layers.11.mlp.experts.101.gate_proj"
    for index in range(20_000):
        assert begins(r".*\.layers\.\d+\.mlp\.(gate|experts)", f"{name}{index}")
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize(
    ("pattern", "wrong"),
    [
        ("(", "missing"),
        (r"(a)\1", "groupref, which is not supported"),
        ("(?i)a", "flags, which are not supported"),
        ("a" * 20000, "more than 16384 characters"),
    ],
    ids=["broken", "reference", "flag", "long"],
)
def test_patterns_that_are_refused(pattern, wrong):
    with pytest.raises(PatternError, match=wrong):
        matches(pattern, "aa")
