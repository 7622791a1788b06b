"""SharedOutputs: the outputs of finished requests, from which later requests get drafts."""

from __future__ import annotations

import numpy as np

from toolkit_lm_drafters.corpus import END, NO_GUESS, Corpus, Guess, Limits

_SIZES = (4, 10)
"""Tokens of the grams of finished outputs: longer than those of a sequence's own tokens, since
there is more to find."""
_BYTES = 4 + 8 * len(_SIZES)
"""Bytes of a token and of its places in the indexes, for capacities that are powers of two."""
_SMALLEST = 1024
"""Tokens that a new scope has room for."""
_LEAST = 8
"""Tokens of the shortest output that is kept."""


class _Scope:
    """Outputs of one scope, one after the other."""

    def __init__(self, capacity: int) -> None:
        self.tokens = np.zeros(capacity, np.int32)
        self.held = self.tokens.data
        self.num_tokens = 0
        self.corpus = Corpus(_SIZES, capacity)
        self.last_use = 0

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.corpus.num_bytes

    def append(self, tokens: np.ndarray) -> None:
        end = self.num_tokens + len(tokens)
        self.tokens[self.num_tokens : end] = tokens
        self.corpus.update(self.tokens[:end])
        self.num_tokens = end


class SharedOutputs:
    """Outputs by scope, within a limit of bytes. No scope sees another's. The least recently used
    scope is forgotten first; a scope that needs all of the limit forgets its older half.

    One thread adds, and another one asks. A scope only grows in place, and is replaced when it is
    full, so a question sees a valid state at any time.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._scopes: dict[str, _Scope] = {}
        self._uses = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all scopes."""
        return sum(scope.num_bytes for scope in self._scopes.values())

    def add(self, name: str, output: np.ndarray) -> None:
        """Adds an output [N] int32 to a scope."""
        if len(output) < _LEAST:
            return
        tokens = np.append(output, np.int32(END))
        scope = self._scopes.get(name)
        if scope is None or scope.num_tokens + len(tokens) > len(scope.tokens):
            scope = self._larger(name, len(tokens))
            if scope is None:
                return
            self._scopes[name] = scope
        scope.append(tokens)
        self._use(scope)

    def _larger(self, name: str, more: int) -> _Scope | None:
        """Makes a scope with the tokens of the present one and room for `more`. None: there is no
        such room."""
        present = self._scopes.pop(name, None)
        known = np.zeros(0, np.int32) if present is None else present.tokens[: present.num_tokens]
        most = _floor(self.most_bytes // _BYTES)
        if len(known) + more > most:
            known = known[len(known) - min(len(known), most // 2, max(0, most - more)) :]
        if more > most:
            return None
        made = _Scope(min(most, max(_SMALLEST, 2 * _floor(len(known) + more))))
        while self._scopes and self.num_bytes + made.num_bytes > self.most_bytes:
            del self._scopes[min(self._scopes, key=lambda key: self._scopes[key].last_use)]
        if len(known):
            made.append(known)
        return made

    def _use(self, scope: _Scope) -> None:
        self._uses += 1
        scope.last_use = self._uses

    def guess(self, name: str, known: memoryview, limits: Limits) -> Guess:
        """Guesses at the tokens after `known` by the outputs of a scope."""
        scope = self._scopes.get(name)
        if scope is None:
            return NO_GUESS
        self._use(scope)
        return scope.corpus.guess(scope.held, scope.num_tokens, known, limits)


def _floor(number: int) -> int:
    """Largest power of two that is at most `number`; 0 of 0."""
    return 1 << number.bit_length() - 1 if number else 0
