"""LimitsConfig: bounds on what a client may ask for."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from toolkit_lm.config.options import option


class LimitsConfig(Struct, frozen=True, kw_only=True):
    """Bounds on client requests. AsyncLLM and the server refuse requests beyond the queue
    limits."""

    max_n: Annotated[int, option("Maximum number of sequences per request (n).", ge=1)] = 128
    max_logprobs: Annotated[
        int,
        option("Maximum number of log probabilities per token (logprobs, prompt_logprobs).", ge=0),
    ] = 20
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"],
        option(
            "Values returned as log probabilities. raw: of the model's own distribution. "
            "processed: of the distribution that tokens are drawn from. logits: without softmax."
        ),
    ] = "raw_logprobs"
    max_queued_requests: Annotated[
        int | None, option("Maximum number of waiting requests.", none="no bound", ge=0)
    ] = 2048
    max_queued_tokens: Annotated[
        int | None,
        option("Maximum number of prompt tokens of waiting requests.", none="no bound", ge=0),
    ] = None
