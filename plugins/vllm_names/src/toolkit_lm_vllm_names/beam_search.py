"""BeamSearchParams, and the results of `LLM.beam_search` as vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit_lm import CompletionOutput, RequestOutput, SamplingParams


@dataclass
class BeamSearchSequence:
    """One of the likeliest sequences."""

    tokens: list[int]
    """Token ids, including the prompt's."""
    text: str | None
    """The prompt's, too; without it where the prompt was token ids."""
    cum_logprob: float
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass
class BeamSearchOutput:
    """The sequences of one prompt, the likeliest first."""

    sequences: list[BeamSearchSequence]


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`. A sequence is ranked by log probability / (length of its
    output) ** length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def sampling_params(self) -> SamplingParams:
        """The same search as parameters of `generate`. Raises RequestError."""
        same: dict[str, Any] = {
            "max_tokens": self.max_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": self.temperature,
        }
        same["include_stop_str_in_output"] = self.include_stop_str_in_output
        if self.beam_width == 1:
            return SamplingParams(logprobs=0, **same)
        width = self.beam_width
        return SamplingParams(
            use_beam_search=True,
            beam_width=width,
            n=width,
            length_penalty=self.length_penalty,
            **same,
        )

    def result(self, output: RequestOutput) -> BeamSearchOutput:
        """Turns an output of `generate` into sequences that include the prompt."""
        return BeamSearchOutput([_sequence(output, completion) for completion in output.outputs])


def _sequence(output: RequestOutput, completion: CompletionOutput) -> BeamSearchSequence:
    tokens = [*output.prompt_token_ids, *completion.token_ids]
    text = (output.prompt or "") + completion.text
    return BeamSearchSequence(
        tokens,
        text,
        completion.cumulative_logprob or 0.0,
        completion.finish_reason,
        completion.stop_reason,
    )
