"""bad_words, against their definition in plain Python, over small vocabularies where everything can
be tried."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.bad_words import BadWordRules
from toolkit_lm.renderer import Rendered, Renderer
from toolkit_lm.sampling.bad_words import ForbiddenTextRules

SPECIAL = b"<s>"
VOCABULARY = [
    *(
        SPECIAL,
        b"",
        b"a",
        b"b",
        b" ",
        b" a",
        b" b",
        b"ab",
        b" ab",
        b"ba",
        b"aba",
        b"a b",
        b" a b",
        b"b a",
        b".",
        b".a",
        b"b.",
        b"\na",
    ),
    *(
        "é".encode(),
        "é".encode()[:1],
        "é".encode()[1:],
        "bé".encode(),
        "北".encode(),
        "北a".encode(),
        "a北".encode(),
        b"_",
        b"a_",
        b"1a",
    ),
]
WORDS = [
    "a",
    "ab",
    "aba",
    "a b",
    "b.",
    ".",
    "é",
    "bé",
    "北",
    "北a",
    "a_",
    "abab",
    " ab ",
    "\na",
    "1a",
]


class TableRenderer(Renderer):
    """Tokens are entries of a table. A text is cut into the longest of them."""

    has_text = True

    def __init__(self, table: list[bytes] = VOCABULARY, *, lowers: bool = False) -> None:
        super().__init__(VllmConfig.default({}))
        self.table = table
        self._lowers = lowers
        self.num_read = 0

    def render_conversation(self, messages, **kwargs):
        raise NotImplementedError

    def render_prompt(self, prompt, *, add_special_tokens=True):
        rest = (prompt.lower() if self._lowers else prompt).encode()
        token_ids = []
        while rest:
            found = max(
                (one for one in self.table if one and one != SPECIAL and rest.startswith(one)),
                key=len,
                default=None,
            )
            if found is None:
                raise RequestError("no token for it.", "prompt")
            token_ids.append(self.table.index(found))
            rest = rest[len(found) :]
        return Rendered(token_ids)

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        raise NotImplementedError

    def token_bytes(self, token_ids, *, skip_special_tokens=False):
        self.num_read += 1
        return [
            b"" if skip_special_tokens and self.table[one] == SPECIAL else self.table[one]
            for one in token_ids
        ]

    def decode(self, token_ids, *, skip_special_tokens=False):
        return b"".join(
            self.token_bytes(token_ids, skip_special_tokens=skip_special_tokens)
        ).decode("utf-8", "replace")

    def token_texts(self, token_ids):
        return [self.decode([one]) for one in token_ids]

    @property
    def vocab_size(self):
        return len(self.table)

    @property
    def eos_token_ids(self):
        return [0]


def rules_of(words, size=len(VOCABULARY), renderer=None, **params) -> ForbiddenTextRules:
    made = BadWordRules(renderer or TableRenderer(), size).of(
        SamplingParams(bad_words=words, **params)
    )
    return ForbiddenTextRules(made)


def completes(pieces: list[bytes], word: str) -> bool:
    """The definition: the last piece has the word's end, and with it no more of the same word. It
    began where a piece or a word does."""
    text = b"".join(pieces)
    last = pieces[-1]
    starts = {sum(map(len, pieces[:index])) for index in range(len(pieces))}
    wanted = word.strip(" ").encode()
    for match in re.finditer(b"(?=" + re.escape(wanted) + b")", text):
        end = match.start() + len(wanted)
        if end <= len(text) - len(last):
            continue
        before = text[: match.start()].decode("utf-8", "surrogateescape")[-1:]
        begins = match.start() in starts or not (in_word(before) and in_word(word.strip(" ")[0]))
        goes_on = in_word(word.strip(" ")[-1]) and in_word(
            text[end:].decode("utf-8", "replace")[:1]
        )
        if begins and not goes_on:
            return True
    return False


def in_word(character: str) -> bool:
    return character == "_" or (character.isalnum() and not "\u4e00" <= character <= "\u9fff")


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_definition(seed, skips):
    """For each output of random tokens, exactly those tokens are ruled out that would complete a
    word."""
    chosen = random.Random(seed)
    words = chosen.sample(WORDS, 3)
    rules = rules_of(words, skip_special_tokens=skips)
    texts = TableRenderer().token_bytes(range(len(VOCABULARY)), skip_special_tokens=skips)
    output: list[int] = []
    for _ in range(60):
        pieces = [texts[one] for one in output if texts[one]]
        expected = {
            one
            for one, text in enumerate(texts)
            if text and any(completes([*pieces, text], word) for word in words)
        }
        assert set(rules.forbidden(np.array(output, np.int32)).tolist()) == expected, (
            words,
            pieces,
        )
        output.append(chosen.randrange(len(texts)))


def test_a_word_that_goes_on_is_another_one():
    renderer = TableRenderer([b"ass", b"ess", b" assess", b"as", b"s", b" ass", b"cl", b" ass,"])
    assert set(rules_of(["ass"], 8, renderer).forbidden(np.array([], np.int32)).tolist()) == {
        0,
        5,
        7,
    }


def test_what_comes_out_in_another_writing():
    """The tokenizer knows small letters only."""
    assert set(
        rules_of(["AB"], renderer=TableRenderer(lowers=True))
        .forbidden(np.array([2], np.int32))
        .tolist()
    ) >= {3, 7}


def test_tokens_beyond_the_vocabulary_have_no_text():
    rules = rules_of(["ab"])
    assert 3 in rules.forbidden(np.array([2, 10**6], np.int32)).tolist()


class Counted:
    """Tokens of which it is asked whether they have text."""

    def __init__(self, silent: np.ndarray) -> None:
        self._silent = silent
        self.num_read = 0

    def take(self, token_ids: np.ndarray, **options: str) -> np.ndarray:
        self.num_read += len(token_ids)
        return self._silent.take(token_ids, **options)


def num_read(rules: ForbiddenTextRules, output: list[int]) -> int:
    rules._silent = counted = Counted(rules._silent)
    rules.forbidden(np.array(output, np.int32))
    rules._silent = counted._silent
    return counted.num_read


def test_a_longer_output_takes_no_more_work():
    """For outputs of tokens without text, only those at the end are read."""
    rules = rules_of(["ab", "aba b"])
    most = 2 * (len("aba b") - 1)
    assert num_read(rules, [2]) == 1
    assert num_read(rules, [4, 2] * 50) == num_read(rules, [4, 2] * 50_000) == most
    assert num_read(rules, [4, 2] * 50_000 + [1] * 1000) < 5 * 1000
    assert num_read(rules_of(["a"]), [2] * 1000) == 0


def test_the_vocabulary_is_read_once():
    renderer = TableRenderer()
    rules = BadWordRules(renderer, len(VOCABULARY))
    rules.of(SamplingParams(bad_words=["a"]))
    before = renderer.num_read
    rules.of(SamplingParams(bad_words=["b"]))
    # Two times to see whether the word comes out as it is.
    assert renderer.num_read == before + 2


def test_more_rules_than_are_taken_are_refused(monkeypatch):
    monkeypatch.setattr("toolkit_lm.processing.bad_words.MOST_RULES", 20)
    with pytest.raises(
        RequestError,
        match="bad_words: these 2 words need more than 20 rules about tokens: give fewer",
    ) as error:
        rules_of(["abab", "aba"])
    assert error.value.param == "bad_words"
