"""State of generating requests: from the engine's tokens to users' text, stop texts and log
probabilities."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import structs

from toolkit_lm.messages import EngineOutput, TokenLogprobs
from toolkit_lm.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    WeightVersionSpan,
)
from toolkit_lm.params import FinishReason, RequestOutputKind
from toolkit_lm.processing.requests import PreparedRequest
from toolkit_lm.processing.sequence_text import SequenceText
from toolkit_lm.processing.stop import StopTexts
from toolkit_lm.renderer import Renderer, prompt_end

if TYPE_CHECKING:
    import numpy as np


class SequenceState:
    """One sequence's output so far, and how much of it the caller of `delta` has."""

    def __init__(self, index: int, has_logprobs: bool, sums_logprobs: bool) -> None:
        self.index = index
        self.text: SequenceText | None = None
        """Text of the sequence: made with the first tokens, dropped with the last, since a finished
        sequence may wait for thousands of others. None without detokenization."""
        self.pieces: list[str] = []
        """Pieces of the text that is shown."""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs else None
        self.cumulative_logprob = 0.0 if sums_logprobs else None
        self.score: float | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.versions: list[WeightVersionSpan] = []
        self.arrays: Mapping[str, np.ndarray] = {}
        self._taken = (0, 0, False)
        """Output that the caller has: pieces of text, tokens, and whether it has the end."""

    def add_tokens(self, token_ids: list[int], weight_version: str) -> None:
        """Adds tokens that weights of a version have sampled."""
        before = len(self.token_ids)
        self.token_ids += token_ids
        if not self.versions or self.versions[-1].version != weight_version:
            self.versions.append(WeightVersionSpan(weight_version, before, before))
        self.versions[-1].end = len(self.token_ids)

    def whole(self) -> CompletionOutput:
        """The whole output, in objects of its own."""
        return self._output(
            "".join(self.pieces),
            list(self.token_ids),
            None if self.logprobs is None else list(self.logprobs),
        )

    def new(self) -> CompletionOutput | None:
        """The output since the last call; None: there is none."""
        before, self._taken = (
            self._taken,
            (len(self.pieces), len(self.token_ids), self.finish_reason is not None),
        )
        if before == self._taken:
            return None
        text = "".join(self.pieces[before[0] :])
        tokens = self.token_ids[before[1] :]
        return self._output(
            text, tokens, None if self.logprobs is None else self.logprobs[before[1] :]
        )

    def _output(
        self, text: str, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            logprobs,
            self.cumulative_logprob,
            self.score,
            self.finish_reason,
            self.stop_reason,
            self.versions if self.finish_reason else None,
            self.arrays,
        )


class RequestState:
    """One request: its sequences' outputs so far."""

    def __init__(self, prepared: PreparedRequest, renderer: Renderer) -> None:
        self.prepared = prepared
        self.request = request = prepared.message
        self.request_id = request.request_id
        self.renderer = renderer
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_cached_tokens = 0
        self.error: str | None = None
        self.finished = False
        self.lock = threading.Lock()
        """Held while one thread changes the state and another may read its output."""
        params = self._params = request.params
        self._ranks = params.ranks
        self._stops = (
            StopTexts([params.stop] if isinstance(params.stop, str) else params.stop)
            if params.stop
            else None
        )
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = (
            None if params.prompt_logprobs is None else [None]
        )
        self._begun: dict[int, SequenceState] = {}
        """Sequences with output, by index. The others are made later, since making those of many
        prompts takes long."""
        self._num_outputs = params.num_outputs
        self._num_unfinished = self._num_outputs
        self._has_news = False

    def apply(self, output: EngineOutput) -> bool:
        """Adds one step's output of one sequence. True: a stop text ended it, and the engine must
        be informed."""
        self.metrics.num_draft_tokens += output.num_draft_tokens
        self.metrics.num_accepted_tokens += output.num_accepted_tokens
        for name, drafted, accepted in output.drafters:
            before = self.metrics.drafters.get(name, (0, 0))
            self.metrics.drafters[name] = before[0] + drafted, before[1] + accepted
        if len(output.token_ids) > 1 and output.score is None and self._params.stop:
            return any(self.apply(output) for output in _token_by_token(output))
        if self._params.max_tokens == 0:
            output = _without_tokens(output)
        self._has_news = True
        sequence = self._sequence(output.index)
        params = self._params
        self.num_cached_tokens = output.num_cached_tokens
        self.error = output.error or self.error
        if sequence.finish_reason is not None:
            return False
        if self._prompt_logprobs is not None:
            self._prompt_logprobs += [
                self._entries(token_logprobs) for token_logprobs in output.prompt_logprobs
            ]
        if output.token_ids:
            metrics = self.metrics
            metrics.last_token_ts = time.monotonic()
            metrics.num_generation_tokens += len(output.token_ids)
            metrics.first_token_ts = metrics.first_token_ts or metrics.last_token_ts
        sequence.add_tokens(output.token_ids, output.weight_version)
        for logprobs in output.logprobs or ():
            self._add_logprobs(sequence, logprobs)
        if output.arrays:
            sequence.arrays = {name: array.to_numpy() for name, array in output.arrays.items()}
        if output.score is not None:
            sequence.cumulative_logprob = output.cumulative_logprob
            sequence.score = output.score
        reason = output.finish_reason
        stop_reason: str | int | None = output.stop_token_id
        if params.detokenize and (stop := self._add_text(sequence, output)) is not None:
            reason = "stop"
            stop_reason = stop
        # Only after the text is there: a renderer may fail on it, and then the sequence ends with
        # an error.
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if reason is not None:
            self._end(sequence)
        return reason is not None and output.finish_reason is None

    def _sequence(self, index: int) -> SequenceState:
        if index not in self._begun:
            has_logprobs = self._params.num_logprobs is not None
            self._begun[index] = SequenceState(index, has_logprobs, has_logprobs or self._ranks)
        return self._begun[index]

    def _sequences(self) -> list[SequenceState]:
        return [self._sequence(index) for index in range(self._num_outputs)]

    def _add_text(self, sequence: SequenceState, output: EngineOutput) -> str | None:
        """Returns the stop text that ends the sequence, or None."""
        text = sequence.text
        if text is None:
            text = sequence.text = self._new_text()
            sequence.pieces = text.shown
        # A token that ends the sequence is not part of its text, unless requested.
        ended_by_token = (
            output.finish_reason == "stop" and not self._params.include_stop_str_in_output
        )
        new = output.token_ids[:-1] if ended_by_token else output.token_ids
        may_stop = len(sequence.token_ids) > self._params.min_tokens
        text.push(new, may_stop)
        if output.finish_reason is not None or text.stopped_by is not None:
            text.finish(may_stop and output.finish_reason not in ("error", "abort"))
        return text.stopped_by

    def _new_text(self) -> SequenceText:
        prompt = self.request.prompt_token_ids
        make_scope = self.prepared.stop_scope
        scope = None
        if self._stops is not None and make_scope is not None:
            scope = make_scope(prompt_end(self.renderer, prompt))
        return SequenceText(self._params, self.renderer, prompt, self._stops, scope)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends what is not finished, from outside: "abort", or "error" with the message."""
        self._has_news = True
        self.error = error or self.error
        for sequence in self._sequences():
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                if sequence.text is not None:
                    # The renderer is not called again: it may be what failed.
                    sequence.text.show_all()
                self._end(sequence)

    def next_output(self) -> RequestOutput | None:
        """Output for the caller now, by the request's `output_kind`; None: nothing is new."""
        if not self._has_news:
            return None
        kind = self._params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and not self.finished:
            return None
        self._has_news = False
        return self.delta() if kind is RequestOutputKind.DELTA else self.snapshot()

    def snapshot(self) -> RequestOutput:
        """The whole present state, in objects of its own."""
        if self._ranks and not self.finished:
            # Which of them will be the best is not known.
            outputs = [CompletionOutput(index, "", []) for index in range(self._params.n)]
        else:
            outputs = [sequence.whole() for sequence in self._sequences()]
            outputs = _best(outputs, self._params.n) if len(outputs) > self._params.n else outputs
        return self._output(
            outputs, None if self._prompt_logprobs is None else list(self._prompt_logprobs)
        )

    def delta(self) -> RequestOutput | None:
        """The output since the last call; None: there is none. Its cost does not depend on earlier
        output."""
        if self._ranks:
            return self.snapshot() if self.finished else None
        outputs = [
            new
            for _, sequence in sorted(self._begun.items())
            if (new := sequence.new()) is not None
        ]
        return self._output(outputs, self._prompt_logprobs) if outputs else None

    def _output(
        self,
        outputs: list[CompletionOutput],
        prompt_logprobs: list[dict[int, Logprob] | None] | None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            prompt_logprobs=prompt_logprobs,
            encoder_prompt=self.prepared.encoder_prompt,
            encoder_prompt_token_ids=None
            if self.request.encoder is None
            else self.request.encoder.token_ids,
            metrics=self.metrics,
        )

    def _end(self, sequence: SequenceState) -> None:
        sequence.text = None
        self._num_unfinished -= 1
        self.finished = self._num_unfinished == 0

    def _add_logprobs(self, sequence: SequenceState, found: TokenLogprobs) -> None:
        assert sequence.cumulative_logprob is not None
        sequence.cumulative_logprob += found.logprobs[0]
        if sequence.logprobs is not None:
            sequence.logprobs.append(self._entries(found))

    def _entries(self, found: TokenLogprobs) -> dict[int, Logprob]:
        texts = (
            self.renderer.token_texts(found.token_ids)
            if self._params.detokenize
            else [None] * len(found.token_ids)
        )
        # The token itself comes first, and again at its rank among the likeliest, if it is one of
        # them.
        entries: dict[int, Logprob] = {}
        ranks = [
            found.rank,
            *(range(1, len(found.token_ids)) if found.ranks is None else found.ranks),
        ]
        for token, logprob, rank, text in zip(
            found.token_ids, found.logprobs, ranks, texts, strict=True
        ):
            entries.setdefault(token, Logprob(logprob, rank, text))
        return entries


def _without_tokens(output: EngineOutput) -> EngineOutput:
    """Drops the token of a request that only computes its prompt."""
    reason = "length" if output.finish_reason == "stop" else output.finish_reason
    return structs.replace(
        output, token_ids=[], logprobs=None, finish_reason=reason, stop_token_id=None
    )


def _token_by_token(output: EngineOutput) -> Iterator[EngineOutput]:
    """Splits an output into single tokens, as if each came in a step of its own: a stop text may
    end between them."""
    last = len(output.token_ids) - 1
    for i, token in enumerate(output.token_ids):
        shown = structs.replace(
            output,
            token_ids=[token],
            logprobs=output.logprobs and output.logprobs[i : i + 1],
            num_draft_tokens=0,
            num_accepted_tokens=0,
            drafters=[],
        )
        yield (
            shown if i == last else structs.replace(shown, finish_reason=None, stop_token_id=None)
        )


def _best(outputs: list[CompletionOutput], n: int) -> list[CompletionOutput]:
    """The n sequences of the highest log probability per token. An error comes first, so that the
    others do not hide it."""
    for candidate in outputs:
        candidate.score = (
            (candidate.cumulative_logprob or 0.0) / len(candidate.token_ids)
            if candidate.token_ids
            else -math.inf
        )
    best = sorted(
        outputs,
        key=lambda candidate: (candidate.finish_reason != "error", -(candidate.score or 0.0)),
    )[:n]
    for index, candidate in enumerate(best):
        candidate.index = index
    return best
