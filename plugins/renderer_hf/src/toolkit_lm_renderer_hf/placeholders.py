"""The tokens that stand for items of media: found where a template or a prompt has put them, and
nowhere else."""

from __future__ import annotations

import json
import secrets
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

from tokenizers import Tokenizer
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.renderer import MultiModalRules

from toolkit_lm_renderer_hf.media_items import Item


class TypedPlaceholders:
    """Stand-ins for placeholder texts that a user has typed. They are random and made anew for each
    conversation, so that a user cannot type one."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # Digits pass through whatever a template does to a text.
        self.stand_ins = {token: f"{secrets.randbelow(10**30):030}" for token in tokens}
        self.used = False

    def hide(self, text: str) -> str:
        """`text` without texts of placeholders."""
        for token, stand_in in self.stand_ins.items():
            if token in text:
                text, self.used = text.replace(token, stand_in), True
        return text


class Placeholders:
    """A model's placeholder tokens, by modality. Raises CheckpointError where the tokenizer has
    none of an id."""

    def __init__(self, tokenizer: Tokenizer, rules: MultiModalRules) -> None:
        self._tokenizer = tokenizer
        self.tokenizer: Tokenizer | None = None
        """A copy of the tokenizer with tokens of placeholders that it lacks; None: it lacks none.
        """
        self._lock = threading.Lock()
        self.ids = {modality: rules.placeholder_id(modality) for modality in rules.modalities}
        if missing := self._missing(rules):
            self._tokenizer = self.tokenizer = _with_tokens(tokenizer, missing)
        self.tokens = {modality: self._token(modality) for modality in self.ids}
        """Their texts."""
        self._surround = {
            modality: texts for modality, texts in rules.surround.items() if modality in self.ids
        }

    def typed(self) -> TypedPlaceholders:
        return TypedPlaceholders(self.tokens.values())

    def surrounded(self, text: str) -> str:
        """`text` with the model's surrounding texts around each placeholder."""
        for modality, (before, after) in self._surround.items():
            token = self.tokens[modality]
            text = text.replace(token, f"{before}{token}{after}")
        return text

    def as_typed(self, text: str, typed: TypedPlaceholders) -> tuple[str, Tokenizer]:
        """The text with the user's typed placeholders restored, and a tokenizer that reads those as
        ordinary text."""
        tokenizer, renamed = self._plain
        for token, name in renamed.items():
            text = text.replace(token, name)
        for token, stand_in in typed.stand_ins.items():
            text = text.replace(stand_in, token)
        return text, tokenizer

    def places(self, token_ids: Sequence[int], items: Sequence[Item]) -> list[tuple[int, Item]]:
        """Position of each item, in prompt order. Raises RequestError if the counts of placeholders
        and items differ."""
        modalities = {token: modality for modality, token in self.ids.items()}
        found = [
            (place, modalities[token])
            for place, token in enumerate(token_ids)
            if token in modalities
        ]
        counts = Counter(modality for _, modality in found)
        wanted = Counter(item.modality for item in items)
        for modality in {**wanted, **counts}:
            if counts[modality] != wanted[modality]:
                raise RequestError(
                    f"the prompt has {counts[modality]} placeholders {self.tokens[modality]!r} "
                    f"for {wanted[modality]} items of modality "
                    f"{modality!r}; it must have one for each.",
                    items[0].param,
                )
        queues = {
            modality: deque(item for item in items if item.modality == modality)
            for modality in wanted
        }
        return [(place, queues[modality].popleft()) for place, modality in found]

    def around(
        self, modality: str, encode: Callable[[str], list[int]]
    ) -> tuple[list[int], list[int]]:
        """Tokens that the model puts before and after a placeholder."""
        before, after = (
            encode(text) if text else [] for text in self._surround.get(modality, ("", ""))
        )
        return before, after

    def _missing(self, rules: MultiModalRules) -> dict[str, int]:
        """Texts that the rules have for placeholders which the tokenizer has no token of, whatever
        its text."""
        texts = {rules.placeholder_text(modality, ""): modality for modality in self.ids}
        return {
            text: token_id
            for text, modality in texts.items()
            if text == rules.placeholder_text(modality, "another")
            and self._tokenizer.token_to_id(text) is None
            and self._tokenizer.id_to_token(token_id := self.ids[modality]) is None
        }

    def _token(self, modality: str) -> str:
        token_id = self.ids[modality]
        token = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None or self._tokenizer.encode(token, add_special_tokens=False).ids != [
            token_id
        ]:
            raise CheckpointError(
                f"the tokenizer has no token {token_id}, which stands for {modality} in a prompt."
            )
        return token

    @property
    def _plain(self) -> tuple[Tokenizer, Mapping[str, str]]:
        with self._lock:
            return self._renamed

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, Mapping[str, str]]:
        """A copy of the tokenizer and the new names of its placeholders. The names are random, so
        that a user cannot type them."""
        names = {token: f"{secrets.randbelow(10**30):030}" for token in self.tokens.values()}
        state = json.loads(self._tokenizer.to_str())
        for added in state["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        vocab = state["model"]["vocab"]
        if isinstance(vocab, dict):
            state["model"]["vocab"] = {
                names.get(token, token): number for token, number in vocab.items()
            }
        else:
            state["model"]["vocab"] = [[names.get(token, token), *rest] for token, *rest in vocab]
        plain = Tokenizer.from_str(json.dumps(state))
        for token, name in names.items():
            if plain.encode(name, add_special_tokens=False).ids != [
                self._tokenizer.token_to_id(token)
            ]:
                raise CheckpointError(
                    f"the tokenizer cannot tell its token {token!r} from that text."
                )
        return plain, names


def _with_tokens(tokenizer: Tokenizer, added: Mapping[str, int]) -> Tokenizer:
    """A copy of a tokenizer with special tokens more. Raises CheckpointError where its vocabulary
    has no room for their ids."""
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    if not isinstance(vocab, dict):
        raise CheckpointError(
            f"the tokenizer has no token {', '.join(map(repr, added))}, and none can be added to "
            f"its {state['model']['type']} vocabulary."
        )
    vocab |= added
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    state["added_tokens"] += [
        {"id": token_id, "content": text, "special": True, **flags}
        for text, token_id in added.items()
    ]
    return Tokenizer.from_str(json.dumps(state))
