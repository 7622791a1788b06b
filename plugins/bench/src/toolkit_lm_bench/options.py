"""The options that several commands of `toolkit bench` share."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan
from typing import Annotated, Literal

from msgspec import Struct, field
from toolkit_lm.config import option
from toolkit_lm.errors import ConfigError, nearest

SLO_METRICS = ("ttft", "tpot", "e2el")
"""The metrics that a request has one of, which an SLO may bound."""


class DatasetOptions(Struct, frozen=True, kw_only=True):
    """Which prompts are sent."""

    dataset: Annotated[
        Literal["random", "shared-prefix", "conversation", "sharegpt"],
        option(
            "Prompts: random tokens, random tokens after one prefix, conversations of a file, or "
            "those of a file in ShareGPT's format."
        ),
    ] = "random"
    dataset_path: Annotated[
        str | None,
        option(
            "File of the dataset: JSON lines with messages for conversation, JSON for sharegpt.",
            none="no file",
        ),
    ] = None
    num_prompts: Annotated[int, option("Number of prompts, or of conversations.", ge=1)] = 100
    input_len: Annotated[int, option("Tokens of a random prompt, without the prefix.", ge=1)] = 128
    output_len: Annotated[
        int | None,
        option(
            "Tokens of an answer.",
            none="128; for sharegpt, the file's answer at four characters a token",
            ge=1,
        ),
    ] = None
    prefix_len: Annotated[
        int, option("Tokens that all prompts of shared-prefix begin with.", ge=1)
    ] = 128
    vocab_size: Annotated[
        int,
        option(
            "Random token ids are below it, and below what the model has, if that is known.", ge=10
        ),
    ] = 1000


class SamplingOptions(Struct, frozen=True, kw_only=True):
    """How each answer is made."""

    temperature: Annotated[
        float | None, option("Temperature. 0: greedy.", none="that of the server", ge=0)
    ] = 0.0
    ignore_eos: Annotated[
        bool,
        option(
            "Go on after an end-of-sequence token, so that all answers have full length. Not in "
            "OpenAI's API."
        ),
    ] = True


class TargetOptions(Struct, frozen=True, kw_only=True):
    """Which server is measured."""

    url: Annotated[str, option("Server: any that speaks OpenAI's API.")] = "http://127.0.0.1:8000"
    api_key: Annotated[str | None, option("Key of the server.", none="no key")] = None
    endpoint: Annotated[
        Literal["completions", "chat"] | None,
        option(
            "Route: /v1/completions or /v1/chat/completions.",
            none="chat for conversation, else completions",
        ),
    ] = None
    timeout: Annotated[float, option("Seconds that a request may take.", gt=0)] = 21600.0


class LoadOptions(Struct, frozen=True, kw_only=True):
    """Options that are equal for all loads of a server."""

    seed: Annotated[int, option("Seed of prompts and arrivals.", ge=0)] = 0
    warmup: Annotated[int, option("Requests that are sent before, and not measured.", ge=0)] = 1
    goodput: Annotated[
        list[str],
        option(
            "SLO of a good request, as METRIC:MILLISECONDS, comma-separated: ttft:200,tpot:50. "
            "Metrics: ttft, tpot, e2el."
        ),
    ] = field(default_factory=list)

    @property
    def slo(self) -> dict[str, float]:
        """Metric -> the most milliseconds. Raises ConfigError."""
        found = {}
        for item in self.goodput:
            name, _, text = item.partition(":")
            if name not in SLO_METRICS:
                raise ConfigError(
                    f"option 'goodput': {name!r} is not a metric of it. "
                    f"{nearest(name, SLO_METRICS)}"
                )
            found[name] = _positive(
                text,
                f"option 'goodput': {name!r} needs milliseconds above 0, as in {name}:200; not "
                f"{text!r}.",
            )
        return found


class FigureOptions(Struct, frozen=True, kw_only=True):
    """Options for the reported distribution of times."""

    percentiles: Annotated[list[float], option("Percentiles, comma-separated.")] = field(
        default_factory=lambda: [50.0, 90.0, 99.0]
    )

    def __post_init__(self) -> None:
        if not self.percentiles:
            raise ConfigError("option 'percentiles' is empty. Give numbers between 0 and 100.")
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"option 'percentiles': {percentile:g} is not between 0 and 100.")


@dataclass(frozen=True)
class Load:
    """How requests arrive."""

    request_rate: float = inf
    """Requests per second, with exponential gaps (a Poisson process). inf: all at once."""
    concurrency: int | None = None
    """Most requests under way. None: no bound."""

    @property
    def name(self) -> str:
        parts = [] if self.request_rate == inf else [f"{self.request_rate:g} requests/s"]
        parts += [] if self.concurrency is None else [f"concurrency {self.concurrency}"]
        return ", ".join(parts) or "all at once"


def request_rate(text: str, name: str = "request_rate") -> float:
    """A rate of --request-rate. Raises ConfigError."""
    return _positive(
        text, f"option {name!r}: {text!r} is not a number of requests per second above 0, or inf."
    )


def concurrency(text: str, name: str) -> int:
    """Raises ConfigError."""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"option {name!r}: {text!r} is not a number of requests, at least 1.")
    return int(text)


def _positive(text: str, complaint: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(complaint) from None
    if isnan(value) or value <= 0:
        raise ConfigError(complaint)
    return value
