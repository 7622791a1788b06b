"""Figures computed from the times of requests. Names and definitions are those of `vllm bench
serve`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil, floor
from statistics import fmean, pstdev
from typing import Any

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


@dataclass(frozen=True)
class Sample:
    """One request. Times are seconds."""

    ttft: float = 0.0
    """From sending to the first token."""
    gaps: Sequence[float] = ()
    """Between two events with text."""
    e2el: float = 0.0
    """From sending to the last event with text."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    """Verified drafts of speculative decoding."""
    num_accepted_tokens: int = 0
    drafters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Drafts and accepted ones by drafter."""
    is_counted: bool = False
    """True if the server reported no usage: events with text are then counted as tokens."""
    text: str = ""
    error: str | None = None
    """Why it failed. Its times and numbers then say nothing."""

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (
            (self.e2el - self.ttft) / (self.num_output_tokens - 1)
            if self.num_output_tokens > 1
            else None
        )

    def meets(self, slo: Mapping[str, float]) -> bool:
        """`slo`: metric -> the most milliseconds. A metric that the request does not have is
        met."""
        had = {"ttft": self.ttft, "tpot": self.tpot, "e2el": self.e2el}
        return self.error is None and all(
            1000 * (had[name] or 0.0) <= most for name, most in slo.items()
        )


@dataclass(frozen=True)
class Distribution:
    """Distribution of one metric, in milliseconds."""

    mean: float
    std: float
    percentiles: dict[float, float]
    """Percentiles by number, such as 99."""


@dataclass(frozen=True)
class Figures:
    """One run of a load."""

    duration: float
    """Seconds from the first request to the end of the last."""
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    """Completed requests per second."""
    output_throughput: float
    """Output tokens per second."""
    total_token_throughput: float
    """Tokens of prompts and answers per second."""
    request_goodput: float | None
    """Requests per second that met the SLO. None: there is none."""
    counted: int
    """Requests whose tokens are counted events, for want of usage."""
    first_error: str | None
    draft_acceptance: float | None = None
    """Speculative decoding: accepted drafts per draft. None: no drafts."""
    acceptance_length: float | None = None
    """Output tokens per step and sequence. None: no drafts."""
    drafters: dict[str, float] = field(default_factory=dict)
    """Accepted drafts per draft, by drafter."""
    distributions: dict[str, Distribution] = field(default_factory=dict)
    """Distributions by metric. A metric that no request has is missing."""

    def as_json(self) -> dict[str, Any]:
        """Flat, with the keys of `vllm bench serve`: p99_ttft_ms."""
        row = asdict(self)
        del row["distributions"]
        for name, distribution in self.distributions.items():
            row |= {f"mean_{name}_ms": distribution.mean, f"std_{name}_ms": distribution.std}
            row |= {
                f"p{number:g}_{name}_ms": value
                for number, value in distribution.percentiles.items()
            }
        return row


def make_figures(
    samples: Sequence[Sample],
    duration: float,
    percentiles: Iterable[float],
    slo: Mapping[str, float],
) -> Figures:
    """`duration`: seconds. `slo`: metric -> the most milliseconds."""
    good = [sample for sample in samples if sample.error is None]
    num_inputs = sum(sample.num_prompt_tokens for sample in good)
    num_outputs = sum(sample.num_output_tokens for sample in good)
    times = {
        "ttft": [sample.ttft for sample in good],
        "tpot": [sample.tpot for sample in good if sample.tpot is not None],
        "itl": [gap for sample in good for gap in sample.gaps],
        "e2el": [sample.e2el for sample in good],
    }
    numbers = list(percentiles)
    return Figures(
        duration=duration,
        completed=len(good),
        failed=len(samples) - len(good),
        total_input_tokens=num_inputs,
        total_output_tokens=num_outputs,
        request_throughput=len(good) / duration,
        output_throughput=num_outputs / duration,
        total_token_throughput=(num_inputs + num_outputs) / duration,
        request_goodput=sum(sample.meets(slo) for sample in good) / duration if slo else None,
        counted=sum(sample.is_counted for sample in good),
        first_error=next((sample.error for sample in samples if sample.error is not None), None),
        **acceptance(
            num_outputs,
            sum(sample.num_draft_tokens for sample in good),
            sum(sample.num_accepted_tokens for sample in good),
        ),
        drafters=by_drafter([sample.drafters for sample in good]),
        distributions={
            name: _distribution(seconds, numbers) for name, seconds in times.items() if seconds
        },
    )


def acceptance(num_outputs: int, num_drafts: int, num_accepted: int) -> dict[str, float | None]:
    """The figures of speculative decoding. A step gives a sequence its accepted drafts and one
    token."""
    if not num_drafts:
        return {"draft_acceptance": None, "acceptance_length": None}
    return {
        "draft_acceptance": num_accepted / num_drafts,
        "acceptance_length": num_outputs / max(1, num_outputs - num_accepted),
    }


def by_drafter(requests: Sequence[Mapping[str, tuple[int, int]]]) -> dict[str, float]:
    """Accepted drafts per draft, by drafter. `requests`: drafts and accepted ones of each."""
    counts: dict[str, tuple[int, int]] = {}
    for found in requests:
        for name, (drafted, accepted) in found.items():
            before = counts.get(name, (0, 0))
            counts[name] = before[0] + drafted, before[1] + accepted
    return {name: accepted / drafted for name, (drafted, accepted) in counts.items() if drafted}


def percentile(ordered: Sequence[float], number: float) -> float:
    """Percentile of values in ascending order, interpolated linearly like numpy's. `number`: from 0
    to 100."""
    place = (len(ordered) - 1) * number / 100
    low = ordered[floor(place)]
    high = ordered[ceil(place)]
    return low + (high - low) * (place - floor(place))


def _distribution(seconds: Sequence[float], numbers: Sequence[float]) -> Distribution:
    ordered = sorted(1000 * second for second in seconds)
    return Distribution(
        fmean(ordered), pstdev(ordered), {number: percentile(ordered, number) for number in numbers}
    )
