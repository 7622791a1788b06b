"""Late interaction (Khattab and Zaharia 2020): how queries and documents are read, and which of their tokens are compared.

Importing it needs no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from toolkit_lm.errors import CheckpointError
from toolkit_lm.pooling.module_config import TokenMask
from toolkit_lm.pooling.sentence_transformers import SentenceTransformersConfig
from toolkit_lm.pooling.vocabulary import Vocabulary
from toolkit_lm.renderer import RenderedText

logger = logging.getLogger(__name__)

Tokenize = Callable[[str], list[int]]
"""The tokens of a text, without special ones around it."""


class LateInteractionRole(Struct, frozen=True, kw_only=True):
    """How a checkpoint reads the texts of one role, "query" or "document", and compares them."""

    prompt: str = ""
    """Goes before each text, behind the marker."""
    marker: int | None = None
    """The token that goes before the prompt, behind the special tokens with which a text begins."""
    max_tokens: int | None = None
    """What is longer is cut, marker and special tokens included. None: it has no length of its own."""
    filler: int | None = None
    """The token with which texts are filled up to `filled` tokens."""
    filled: int = 0
    attend: bool = True
    """The model's attention sees the tokens that are filled in."""
    left_out: frozenset[int] = frozenset()
    """Tokens that are not compared."""
    kept: frozenset[int] | None = None
    """Only these are compared. None: all but `left_out`."""

    def text_tokens(self, asked: int | None, longest: int) -> int | None:
        """Tokens to which a text is cut before it is completed; None: it is not cut.

        A request allows `asked` in all, the engine `longest`.
        """
        if self.max_tokens is None and asked is None:
            return None
        return min(length for length in (self.max_tokens, asked, longest) if length is not None) - (self.marker is not None)

    def complete(self, text: RenderedText, num_opening: int) -> RenderedText:
        """With the marker behind the `num_opening` first tokens, and filled up."""
        token_ids = text.token_ids
        if self.marker is not None:
            token_ids = [*token_ids[:num_opening], self.marker, *token_ids[num_opening:]]
        missing = self.filled - len(token_ids)
        if self.filler is None or missing <= 0:
            return text._replace(token_ids=token_ids)
        return text._replace(token_ids=token_ids + [self.filler] * missing, num_attended=None if self.attend else len(token_ids))

    def compared(self, token_ids: list[int]) -> np.ndarray:
        """Which tokens' vectors have a part in scores: [tokens] bool."""
        return np.array([token not in self.left_out and (self.kept is None or token in self.kept) for token in token_ids], bool)


def read_roles(found: SentenceTransformersConfig, folder: Path, tokenize: Tokenize) -> dict[str, LateInteractionRole]:
    """The roles of a checkpoint that treats queries and documents differently, by name; {} for others.

    `folder`: the tokenizer's. Raises CheckpointError for what cannot be done as sentence-transformers does it.
    """
    transformer, mask = found.transformer, found.token_mask
    lengths = (transformer.query_expansion, transformer.query_length, transformer.document_length)
    if mask is None and not found.markers and lengths == (None, None, None):
        return {}
    vocabulary = Vocabulary(folder)
    query = _filled(_marked(found, "query", vocabulary, tokenize), found, vocabulary)
    document = replace(_marked(found, "document", vocabulary, tokenize), max_tokens=transformer.document_length)
    if mask is not None:
        skipped, kept = _skiplist(mask, vocabulary), frozenset(mask.keep_only_token_ids or ())
        query = replace(query, left_out=skipped if "query" in mask.skiplist_tasks else frozenset())
        document = replace(document, left_out=skipped if "document" in mask.skiplist_tasks else frozenset(), kept=kept or None)
    return {"query": query, "document": document}


def _marked(found: SentenceTransformersConfig, name: str, vocabulary: Vocabulary, tokenize: Tokenize) -> LateInteractionRole:
    """A role's prompt. Where the tokenizer would take its marker for several tokens, the one that it is stands apart."""
    prompt, marker = found.prompts.get(name, ""), found.markers.get(name, "")
    # PyLate's markers are tokens with their blank ("[Q] "), those of ColBERT's authors without it ("[unused0]").
    for piece in (marker, *marker.split(None, 1)[:1]):
        token = vocabulary.id_of(piece)
        if token is not None and prompt.startswith(piece):
            read_as = tokenize(piece.lower() if found.transformer.do_lower_case else piece)
            return (
                LateInteractionRole(prompt=prompt)
                if read_as == [token]
                else LateInteractionRole(prompt=prompt.removeprefix(piece), marker=token)
            )
    return LateInteractionRole(prompt=prompt)


def _filled(role: LateInteractionRole, found: SentenceTransformersConfig, vocabulary: Vocabulary) -> LateInteractionRole:
    """The role of queries, with their length, and what they are filled up with."""
    length, expansion = found.transformer.query_length, found.transformer.query_expansion
    if expansion is None:
        return replace(role, max_tokens=length)
    if length is not None and length < expansion.length:
        raise CheckpointError(f"{found.folder!r} fills queries up to {expansion.length} tokens, but cuts them to {length} (query_length).")
    role = replace(role, max_tokens=expansion.length if expansion.strategy == "fixed" else length)
    if not expansion.attend and found.token_mask is None:
        # Tokens that attention does not see are compared only where a module says so.
        return role
    filler = vocabulary.mask_id if expansion.token is None else vocabulary.id_of(expansion.token)
    if filler is None:
        name = "mask token" if expansion.token is None else f"token {expansion.token!r}"
        raise CheckpointError(f"{found.folder!r} fills queries up with the {name}, which {str(vocabulary.path)!r} does not have.")
    return replace(role, filler=filler, filled=expansion.length, attend=expansion.attend)


def _skiplist(mask: TokenMask, vocabulary: Vocabulary) -> frozenset[int]:
    found = {word: vocabulary.id_of(word) for word in mask.skiplist_words}
    if unknown := [word for word, token in found.items() if token is None]:
        logger.warning("%s has no token for %s: nothing is left out for them.", vocabulary.path, " ".join(unknown))
    return frozenset(token for token in found.values() if token is not None)
