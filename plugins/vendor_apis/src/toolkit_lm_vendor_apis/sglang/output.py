"""Answers of POST /generate: one object for each answer, or events with all of it so far."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit_lm_server.generation import ChoicePiece, Generation

from toolkit_lm_vendor_apis.sglang.body import SglangGenerateBody, id_of

if TYPE_CHECKING:
    from toolkit_lm.outputs import Logprob

_LEAST = -9999.0
"""The value for minus infinity, which JSON cannot express."""
Told = list[Any]
"""A log probability, a token id and its text."""


@dataclass(slots=True)
class _SoFar:
    """An answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    chosen: list[Told] = field(default_factory=list)
    top: list[list[Told]] = field(default_factory=list)
    named: list[list[Told]] = field(default_factory=list)


class Answers:
    """Answers to the prompts of one body."""

    def __init__(
        self, body: SglangGenerateBody, generation: Generation, n: int, begin: float
    ) -> None:
        """`n`: answers to each prompt. `begin`: when the request came, by time.perf_counter()."""
        self._body = body
        self.generation = generation
        self._n = n
        self._begin = begin
        self._so_far: dict[int, _SoFar] = {}
        self.is_several = body.is_several or n > 1

    async def aclose(self) -> None:
        await self.generation.aclose()

    def whole(self, choice: ChoicePiece) -> dict[str, Any]:
        """The whole answer."""
        return self._object(choice)

    async def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Events with all of an answer that there is. Those of several answers have an index."""
        async for pieces in self.generation.pieces():
            events = []
            for piece in pieces:
                made = self._object(piece)
                events.append(made | ({"index": piece.index} if self.is_several else {}))
            yield events

    def _object(self, piece: ChoicePiece) -> dict[str, Any]:
        so_far = self._so_far.setdefault(piece.index, _SoFar())
        so_far.text += piece.text
        so_far.token_ids += piece.token_ids
        self._extend_logprobs(so_far, piece)
        prompt = self.generation.prompt(piece.index)
        number = piece.index // self._n
        info = {
            "id": id_of(self._body.rid, number, f"{self.generation.id}-{piece.index}"),
            "finish_reason": _reason(piece, so_far.token_ids),
            "prompt_tokens": prompt.num_prompt_tokens,
            **weights_of(piece),
            "completion_tokens": len(so_far.token_ids),
            "cached_tokens": prompt.num_cached_tokens,
            "e2e_latency": time.perf_counter() - self._begin,
            **self._logprobs(so_far, piece),
            **_arrays_of(piece, prompt.num_prompt_tokens),
        }
        return {"text": so_far.text, "output_ids": [*so_far.token_ids], "meta_info": info}

    def _extend_logprobs(self, so_far: _SoFar, piece: ChoicePiece) -> None:
        # A last piece may end a text, and have no token.
        for token_id, table in zip(piece.token_ids, piece.logprobs, strict=bool(piece.logprobs)):
            so_far.chosen.append(self._triple(token_id, table[token_id]))
            so_far.top.append(self._likeliest(table))
            so_far.named.append(self._of_names(table))

    def _logprobs(self, so_far: _SoFar, piece: ChoicePiece) -> dict[str, Any]:
        body = self._body
        if not body.wants_logprobs:
            return {}
        made: dict[str, Any] = {"output_token_logprobs": [*so_far.chosen]}
        if body.top:
            made["output_top_logprobs"] = [*so_far.top]
        if body.named:
            made["output_token_ids_logprobs"] = [*so_far.named]
        prompt = self.generation.prompt(piece.index)
        ids = prompt.prompt_token_ids
        tables = prompt.prompt_logprobs if body.start >= 0 else None
        pairs = [*zip(ids, tables or (), strict=False)][max(body.start, 0) :]
        made["input_token_logprobs"] = [
            [None, token_id, None] if table is None else self._triple(token_id, table[token_id])
            for token_id, table in pairs
        ]
        if body.top:
            made["input_top_logprobs"] = [
                None if table is None else self._likeliest(table) for _, table in pairs
            ]
        return made

    def _likeliest(self, table: dict[int, Logprob]) -> list[Told]:
        ranked = sorted(table.items(), key=lambda item: item[1].rank)
        return [
            self._triple(token, logprob)
            for token, logprob in ranked
            if logprob.rank <= self._body.top
        ]

    def _of_names(self, table: dict[int, Logprob]) -> list[Told]:
        names: Sequence[int] = self._body.named or ()
        return [self._triple(token, table[token]) for token in names if token in table]

    def _triple(self, token_id: int, logprob: Logprob) -> Told:
        text = logprob.decoded_token if self._body.return_text_in_logprobs else None
        return [max(logprob.logprob, _LEAST), token_id, text]


def weights_of(piece: ChoicePiece) -> dict[str, str]:
    """The version of the weights that drew the last token of an ended answer."""
    if piece.finish_reason is None:
        return {}
    spans = piece.versions.get("weight_versions")
    return {"weight_version": (spans[-1]["version"] if spans else "") or "default"}


def _arrays_of(piece: ChoicePiece, num_prompt: int) -> dict[str, Any]:
    """Hidden states of the prompt's tokens, in a list, then those of each further token. Experts,
    in base64 as int32."""
    found: dict[str, Any] = {}
    if (states := piece.arrays.get("hidden_states")) is not None:
        rows = (states[:, 0] if states.shape[1] == 1 else states).tolist()
        found["hidden_states"] = [rows[:num_prompt], *rows[num_prompt:]]
    if (experts := piece.arrays.get("routed_experts")) is not None:
        found["routed_experts"] = base64.b64encode(experts.astype("<i4").tobytes()).decode("ascii")
    return found


def _reason(piece: ChoicePiece, token_ids: Sequence[int]) -> dict[str, Any] | None:
    match piece.finish_reason:
        case None:
            return None
        case "stop":
            last = token_ids[-1] if token_ids else None
            return {
                "type": "stop",
                "matched": last if piece.stop_reason is None else piece.stop_reason,
            }
        case "length":
            return {"type": "length", "length": len(token_ids)}
        case other:
            return {"type": "abort", "message": other}
