"""Tests over real vocabularies, those in the packages litellm and mistral-common: small ones do not
show these cases."""

from __future__ import annotations

import importlib.util
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.bad_words import BadWordRules
from toolkit_lm.sampling.bad_words import ForbiddenTextRules

WORDS = [
    "Paris",
    "cat",
    "don't",
    "extraordinary",
    "São",
    "Übermut",
    "москва",
    "北京",
    "서울",
    "New York",
    "http://",
    "a",
    "!",
    "x_y",
    "😀",
]
BEFORE = ["The capital is", "(", "Well,", "one\ntwo\n", ""]
MOST = 400
"""Spellings of a word that are tried."""


@pytest.fixture(scope="module")
def make(vocabulary, resolved, tmp_path_factory):
    """make(name): a renderer."""
    carried = vocabulary.parent

    def made(name: str):
        folder = tmp_path_factory.mktemp(name)
        if name == "gpt-oss":
            from toolkit_lm_renderer_harmony.renderer import HarmonyRenderer

            shutil.copy(vocabulary, folder / "o200k_base.tiktoken")
            return HarmonyRenderer(resolved(folder))
        if name == "tekken":
            from toolkit_lm_renderer_mistral.renderer import MistralRenderer

            found = importlib.util.find_spec("mistral_common")
            shutil.copy(
                Path(found.origin).parent / "data" / "tekken_240718.json", folder / "tekken.json"
            )
            return MistralRenderer(resolved(folder))
        from toolkit_lm_renderer_hf.renderer import HfRenderer

        shutil.copy(carried / f"{name}_tokenizer.json", folder / "tokenizer.json")
        return HfRenderer(resolved(folder))

    return made


def spellings(text: bytes, token_ids: dict[bytes, int], chosen: random.Random) -> list[list[int]]:
    """Ways to write a text in tokens, shuffled: all of them where there are few."""
    longest = max(map(len, token_ids))
    found = []
    tried = 0

    def go(start: int, made: list[int]) -> None:
        nonlocal tried
        tried += 1
        if tried > 50 * MOST or len(found) == MOST:
            return
        if start == len(text):
            found.append(made)
            return
        ends = [
            end
            for end in range(start + 1, min(len(text), start + longest) + 1)
            if text[start:end] in token_ids
        ]
        for end in chosen.sample(ends, len(ends)):
            go(end, [*made, token_ids[text[start:end]]])

    go(0, [])
    return found


@pytest.mark.parametrize("name", ["gpt-oss", "tekken", "anthropic", "deepseek"])
def test_no_tokens_write_a_bad_word(make, name):
    """Any tokens that write it, plain, after a space, a bracket or a new line, after any text: the
    last of them is ruled out."""
    renderer = make(name)
    chosen = random.Random(3)
    size = renderer.vocab_size
    pieces = renderer.token_bytes(range(size), skip_special_tokens=True)
    token_ids = {piece: token_id for token_id, piece in enumerate(pieces) if piece}
    made = BadWordRules(renderer, size)
    for word in WORDS:
        rules = ForbiddenTextRules(made.of(SamplingParams(bad_words=[word])))
        num_tried = 0
        for lead in ("", " ", "(", "\n"):
            for spelling in spellings((lead + word).encode(), token_ids, chosen):
                before = chosen.choice(BEFORE)
                history = (
                    renderer.render_prompt(before, add_special_tokens=False).token_ids
                    if before
                    else []
                )
                output = np.array([*history, *spelling[:-1]], np.int32)
                assert spelling[-1] in rules.forbidden(output), (
                    word,
                    lead,
                    [pieces[one] for one in spelling],
                )
                num_tried += 1
        assert num_tried > (1 if len(word) == 1 else 4), word


@pytest.mark.parametrize("name", ["gpt-oss", "tekken", "anthropic", "deepseek"])
def test_other_words_are_written_as_ever(make, name):
    """A sentence without the words, in its usual tokens, meets no rule."""
    renderer = make(name)
    rules = ForbiddenTextRules(
        BadWordRules(renderer, renderer.vocab_size).of(
            SamplingParams(bad_words=["par", "cat", "ass"])
        )
    )
    text = (
        "The Parisian class had an assessment of cats; the category of particular parts passes "
        "as well."
    )
    output = renderer.render_prompt(text, add_special_tokens=False).token_ids
    for place, token_id in enumerate(output):
        assert token_id not in rules.forbidden(np.array(output[:place], np.int32)), renderer.decode(
            output[: place + 1]
        )


@pytest.mark.parametrize("name", ["gpt-oss", "tekken", "anthropic", "deepseek"])
def test_bytes_of_tokens_put_characters_together(make, name):
    renderer = make(name)
    text = " 😀 ﷽ 𓀀 é\u0301 ꙮ"
    token_ids = renderer.render_prompt(text, add_special_tokens=False).token_ids
    parts = renderer.token_bytes(token_ids)
    assert b"".join(parts).decode() == renderer.decode(token_ids)
    assert any("\ufffd" in one.decode("utf-8", "replace") for one in parts)
