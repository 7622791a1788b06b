"""The contract of a structured output backend: a half that reads what requests ask for, and one
that compiles it in the sampler."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from msgspec import Struct
from toolkit_lm.errors import RequestError

if TYPE_CHECKING:
    import numpy as np

    from toolkit_lm_structured_output.wishes import Wish

_STEPS = 16
"""Masks that a trial makes, after tokens that are drawn at random, and as many after the longest:
some grammars become expensive."""
NOTHING = "nothing matches it"
"""Why a grammar that no text follows cannot be used."""
DEAD_END = "it leads to where nothing may follow, and the end neither"


class Source(Struct, frozen=True):
    """The files and ids that define a vocabulary."""

    path: str
    """Path of a tokenizer.json."""
    eos_token_ids: tuple[int, ...]
    size: int = 0
    """Tokens of the model; 0: those of the tokenizer."""

    @classmethod
    def of(cls, renderer: Any) -> Source:
        """That of a renderer. Raises RequestError for one that has none."""
        config = renderer.config
        if config.checkpoint is None:
            raise RequestError("structured output needs a checkpoint with a tokenizer.json.")
        path = Path(config.renderer.tokenizer or config.checkpoint.path, "tokenizer.json")
        if not path.is_file():
            raise RequestError(
                f"structured output needs a tokenizer.json, and {path.parent} has none."
            )
        if not renderer.eos_token_ids:
            raise RequestError(
                "structured output needs an end-of-sequence token, and this model has none."
            )
        return cls(str(path), tuple(renderer.eos_token_ids), renderer.vocab_size)


class Reading(NamedTuple):
    """A wish translated for the backend."""

    grammar: str
    """Grammar in the form that the backend's compiler takes."""
    details: Any = None
    """Extra JSON for the grammar's trial."""


class WishReader(ABC):
    """The half that works where requests arrive. One serves all requests of an engine, from several
    threads. It imports no torch."""

    compiler: ClassVar[str]
    """"module:Class" of the other half, a GrammarCompiler."""

    def __init__(self, source: Source, renderer: Any) -> None:
        """Raises RequestError for a vocabulary that it cannot read."""
        self.source = source

    @abstractmethod
    def read(self, wish: Wish) -> Reading:
        """The grammar of a wish. Raises RequestError, naming `wish.param`, if the wish is malformed
        or too large."""


class Matcher(ABC):
    """Position of one output in a grammar."""

    @abstractmethod
    def copy(self) -> Matcher:
        """At the same place, and independent from then on."""

    @abstractmethod
    def consume(self, token_id: int) -> None:
        """Goes on by a token. Raises ValueError for one that the grammar does not allow, or takes
        too much for."""

    @abstractmethod
    def fill(self, mask: np.ndarray) -> None:
        """Makes a mask [words] int32: bit i of word w says whether token 32 w + i may follow.
        Raises ValueError, as `consume`."""

    def forced(self) -> list[int]:
        """Tokens that must follow, whose masks allow nothing else; consumed one by one they are
        followed by this. Empty: unknown."""
        return []

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Nothing but the end can follow."""


class GrammarCompiler(ABC):
    """The half that works in the sampler, and before that in a process that tries grammars."""

    def __init__(self, source: Source) -> None:
        """Raises ValueError for a vocabulary that it cannot read."""
        self.source = source

    @property
    @abstractmethod
    def size(self) -> int:
        """Tokens that masks have a bit for."""

    @property
    def token_lengths(self) -> np.ndarray | None:
        """[size] characters or bytes of each token. None: unknown, and a trial reads no long
        ones."""
        return None

    @abstractmethod
    def compile(self, grammar: str) -> Matcher:
        """At the beginning of a grammar. Raises ValueError. Called by one thread, besides those
        that use matchers."""

    def fill(self, matchers: Sequence[Matcher], masks: np.ndarray) -> None:
        """Masks [R, words] of several matchers at once."""
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.fill(mask)

    def error_of(self, grammar: str, details: Any) -> str:
        """Why a grammar cannot be used, "" where it can: it is compiled, and the first masks are
        made. In a process of its own."""
        return self.tried(grammar)

    def tried(self, grammar: str) -> str:
        """Implements `error_of` for a grammar without details."""
        import numpy as np

        generator = Random(0)  # nosec B311 # no secret
        mask = np.zeros(-(-self.size // 32), np.int32)
        lengths = self.token_lengths
        try:
            start = self.compile(grammar)
            for weights in (None,) if lengths is None else (None, lengths):
                matcher = start.copy()
                for step in range(_STEPS):
                    matcher.fill(mask)
                    allowed = self._allowed(mask)
                    if not step and not mask.any():
                        return NOTHING
                    if not mask.any() and not matcher.is_stopped:
                        return DEAD_END
                    if not len(allowed):
                        break
                    matcher.consume(
                        int(
                            generator.choice(allowed)
                            if weights is None
                            else allowed[weights[allowed].argmax()]
                        )
                    )
        except ValueError as error:
            return str(error)
        return ""

    def _allowed(self, mask: np.ndarray) -> np.ndarray:
        """The tokens that a mask allows, but for those that end a sequence."""
        import numpy as np

        allowed = np.flatnonzero(
            np.unpackbits(mask.view(np.uint8), count=self.size, bitorder="little")
        )
        return allowed[~np.isin(allowed, self.source.eos_token_ids)]


def load_compiler(target: str, source: Source) -> GrammarCompiler:
    """Makes the compiler that a "module:Class" path names (see `WishReader.compiler`)."""
    module, _, name = target.partition(":")
    made = getattr(importlib.import_module(module), name)(source)
    assert isinstance(made, GrammarCompiler), f"{target} is no GrammarCompiler"
    return made
