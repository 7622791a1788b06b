"""Heads of FlagEmbedding's models (BGE-M3), beside what sentence-transformers reads: weights of
tokens, and vectors of tokens."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from toolkit_lm.errors import CheckpointError
from toolkit_lm_poolers.details import Dense, Lexical

from toolkit_lm_sentence_transformers.vocabulary import Vocabulary

_SPECIAL = ("cls_token", "eos_token", "pad_token", "unk_token")
"""Tokens whose weights FlagEmbedding leaves out."""
_USUAL = ("<s>", "</s>", "<pad>", "<unk>")
"""Their names in XLM-RoBERTa's vocabulary, where no file says."""
_MOST_HEADER = 2**20


def read_lexical(folder: Path, tokenizer: Path) -> Lexical | None:
    """Weights of tokens; None where the folder has no sparse_linear.safetensors. `tokenizer`: the
    tokenizer's folder.

    Raises CheckpointError."""
    head = _read_head(folder / "sparse_linear.safetensors")
    if head is None:
        return None
    if head.out_features != 1:
        raise CheckpointError(
            f"{head.folder!r} gives {head.out_features} numbers for a token. Supported: 1."
        )
    vocabulary = Vocabulary(tokenizer)
    named = (vocabulary.special_id(name) for name in _SPECIAL)
    usual = (vocabulary.id_of(token) for token in _USUAL)
    return Lexical(
        head=head, left_out=frozenset(found for found in (*named, *usual) if found is not None)
    )


def read_multi_vector(folder: Path) -> Dense | None:
    """Head of the tokens' vectors; None where the folder has no colbert_linear.safetensors. Raises
    CheckpointError."""
    return _read_head(folder / "colbert_linear.safetensors")


def _read_head(path: Path) -> Dense | None:
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _MOST_HEADER)))
        outputs, inputs = header["weight"]["shape"]
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{str(path)!r} is no safetensors file of a linear layer ('weight', 'bias'): "
            f"{type(error).__name__}: {error}"
        ) from error
    return Dense(
        folder=str(path),
        in_features=inputs,
        out_features=outputs,
        bias="bias" in header,
        activation="Identity",
    )
