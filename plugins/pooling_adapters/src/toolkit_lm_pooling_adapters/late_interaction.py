"""Late interaction (Khattab and Zaharia 2020): how queries and documents are read, and which of
their tokens are compared.

Importing it needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from msgspec import Struct
from toolkit_lm.renderer import RenderedText
from toolkit_lm_poolers.details import PoolingDetails, RoleProfile

Tokenize = Callable[[str], list[int]]
"""The tokens of a text, without special ones around it."""


class LateInteractionRole(Struct, frozen=True, kw_only=True):
    """How an engine reads the texts of one role, "query" or "document", and compares them."""

    profile: RoleProfile = RoleProfile()
    prompt: str = ""
    """Goes before each text, behind the marker."""
    marker: int | None = None
    """The token that goes before the prompt, behind the special tokens with which a text begins.
    None: the prompt has it, if any."""

    def text_tokens(self, asked: int | None, longest: int) -> int | None:
        """Tokens to which a text is cut before it is completed; None: it is not cut.

        A request allows `asked` in all, the engine `longest`.
        """
        own = self.profile.max_tokens
        if own is None and asked is None:
            return None
        return min(length for length in (own, asked, longest) if length is not None) - (
            self.marker is not None
        )

    def complete(self, text: RenderedText, num_opening: int) -> RenderedText:
        """With the marker behind the `num_opening` first tokens, and filled up."""
        profile = self.profile
        token_ids = text.token_ids
        if self.marker is not None:
            token_ids = [*token_ids[:num_opening], self.marker, *token_ids[num_opening:]]
        missing = profile.filled - len(token_ids)
        if profile.filler is None or missing <= 0:
            return text._replace(token_ids=token_ids)
        return text._replace(
            token_ids=token_ids + [profile.filler] * missing,
            num_attended=None if profile.attend else len(token_ids),
        )

    def compared(self, token_ids: list[int]) -> np.ndarray:
        """Tokens whose vectors count in scores: [tokens] bool."""
        left_out = self.profile.left_out
        kept = self.profile.kept
        return np.array(
            [token not in left_out and (kept is None or token in kept) for token in token_ids], bool
        )


def make_roles(profile: PoolingDetails, tokenize: Tokenize) -> dict[str, LateInteractionRole]:
    """The roles of a checkpoint that treats queries and documents differently, by name; {} for
    others."""
    return {
        name: _make_role(role, profile.lower_case, tokenize) for name, role in profile.roles.items()
    }


def _make_role(profile: RoleProfile, lower_case: bool, tokenize: Tokenize) -> LateInteractionRole:
    """Makes a role. If the tokenizer would split its marker into several tokens, the marker's token
    is kept separately."""
    prompt = profile.prompt
    marker = profile.marker
    if marker is None or tokenize(marker.text.lower() if lower_case else marker.text) == [
        marker.token_id
    ]:
        return LateInteractionRole(profile=profile, prompt=prompt)
    return LateInteractionRole(
        profile=profile, prompt=prompt.removeprefix(marker.text), marker=marker.token_id
    )
