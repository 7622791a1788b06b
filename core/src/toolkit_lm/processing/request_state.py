"""From the engine's tokens to what users get: text, stop texts, log probabilities."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable

from toolkit_lm.messages import EngineOutput, EngineRequest, TokenLogprobs
from toolkit_lm.outputs import CompletionOutput, Logprob, RequestOutput
from toolkit_lm.params import FinishReason, SamplingParams
from toolkit_lm.processing.stop import StopFinder
from toolkit_lm.renderer import Renderer


class _SequenceText:
    """The text of one sequence as it grows; what could become a stop text is held back."""

    def __init__(self, params: SamplingParams, renderer: Renderer, prompt_token_ids: list[int]) -> None:
        self.params = params
        self.text = ""
        self.num_shown = 0
        """Characters that will not be taken back."""
        self.stopped_by: str | None = None
        self._finder = StopFinder(params.stop_texts)
        self._stream = None
        if params.detokenize:
            self._stream = renderer.decode_stream(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def push(self, token_ids: list[int], may_stop: bool) -> None:
        """Adds tokens; stop texts count only where `may_stop`."""
        if self._stream is not None:
            self._add(self._stream.push(token_ids), may_stop)
            self.num_shown = len(self.text) - (0 if self.stopped_by is not None else self._finder.num_held_back)

    def finish(self) -> None:
        if self._stream is not None and self.stopped_by is None:
            self._add(self._stream.flush(), may_stop=False)
        self.num_shown = len(self.text)

    def _add(self, new: str, may_stop: bool) -> None:
        found = self._finder.find(new) if may_stop and new else None
        if found is None:
            self.text += new
            return
        end, self.stopped_by = found
        self.text += new[:end]
        if not self.params.include_stop_str_in_output:
            self.text = self.text[: -len(self.stopped_by)]


class RequestState:
    """One request on its way: its sequences' outputs so far."""

    def __init__(self, request: EngineRequest, prompt: str | None, renderer: Renderer) -> None:
        self.request = request
        self.prompt = prompt
        self.renderer = renderer
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.lock = threading.Lock()
        """Held where one thread changes it while another may take a snapshot."""
        self.version = 0
        """Counts its changes."""
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None if request.params.prompt_logprobs is None else [None]
        params = request.params
        total = None if params.logprobs is None and params.num_outputs == params.n else 0.0
        self._texts = [_SequenceText(params, renderer, request.prompt_token_ids) for _ in range(params.num_outputs)]
        self._sequences = [CompletionOutput(i, "", [], None if params.logprobs is None else [], total) for i in range(params.num_outputs)]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return all(s.finished for s in self._sequences)

    def apply(self, output: EngineOutput) -> bool:
        """Takes in one step's output of one sequence. True: a stop text ended it, and the engine must be told."""
        self.version += 1
        sequence, text, params = self._sequences[output.index], self._texts[output.index], self.request.params
        self.num_cached_tokens = output.num_cached_tokens
        self.error = output.error or self.error
        if sequence.finished:
            return False
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += [self._entries(one) for one in output.prompt_logprobs]
        sequence.token_ids += output.token_ids
        for logprobs in output.logprobs or ():
            self._add_logprobs(sequence, logprobs)
        if output.score is not None:
            sequence.cumulative_logprob, sequence.score = output.cumulative_logprob, output.score
        # A token that ends the sequence is no part of its text, unless asked for.
        ended_by_token = output.finish_reason == "stop" and not params.include_stop_str_in_output
        new = output.token_ids[:-1] if ended_by_token else output.token_ids
        text.push(new, may_stop=len(sequence.token_ids) > params.min_tokens)
        sequence.finish_reason, sequence.stop_reason = output.finish_reason, output.stop_token_id
        if text.stopped_by is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", text.stopped_by
        if sequence.finished:
            text.finish()
        return sequence.finished and output.finish_reason is None

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends what is not finished, from outside: "abort", or "error" with what went wrong."""
        self.version += 1
        self.error = error or self.error
        for sequence, text in zip(self._sequences, self._texts, strict=True):
            if not sequence.finished:
                sequence.finish_reason = reason
                # What is held back is shown, but the renderer is not asked again: it may be what failed.
                text.num_shown = len(text.text)

    def snapshot(self) -> RequestOutput:
        """The state now, in objects of its own."""
        params = self.request.params
        outputs = [
            CompletionOutput(
                index=s.index,
                text=t.text[: t.num_shown],
                token_ids=list(s.token_ids),
                logprobs=None if s.logprobs is None else list(s.logprobs),
                cumulative_logprob=s.cumulative_logprob,
                score=s.score,
                finish_reason=s.finish_reason,
                stop_reason=s.stop_reason,
            )
            for s, t in zip(self._sequences, self._texts, strict=True)
        ]
        if params.ranks and not self.finished:
            # Which of them will be the best is not known.
            outputs = [CompletionOutput(index, "", []) for index in range(params.n)]
        elif len(outputs) > params.n:
            outputs = _best(outputs, params.n)
        prompt_token_ids = list(self.request.prompt_token_ids)
        prompt_logprobs = None if self._prompt_logprobs is None else list(self._prompt_logprobs)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            prompt_logprobs=prompt_logprobs,
        )

    def _add_logprobs(self, sequence: CompletionOutput, found: TokenLogprobs) -> None:
        assert sequence.cumulative_logprob is not None
        sequence.cumulative_logprob += found.logprobs[0]
        if sequence.logprobs is not None:
            sequence.logprobs.append(self._entries(found))

    def _entries(self, found: TokenLogprobs) -> dict[int, Logprob]:
        texts = self.renderer.token_texts(found.token_ids) if self.request.params.detokenize else [None] * len(found.token_ids)
        # The token itself comes first, and again in its place among the likeliest, if it is one of them.
        ranks: Iterable[int] = [found.rank, *range(1, len(found.token_ids))]
        entries: dict[int, Logprob] = {}
        for token, logprob, rank, text in zip(found.token_ids, found.logprobs, ranks, texts, strict=True):
            entries.setdefault(token, Logprob(logprob, rank, text))
        return entries


def _best(outputs: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """Those of the highest log probability per token. An error comes first: the others are not to hide it."""
    for one in outputs:
        one.score = (one.cumulative_logprob or 0.0) / len(one.token_ids) if one.token_ids else -math.inf
    best = sorted(outputs, key=lambda one: (one.finish_reason != "error", -(one.score or 0.0)))[:n]
    for index, one in enumerate(best):
        one.index = index
    return best
