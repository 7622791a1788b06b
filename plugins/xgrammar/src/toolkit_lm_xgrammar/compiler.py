"""xgrammar in the sampler, and in the process that tries grammars."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar
from toolkit_lm_structured_output.contract import GrammarCompiler, Matcher, Source
from transformers import PreTrainedTokenizerFast

_LENGTH = 500
"""Characters of an error."""


class XGrammarMatcher(Matcher):
    def __init__(self, matcher: Any, ends: np.ndarray) -> None:
        """`ends`: [words] int32, the mask of the tokens that end a sequence."""
        self._matcher = matcher
        self._ends = ends
        self._mask: np.ndarray | None = None
        """Mask of the allowed next tokens; None until it is asked for."""

    def copy(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._matcher.fork(), self._ends)

    def consume(self, token_id: int) -> None:
        self._mask = None
        if not self._matcher.accept_token(token_id):
            raise ValueError(f"the grammar does not allow the token {token_id}")

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = self._made()

    def _made(self) -> np.ndarray:
        if self._mask is None:
            mask = np.full_like(self._ends, -1)
            # After its end a grammar has no mask of its own.
            if self._matcher.is_terminated():
                mask[:] = self._ends
            else:
                self._matcher.fill_next_token_bitmask(mask[None, :], 0)
            self._mask = mask
        return self._mask

    @property
    def is_stopped(self) -> bool:
        if self._matcher.is_terminated():
            return True
        return self._matcher.is_completed() and not (self._made() & ~self._ends).any()


class XGrammarCompiler(GrammarCompiler):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._tokens = _tokens(source)
        ends = np.zeros(-(-self.size // 32) * 32, bool)
        ends[[token for token in source.eos_token_ids if token < self.size]] = True
        self._ends = np.packbits(ends, bitorder="little").view(np.int32)
        self._compiler = xgrammar.GrammarCompiler(self._tokens, max_threads=1, cache_enabled=False)

    @property
    def size(self) -> int:
        size: int = self._tokens.vocab_size
        return size

    @cached_property
    def token_lengths(self) -> np.ndarray:
        return np.array([len(token) for token in self._tokens.decoded_vocab])

    def compile(self, grammar: str) -> XGrammarMatcher:
        try:
            compiled = self._compiled(json.loads(grammar))
        except Exception as error:  # of xgrammar's own, and RuntimeError
            raise ValueError(_reason(error)) from None
        return XGrammarMatcher(xgrammar.GrammarMatcher(compiled), self._ends)

    def _compiled(self, grammar: dict[str, Any]) -> Any:
        match grammar["kind"]:
            case "json":
                return self._compiler.compile_json_schema(
                    json.dumps(grammar["schema"]),
                    any_whitespace=grammar["any_whitespace"],
                    max_whitespace_cnt=grammar["most"] if grammar["any_whitespace"] else None,
                    strict_mode=False,
                )
            case "regex":
                return self._compiler.compile_regex(grammar["text"])
            case "grammar":
                return self._compiler.compile_grammar(grammar["text"])
            case _:
                return self._compiler.compile_structural_tag(json.dumps(grammar["tag"]))


def _tokens(source: Source) -> Any:
    """The vocabulary, without the special tokens but for those that end a text. Raises
    ValueError."""
    try:
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=source.path)
        size = source.size or len(tokenizer)
        found = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=size, stop_token_ids=list(source.eos_token_ids)
        )
        added = json.loads(Path(source.path).read_text(encoding="utf-8")).get("added_tokens", [])
    except Exception as error:  # of any kind, of several libraries
        raise ValueError(f"xgrammar cannot read {source.path}: {_reason(error)}") from None
    special = {token["id"] for token in added if token.get("special")}
    vocabulary = [""] * size
    for text, token_id in tokenizer.get_vocab().items():
        if token_id < size and token_id not in special:
            vocabulary[token_id] = text
    return xgrammar.TokenizerInfo(
        vocabulary,
        vocab_type=found.vocab_type,
        vocab_size=size,
        stop_token_ids=list(source.eos_token_ids),
        add_prefix_space=found.add_prefix_space,
    )


def _reason(error: Exception) -> str:
    """In one line, without the compiler's time and file."""
    text = " ".join(str(error).split())
    head, _, tail = text.partition(".cc:")
    return (tail.partition(": ")[2] if "/" in head and tail else text)[:_LENGTH] or type(
        error
    ).__name__
