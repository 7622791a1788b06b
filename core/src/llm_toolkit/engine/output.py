"""From the engine's tokens to what users get: text, stop texts, log probabilities."""

from __future__ import annotations

from collections.abc import Iterable

from llm_toolkit.messages import EngineOutput, EngineRequest, TokenLogprobs
from llm_toolkit.outputs import CompletionOutput, Logprob, RequestOutput
from llm_toolkit.params import SamplingParams
from llm_toolkit.renderer import Renderer


class _SequenceText:
    """The text of one sequence as it grows; what could become a stop text is held back."""

    def __init__(self, params: SamplingParams, renderer: Renderer, prompt_token_ids: list[int]) -> None:
        self.params = params
        self.text = ""
        self.num_shown = 0
        """Characters that will not be taken back."""
        self.stopped_by: str | None = None
        self._stops = params.stop_texts
        self._stream = None
        if params.detokenize:
            self._stream = renderer.decode_stream(prompt_token_ids, skip_special_tokens=params.skip_special_tokens)

    def push(self, token_ids: list[int]) -> None:
        if self._stream is not None:
            self._add(self._stream.push(token_ids))
            self.num_shown = len(self.text) - self._held_back()

    def finish(self) -> None:
        if self._stream is not None and self.stopped_by is None:
            self._add(self._stream.flush())
        self.num_shown = len(self.text)

    def _add(self, new: str) -> None:
        if self.stopped_by is not None:
            return
        # A stop text may begin in the old text.
        start = max(0, len(self.text) - max((len(s) for s in self._stops), default=0) + 1)
        self.text += new
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[: at + len(self.stopped_by) if self.params.include_stop_str_in_output else at]

    def _held_back(self) -> int:
        """Characters at the end that are the beginning of a stop text."""
        if self.stopped_by is not None:
            return 0
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


class RequestState:
    """One request on its way: its sequences' outputs so far."""

    def __init__(self, request: EngineRequest, prompt: str | None, renderer: Renderer) -> None:
        self.request = request
        self.prompt = prompt
        self.renderer = renderer
        self.num_cached_tokens = 0
        self.error: str | None = None
        n, logprobs = request.params.n, request.params.logprobs
        self._texts = [_SequenceText(request.params, renderer, request.prompt_token_ids) for _ in range(n)]
        self._sequences = [
            CompletionOutput(i, "", [], None if logprobs is None else [], None if logprobs is None else 0.0) for i in range(n)
        ]

    @property
    def finished(self) -> bool:
        return all(s.finished for s in self._sequences)

    def apply(self, output: EngineOutput) -> bool:
        """Takes in one step's output of one sequence. True: a stop text ended it, and the engine must be told."""
        sequence, text = self._sequences[output.index], self._texts[output.index]
        self.num_cached_tokens = output.num_cached_tokens
        self.error = output.error or self.error
        if sequence.finished:
            return False
        sequence.token_ids += output.token_ids
        for logprobs in output.logprobs or ():
            self._add_logprobs(sequence, logprobs)
        # A token that ends the sequence is no part of its text, unless asked for.
        ended_by_token = output.finish_reason == "stop" and not self.request.params.include_stop_str_in_output
        text.push(output.token_ids[:-1] if ended_by_token else output.token_ids)
        sequence.finish_reason, sequence.stop_reason = output.finish_reason, output.stop_token_id
        if output.finish_reason is not None:
            text.finish()
        stopped_here = text.stopped_by is not None
        if stopped_here:
            sequence.finish_reason, sequence.stop_reason = "stop", text.stopped_by
            text.finish()
        return stopped_here and output.finish_reason is None

    def abort(self) -> None:
        for sequence, text in zip(self._sequences, self._texts, strict=True):
            if not sequence.finished:
                sequence.finish_reason = "abort"
                text.finish()

    def snapshot(self) -> RequestOutput:
        """The state now, in objects of its own."""
        outputs = [
            CompletionOutput(
                index=s.index,
                text=t.text[: t.num_shown],
                token_ids=list(s.token_ids),
                logprobs=None if s.logprobs is None else list(s.logprobs),
                cumulative_logprob=s.cumulative_logprob,
                finish_reason=s.finish_reason,
                stop_reason=s.stop_reason,
            )
            for s, t in zip(self._sequences, self._texts, strict=True)
        ]
        request = self.request
        return RequestOutput(
            request.request_id, self.prompt, request.prompt_token_ids, outputs, self.finished, self.num_cached_tokens, self.error
        )

    def _add_logprobs(self, sequence: CompletionOutput, found: TokenLogprobs) -> None:
        assert sequence.logprobs is not None and sequence.cumulative_logprob is not None
        texts = self.renderer.token_texts(found.token_ids) if self.request.params.detokenize else [None] * len(found.token_ids)
        # The sampled token comes first and again in its place among the likeliest, if it is one of them.
        ranks: Iterable[int] = [found.rank, *range(1, len(found.token_ids))]
        entries: dict[int, Logprob] = {}
        for token, logprob, rank, text in zip(found.token_ids, found.logprobs, ranks, texts, strict=True):
            entries.setdefault(token, Logprob(logprob, rank, text))
        sequence.logprobs.append(entries)
        sequence.cumulative_logprob += found.logprobs[0]
