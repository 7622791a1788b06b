"""Answers of POST /completion: one object a prompt, or events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.event_stream import EventStream
from toolkit_lm_server.generation import ChoicePiece, Generation, timings_of
from toolkit_lm_server.threads import aside

from toolkit_lm_vendor_apis.llama_cpp.body import RANDOM_SEED, LlamaCompletionBody
from toolkit_lm_vendor_apis.llama_cpp.errors import worded
from toolkit_lm_vendor_apis.llama_cpp.slots import Slots

if TYPE_CHECKING:
    from toolkit_lm.outputs import Logprob, RequestOutput
    from toolkit_lm.params import SamplingParams
    from toolkit_lm.renderer import Renderer

_STOP_TYPES = {"stop": "eos", "length": "limit"}
_LEAST = -9999.0
"""The value for minus infinity, which JSON cannot express."""


class LlamaEvents(EventStream):
    """Events of a completion. The last one of each prompt says that it stops."""

    end = b""

    @staticmethod
    def failure(error: ApiError) -> dict[str, Any]:
        return worded(error)


class Answers:
    """Answers to the prompts of one body."""

    def __init__(
        self,
        body: LlamaCompletionBody,
        generation: Generation,
        renderer: Renderer,
        settings: dict[str, Any],
        model: str,
        slots: Slots,
    ) -> None:
        """`settings`: what the answers tell of the sampling parameters. `model`: its name.
        `slots`: keeps what the body's slot has computed."""
        self._slots = slots
        self._body = body
        self._generation = generation
        self._renderer = renderer
        self._settings = settings
        self._model = model

    def whole(self, choice: ChoicePiece) -> dict[str, Any]:
        """The whole answer to a prompt."""
        ids = choice.token_ids if self._body.return_tokens else []
        return self._picked(self._ended(choice, choice.text, choice.text, ids, choice.logprobs))

    async def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Each prompt's pieces, and its end, which has no text of its own."""
        texts: dict[int, str] = {}
        """The text of each answer so far."""
        tokens: dict[int, list[int]] = {}
        async for pieces in self._generation.pieces():
            events = []
            for piece in pieces:
                tokens.setdefault(piece.index, []).extend(piece.token_ids)
                if piece.finish_reason is not None:
                    await aside(self.keep, tokens.pop(piece.index), piece.index)
                if self._body.return_progress and piece.index not in texts:
                    events.append(self._progress(piece))
                texts[piece.index] = texts.get(piece.index, "") + piece.text
                if piece.text or piece.logprobs:
                    events.append(self._part(piece))
                if piece.finish_reason is not None:
                    ended = await aside(self._ended, piece, "", texts[piece.index], [], ())
                    events.append(self._picked(ended))
            yield events

    def keep(self, token_ids: Sequence[int], index: int = 0) -> None:
        """Keeps a prompt and the tokens of its answer as the content of the body's slot."""
        prompt = self._generation.prompt(index).prompt_token_ids
        body = self._body
        self._slots.remember(body.id_slot, [*prompt, *token_ids], body.model, body.cache_salt)

    def _progress(self, piece: ChoicePiece) -> dict[str, Any]:
        """The event that tells of the prompt, which has been read by the first token."""
        prompt = self._generation.prompt(piece.index)
        return {
            "index": piece.index,
            "content": "",
            "tokens": [],
            "stop": False,
            "prompt_progress": {
                "total": prompt.num_prompt_tokens,
                "cache": prompt.num_cached_tokens,
                "processed": prompt.num_prompt_tokens,
                "time_ms": timings_of([prompt], 0)["prompt_ms"],
            },
        }

    def _part(self, piece: ChoicePiece) -> dict[str, Any]:
        prompt = self._generation.prompt(piece.index)
        predicted = piece.token_offset + len(piece.token_ids)
        timings = {"timings": timings_of([prompt], predicted)}
        return {
            "index": piece.index,
            "content": piece.text,
            "tokens": piece.token_ids,
            "stop": False,
            "id_slot": self._body.id_slot,
            "tokens_predicted": predicted,
            "tokens_evaluated": prompt.num_prompt_tokens,
            **(timings if self._body.timings_per_token else {}),
            **self._probabilities(piece.token_ids, piece.logprobs),
        }

    def _ended(
        self,
        piece: ChoicePiece,
        content: str,
        text: str,
        tokens: list[int],
        logprobs: Sequence[dict[int, Logprob]],
    ) -> dict[str, Any]:
        """The object that ends an answer. `content`: its own text. `text`: that of the answer."""
        prompt = self._generation.prompt(piece.index)
        word = piece.stop_reason if isinstance(piece.stop_reason, str) else ""
        predicted = piece.token_offset + len(piece.token_ids)
        return {
            "index": piece.index,
            "content": content,
            "tokens": tokens,
            "id_slot": self._body.id_slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": predicted,
            "tokens_evaluated": prompt.num_prompt_tokens,
            "generation_settings": self._settings,
            "prompt": self._prompt_text(prompt),
            "has_new_line": "\n" in text,
            "truncated": False,
            "stop_type": "word" if word else _STOP_TYPES.get(piece.finish_reason or "", "none"),
            "stopping_word": word,
            "tokens_cached": prompt.num_cached_tokens,
            "timings": timings_of([prompt], predicted),
            **self._probabilities(piece.token_ids, logprobs),
        }

    def _prompt_text(self, prompt: RequestOutput) -> str:
        return self._renderer.decode(prompt.prompt_token_ids)

    def _probabilities(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]
    ) -> dict[str, Any]:
        most = self._body.n_probs
        if not most or not logprobs:
            return {}
        made = []
        for token_id, candidates in zip(token_ids, logprobs, strict=True):
            ranked = sorted(candidates.items(), key=lambda item: item[1].rank)
            top = [self._entry(other, found) for other, found in ranked if found.rank <= most]
            made.append({**self._entry(token_id, candidates[token_id]), "top_logprobs": top})
        return {"completion_probabilities": made}

    def _entry(self, token_id: int, logprob: Logprob) -> dict[str, Any]:
        [content] = self._renderer.token_bytes([token_id])
        return {
            "id": token_id,
            "token": logprob.decoded_token or "",
            "bytes": list(content),
            "logprob": max(logprob.logprob, _LEAST),
        }

    def _picked(self, made: dict[str, Any]) -> dict[str, Any]:
        """The fields that the body asks for."""
        if not self._body.response_fields:
            return made
        picked: dict[str, Any] = {}
        for name in self._body.response_fields:
            value: Any = made
            for part in name.split("/"):
                value = value.get(part, made) if isinstance(value, dict) else made
                if value is made:
                    break
            if value is not made:
                picked[name] = value
        return picked


def settings_of(params: SamplingParams, n_probs: int, *, stream: bool) -> dict[str, Any]:
    """Sampling parameters by llama.cpp's names."""
    most = -1 if params.max_tokens is None else params.max_tokens
    return {
        "n_predict": most,
        "max_tokens": most,
        "seed": RANDOM_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": [params.stop] if isinstance(params.stop, str) else params.stop or [],
        "ignore_eos": params.ignore_eos,
        "logit_bias": [
            {"token": token, "bias": bias} for token, bias in (params.logit_bias or {}).items()
        ],
        "n_probs": n_probs,
        "min_keep": 0,
        "stream": stream,
        **(params.extra_args or {}),
    }
