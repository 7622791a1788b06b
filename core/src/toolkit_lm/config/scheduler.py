"""SchedulerConfig: how requests are batched."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from toolkit_lm.config.options import option


class SchedulerConfig(Struct, frozen=True, kw_only=True):
    """How requests are batched. Prompts longer than the rest of a step's budget are computed in
    chunks."""

    max_num_seqs: Annotated[
        int, option("Maximum number of sequences in a step.", ge=1, le=65536)
    ] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        option(
            "Token budget of a step, over all sequences.",
            none="2048; over pipeline stages 512; for pooling in one step 8192, in float32 4096",
            ge=1,
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool | None,
        option(
            "Chunked prefill: compute long prompts in several steps.",
            none="on where text is generated or max_model_len needs it",
        ),
    ] = None
    scheduling_policy: Annotated[
        str | None,
        option(
            "Order of admission, by name. fcfs: by arrival. fair: by turns between clients. "
            "priority: by the request's number, "
            "smallest first. Or a plugin's.",
            none="fair for the server, else fcfs",
        ),
    ] = None
    step_time_target: Annotated[
        float | None,
        option("Seconds that a step may take under the policy fair.", none="unbounded", gt=0),
    ] = None
    drafter: Annotated[
        list[str] | None,
        option(
            "Speculative decoding: drafters, by name. Of several, a step takes the drafts of the "
            "best.",
            none="none",
        ),
    ] = None
    draft_budget: Annotated[
        Literal["auto", "all"],
        option(
            "Drafts that a step verifies. auto: as many as give the most tokens per second, by "
            "measured times of steps and acceptance. all: every draft."
        ),
    ] = "auto"
    preemption_mode: Annotated[
        Literal["auto", "recompute", "swap"],
        option(
            "Preemption of a request. recompute: compute it again later. swap: move it to "
            "swap_memory. auto: the cheaper of the two."
        ),
    ] = "auto"

    @property
    def policy(self) -> str:
        """`scheduling_policy`, or its default if no server has set it."""
        return self.scheduling_policy or "fcfs"

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens`, or its default for chunked prompts: larger chunks delay the
        next tokens of running requests."""
        return 2048 if self.max_num_batched_tokens is None else self.max_num_batched_tokens
