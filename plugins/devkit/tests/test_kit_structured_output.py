"""The conformance class of structured output backends finds matchers that are wrong. Right ones are
those of the backends here."""

from __future__ import annotations

import pytest
from toolkit_lm_devkit import StructuredOutputConformance
from toolkit_lm_structured_output.contract import GrammarCompiler, Matcher, Source

TOKENS = [
    "",
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"{one}{one}" for one in "abcdefghijklmnopqrstuvwxyz"),
]
CHOICES = ["abba", "abca", "xyz", "xyzzy"]


class Choice(Matcher):
    """One of some texts."""

    def __init__(self, left):
        self.left = left

    def copy(self):
        return type(self)(list(self.left))

    def consume(self, token_id):
        text = TOKENS[token_id]
        self.left = [one[len(text) :] for one in self.left if one.startswith(text)]
        if not self.left:
            raise ValueError("no choice goes on with it")

    def allowed(self):
        inner = [
            token
            for token, text in enumerate(TOKENS)
            if text and any(one.startswith(text) for one in self.left)
        ]
        return [0, *inner] if "" in self.left else inner

    def fill(self, mask):
        mask[:] = 0
        for token in self.allowed():
            mask.view("uint32")[token // 32] |= 1 << token % 32

    def forced(self):
        return self.allowed() if len(self.allowed()) == 1 else []

    @property
    def is_stopped(self):
        return self.left == [""]


class Compiler(GrammarCompiler):
    size = len(TOKENS)

    def __init__(self, kind):
        super().__init__(Source("", (0,)))
        self.kind = kind

    def compile(self, grammar):
        return self.kind(list(CHOICES))


class TooWide(Choice):
    def allowed(self):
        return [token for token in range(len(TOKENS)) if token % 3]


class TooNarrow(Choice):
    def allowed(self):
        return super().allowed()[:1]


class NeverStopped(Choice):
    is_stopped = False


class Forcing(Choice):
    def forced(self):
        return self.allowed()[:1]


class Shared(Choice):
    def copy(self):
        return self


class Together(Compiler):
    def fill(self, matchers, masks):
        super().fill(matchers[:1] * len(matchers), masks)


KIT = StructuredOutputConformance()
TESTS = {
    "allowed": KIT.test_a_token_is_allowed_where_it_can_be_consumed,
    "forced": KIT.test_what_is_forced_is_all_that_is_allowed,
    "several": KIT.test_masks_of_several_are_those_of_each,
    "copy": KIT.test_a_copy_goes_its_own_way,
}


@pytest.mark.parametrize("test", TESTS)
def test_a_right_one_passes(test):
    compiler = Compiler(Choice)
    check = TESTS[test]
    check(compiler, compiler.compile(""))


@pytest.mark.parametrize(
    ("test", "kind", "message"),
    [
        ("allowed", TooWide, "the mask is wrong about token"),
        ("allowed", TooNarrow, "the mask is wrong about token"),
        ("allowed", NeverStopped, "nothing but the end can follow"),
        ("forced", Forcing, "is forced, and others are allowed"),
        ("copy", Shared, "assert"),
    ],
)
def test_a_wrong_one_is_found(test, kind, message):
    compiler = Compiler(kind)
    with pytest.raises(AssertionError, match=message):
        TESTS[test](compiler, compiler.compile(""))


def test_masks_that_are_mixed_up_are_found():
    compiler = Together(Choice)
    with pytest.raises(AssertionError):
        TESTS["several"](compiler, compiler.compile(""))
