"""Marks: tokens of the texts that stand between the tokens of a picture, by the checkpoint's
tokenizer. Needs no torch."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

TOKENS = "input_ids"
"""Name of the array [n] of a picture's tokens, where its arrays bring them."""


class Marks:
    """Token ids of texts by tokenizer.json, which is read with the first picture. Thread-safe."""

    def __init__(self, config: VllmConfig, pattern: str, texts: Sequence[str] = ()) -> None:
        """`pattern`: of the added tokens. `texts`: ordinary ones that stand between these."""
        self._pattern = re.compile(pattern)
        self._texts = texts
        self._lock = threading.Lock()
        folder = config.renderer.tokenizer or (config.checkpoint and config.checkpoint.path)
        self._path = Path(folder or ".") / "tokenizer.json"

    def of(self, *texts: str) -> list[int]:
        """The ids of these texts, one after the other. Raises RequestError for an unknown one."""
        with self._lock:
            ids = self._ids
        for text in texts:
            if text not in ids:
                raise RequestError(
                    f"the tokenizer {self._path.name} has no token {text!r}, which stands among "
                    f"the tokens of a picture. Without it, give these tokens as {TOKENS!r}."
                )
        return [token for text in texts for token in ids[text]]

    @cached_property
    def _ids(self) -> Mapping[str, list[int]]:
        try:
            tokenizer = Tokenizer.from_file(str(self._path))
        except Exception:  # whatever tokenizers raises where there is no file, or a broken one
            return {}
        added = tokenizer.get_added_tokens_decoder().items()
        found = {
            token.content: [number]
            for number, token in added
            if self._pattern.fullmatch(token.content)
        }
        for text in self._texts if found else ():
            mark = next(iter(found))
            whole = tokenizer.encode(f"{mark}{text}{mark}", add_special_tokens=False)
            found[text] = whole.ids[1:-1]
        return found


def given_tokens(data: Mapping[str, np.ndarray], vocab_size: int | None) -> list[int] | None:
    """Tokens of a picture that its arrays bring. None: they bring none. Raises RequestError."""
    tokens = data.get(TOKENS)
    if tokens is None:
        return None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size:
        raise RequestError(f"{TOKENS} of an image must be integers [n].")
    if int(tokens.min()) < 0 or int(tokens.max()) >= (vocab_size or int(tokens.max()) + 1):
        raise RequestError(f"{TOKENS} of an image are not in the vocabulary.")
    return list(map(int, tokens.tolist()))
