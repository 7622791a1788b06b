"""Prompts with a text on both sides of the wanted one (FIM)."""

from __future__ import annotations

from toolkit_lm.errors import RequestError
from toolkit_lm.prompts import TokensPrompt
from toolkit_lm.renderer import Renderer

_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""The tokens before the prefix, the suffix and the wanted text. Models: Qwen and CodeGemma,
StarCoder, SantaCoder, DeepSeek, CodeLlama (two spellings)."""
_ANCHOR = "☺"
"""A character that no token continues, as in CodeLlama's reference. Two of it have fewer tokens
than twice one where a space is put before texts."""


class FillInTheMiddle:
    """Makes prompts with a suffix, using the vocabulary's tokens for it. The methods take a
    while."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._marks: list[int] | None = None

    def prompt(self, prefix: str, suffix: str) -> TokensPrompt:
        """A prompt of the two texts as they are, with the tokens that tell them apart. Raises
        RequestError where the vocabulary has no such tokens."""
        before, after, middle = self._known()
        start, token_ids = self._split(prefix)
        return TokensPrompt(
            prompt_token_ids=[*start, before, *token_ids, after, *self._following(suffix), middle]
        )

    def _known(self) -> list[int]:
        if self._marks is None:
            self._marks = next((found for marks in _SPELLINGS if (found := self._find(marks))), [])
        if not self._marks:
            raise RequestError(
                "suffix is not supported by this model: its tokenizer has no tokens for filling "
                "in the middle.",
                "suffix",
            )
        return self._marks

    def _find(self, marks: tuple[str, ...]) -> list[int]:
        found = []
        for mark in marks:
            try:
                token_ids = self._renderer.render_prompt(mark, add_special_tokens=False).token_ids
            except RequestError:
                return []
            if len(token_ids) != 1 or self._renderer.vocabulary_texts(token_ids) != [mark]:
                return []
            found += token_ids
        return found

    def _following(self, text: str) -> list[int]:
        """The tokens of a text that comes after another. A tokenizer that puts a space before each
        text puts none before this one."""
        first, two, whole = (self._bare(_ANCHOR + more) for more in ("", _ANCHOR, text))
        if text and len(two) < 2 * len(first) and whole[: len(first)] == first:
            return whole[len(first) :]
        return self._bare(text) if text else []

    def _bare(self, text: str) -> list[int]:
        token_ids: list[int] = self._renderer.render_prompt(
            text, add_special_tokens=False
        ).token_ids
        return token_ids

    def _split(self, text: str) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text, and the text's own."""
        if not text:
            return self._split("a")[0], []
        bare = self._bare(text)
        whole = self._renderer.render_prompt(text).token_ids
        start = next(
            (at for at in range(len(whole) - len(bare) + 1) if whole[at : at + len(bare)] == bare),
            0,
        )
        return whole[:start], bare
