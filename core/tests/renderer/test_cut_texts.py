"""Texts that are cut by a renderer that says no more than how many tokens they have."""

from __future__ import annotations

import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.renderer import Rendered, Renderer


class WordRenderer(Renderer):
    """A token is a word; one more begins each prompt."""

    def render_prompt(self, prompt, *, add_special_tokens=True):
        return Rendered([0, *map(len, prompt.split())])

    def render_conversation(self, messages, **kwargs):
        raise NotImplementedError

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        raise NotImplementedError

    def decode(self, token_ids, *, skip_special_tokens=False):
        raise NotImplementedError

    def token_texts(self, token_ids):
        raise NotImplementedError

    vocab_size = 0
    eos_token_ids = []


def test_a_text_is_cut_where_its_tokens_end():
    renderer = WordRenderer(VllmConfig.default())
    texts = ["one", "one two", " one  two three", "one two three four "]
    assert renderer.cut_texts(texts, 3) == ["one", "one two", " one  two ", "one two "]
    assert renderer.cut_texts(texts, 5) == texts
    with pytest.raises(RequestError, match="1 tokens leave no room for a text") as caught:
        renderer.cut_texts(["one"], 1)
    assert caught.value.param == "max_tokens"
