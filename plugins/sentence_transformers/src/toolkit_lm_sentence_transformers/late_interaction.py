"""How a late-interaction checkpoint's queries and documents are read, and which of their tokens are
compared."""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec.structs import replace
from toolkit_lm.errors import CheckpointError
from toolkit_lm_poolers.details import Marker, RoleProfile

from toolkit_lm_sentence_transformers.checkpoint_files import SentenceTransformersConfig
from toolkit_lm_sentence_transformers.module_config import TokenMask
from toolkit_lm_sentence_transformers.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


def read_roles(found: SentenceTransformersConfig, tokenizer: Path) -> dict[str, RoleProfile]:
    """The roles of a checkpoint that treats queries and documents differently, by name; {} for
    others.

    `tokenizer`: its folder. Raises CheckpointError for what cannot be done as sentence-transformers
    does it.
    """
    transformer = found.transformer
    mask = found.token_mask
    lengths = (transformer.query_expansion, transformer.query_length, transformer.document_length)
    if mask is None and not found.markers and lengths == (None, None, None):
        return {}
    vocabulary = Vocabulary(tokenizer)
    query = _filled(_marked(found, "query", vocabulary), found, vocabulary)
    document = replace(
        _marked(found, "document", vocabulary), max_tokens=transformer.document_length
    )
    if mask is not None:
        skipped = _skiplist(mask, vocabulary)
        kept = frozenset(mask.keep_only_token_ids or ())
        query = replace(query, left_out=skipped if "query" in mask.skiplist_tasks else frozenset())
        document = replace(
            document,
            left_out=skipped if "document" in mask.skiplist_tasks else frozenset(),
            kept=kept or None,
        )
    return {"query": query, "document": document}


def _marked(found: SentenceTransformersConfig, name: str, vocabulary: Vocabulary) -> RoleProfile:
    """A role's prompt, and the token that it begins with."""
    prompt = found.prompts.get(name, "")
    marker = found.markers.get(name, "")
    # PyLate's markers are tokens with their blank ("[Q] "), those of ColBERT's authors without it
    # ("[unused0]").
    for piece in (marker, *marker.split(None, 1)[:1]):
        token = vocabulary.id_of(piece)
        if token is not None and prompt.startswith(piece):
            return RoleProfile(prompt=prompt, marker=Marker(text=piece, token_id=token))
    return RoleProfile(prompt=prompt)


def _filled(
    role: RoleProfile, found: SentenceTransformersConfig, vocabulary: Vocabulary
) -> RoleProfile:
    """The role of queries, with their length, and what they are filled up with."""
    length = found.transformer.query_length
    expansion = found.transformer.query_expansion
    if expansion is None:
        return replace(role, max_tokens=length)
    if length is not None and length < expansion.length:
        raise CheckpointError(
            f"{found.folder!r} pads queries to {expansion.length} tokens, but cuts them to "
            f"{length} (query_length)."
        )
    role = replace(role, max_tokens=expansion.length if expansion.strategy == "fixed" else length)
    if not expansion.attend and found.token_mask is None:
        # Tokens that attention does not see are compared only where a module says so.
        return role
    filler = vocabulary.mask_id if expansion.token is None else vocabulary.id_of(expansion.token)
    if filler is None:
        name = "mask token" if expansion.token is None else f"token {expansion.token!r}"
        raise CheckpointError(
            f"{found.folder!r} pads queries with the {name}, which {str(vocabulary.path)!r} does "
            "not have."
        )
    return replace(role, filler=filler, filled=expansion.length, attend=expansion.attend)


def _skiplist(mask: TokenMask, vocabulary: Vocabulary) -> frozenset[int]:
    found = {word: vocabulary.id_of(word) for word in mask.skiplist_words}
    if unknown := [word for word, token in found.items() if token is None]:
        logger.warning(
            "%s has no token for the words %s of the skiplist: they are ignored.",
            vocabulary.path,
            " ".join(unknown),
        )
    return frozenset(token for token in found.values() if token is not None)
