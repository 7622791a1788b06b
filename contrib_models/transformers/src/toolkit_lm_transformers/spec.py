"""What a sequence keeps in the caches that transformers' own code reads. Needs no torch."""

from __future__ import annotations

from typing import ClassVar

from toolkit_lm.kv import KVCacheSpec


class TokensSpec(KVCacheSpec, frozen=True, kw_only=True, tag="transformers_tokens"):
    """The entries of each token in all layers' caches: keys and values, of any sizes."""

    widths: tuple[tuple[str, int], ...]
    """Dtypes, and the numbers of each that a token has."""
    token_bytes: int
    """Bytes of a token's entries."""

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.token_bytes


class StatesSpec(KVCacheSpec, frozen=True, kw_only=True, tag="transformers_states"):
    """The recurrent states of all layers: one block of max_model_len tokens, which every step
    writes. Other sequences begin from snapshots of it."""

    caches_prefixes: ClassVar[bool] = False
    forks_anywhere: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    widths: tuple[tuple[str, int], ...]
    """Dtypes, and the numbers of each that a sequence has."""
    state_bytes: int
    """Bytes of a sequence's states."""

    @property
    def page_bytes(self) -> int:
        return self.state_bytes


class PicturedSpec(TokensSpec, frozen=True, kw_only=True, tag="transformers_pictured"):
    """The ids of tokens, in sequences with pictures. A sequence that begins after another's prefix
    would lack its pictures."""

    caches_prefixes: ClassVar[bool] = False


class EncodedSpec(TokensSpec, frozen=True, kw_only=True, tag="transformers_encoded"):
    """The hidden states of all tokens of an encoder sequence."""

    grows: ClassVar[bool] = False
    of_encoder: ClassVar[bool] = True
