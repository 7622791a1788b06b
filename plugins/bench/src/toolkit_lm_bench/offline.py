"""`toolkit bench throughput` and `toolkit bench latency`: `LLM` in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, ToolkitError
from toolkit_lm.plugin import Plugins

from toolkit_lm_bench.datasets import SEED_STRIDE, Conversation, Prompt, make_works
from toolkit_lm_bench.figures import acceptance, by_drafter, percentile
from toolkit_lm_bench.options import DatasetOptions, SamplingOptions

if TYPE_CHECKING:
    from toolkit_lm import LLM, SamplingParams
    from toolkit_lm.prompts import TextPrompt, TokensPrompt


@dataclass(frozen=True)
class Throughput:
    """The run with the median of times."""

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    elapsed_time: float
    """Seconds."""
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    elapsed_times: list[float]
    """Seconds of each run, in order."""
    draft_acceptance: float | None = None
    """Speculative decoding: accepted drafts per draft. None: no drafts."""
    acceptance_length: float | None = None
    """Output tokens per step and sequence. None: no drafts."""
    drafters: dict[str, float] = field(default_factory=dict)
    """Accepted drafts per draft, by drafter."""


@dataclass(frozen=True)
class Latency:
    """Seconds of a whole call of `LLM.generate`."""

    batch_size: int
    input_len: int
    output_len: int
    avg_latency: float
    percentiles: dict[float, float]
    """Percentiles by number, such as 99."""
    latencies: list[float]
    """Seconds of each call, in order."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "percentiles": {f"{number:g}": seconds for number, seconds in self.percentiles.items()}
        }


def measure_throughput(
    config: VllmConfig,
    plugins: Plugins,
    dataset: DatasetOptions,
    sampling: SamplingOptions,
    *,
    repeats: int,
    warmup: int,
) -> Throughput:
    """Gives all prompts of a dataset to `LLM.generate`. Each of `repeats` runs has prompts of its
    own. Raises ToolkitError."""
    if dataset.dataset == "conversation":
        raise ConfigError(
            "option 'dataset': 'conversation' needs answers between its prompts; it is for "
            "`toolkit bench serve` and `sweep`."
        )
    # A fault in the dataset is reported before a model is loaded.
    _prompts(dataset, config, 0)
    from toolkit_lm import LLM

    runs: list[_Run] = []
    with LLM(config=config, plugins=plugins) as llm:
        dataset = _within(dataset, llm)
        for run in range(warmup + repeats):
            prompts = _prompts(dataset, config, run)
            params = [_params(sampling, prompt.max_tokens) for prompt in prompts]
            found = _generate(llm, prompts, params)
            if run >= warmup:
                runs.append(found)
    times = [seconds for seconds, *_ in runs]
    seconds, num_inputs, num_outputs, num_drafts, num_accepted, drafters = runs[
        times.index(median_low(times))
    ]
    return Throughput(
        num_requests=dataset.num_prompts,
        num_prompt_tokens=num_inputs,
        num_output_tokens=num_outputs,
        elapsed_time=seconds,
        requests_per_second=dataset.num_prompts / seconds,
        output_tokens_per_second=num_outputs / seconds,
        total_tokens_per_second=(num_inputs + num_outputs) / seconds,
        elapsed_times=times,
        **acceptance(num_outputs, num_drafts, num_accepted),
        drafters=drafters,
    )


def measure_latency(
    config: VllmConfig,
    plugins: Plugins,
    sampling: SamplingOptions,
    *,
    batch_size: int,
    input_len: int,
    output_len: int,
    repeats: int,
    warmup: int,
    percentiles: Sequence[float],
) -> Latency:
    """Times calls of `LLM.generate` with one batch of random prompts, new ones for each call.
    Raises ToolkitError."""
    from toolkit_lm import LLM

    dataset = DatasetOptions(num_prompts=batch_size, input_len=input_len, output_len=output_len)
    times = []
    with LLM(config=config, plugins=plugins) as llm:
        dataset = _within(dataset, llm)
        for run in range(warmup + repeats):
            prompts = _prompts(dataset, config, run)
            seconds, *_ = _generate(llm, prompts, [_params(sampling, output_len)] * batch_size)
            if run >= warmup:
                times.append(seconds)
    ordered = sorted(times)
    found = {number: percentile(ordered, number) for number in percentiles}
    return Latency(batch_size, input_len, output_len, fmean(times), found, times)


class _Run(NamedTuple):
    """A call of `LLM.generate`."""

    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafters: dict[str, float]


def _prompts(dataset: DatasetOptions, config: VllmConfig, run: int) -> list[Prompt]:
    """Prompts of a run. Raises ConfigError."""
    works = make_works(dataset, SEED_STRIDE * (config.model.seed or 0) + run)
    return [work for work in works if not isinstance(work, Conversation)]


def _generate(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> _Run:
    llm.reset_prefix_cache()
    asked: list[TextPrompt | TokensPrompt] = [
        {"prompt": prompt.content}
        if isinstance(prompt.content, str)
        else {"prompt_token_ids": prompt.content}
        for prompt in prompts
    ]
    start = time.perf_counter()
    outputs = llm.generate(asked, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for output in outputs:
        if output.error is not None:
            raise ToolkitError(f"a prompt failed: {output.error}")
    num_outputs = sum(
        len(completion.token_ids) for output in outputs for completion in output.outputs
    )
    metrics = [output.metrics for output in outputs if output.metrics]
    return _Run(
        seconds,
        sum(output.num_prompt_tokens for output in outputs),
        num_outputs,
        sum(timing.num_draft_tokens for timing in metrics),
        sum(timing.num_accepted_tokens for timing in metrics),
        by_drafter([timing.drafters for timing in metrics]),
    )


def _params(sampling: SamplingOptions, max_tokens: int) -> SamplingParams:
    from toolkit_lm import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, ignore_eos=sampling.ignore_eos)
    return (
        params if sampling.temperature is None else params.replace(temperature=sampling.temperature)
    )


def _within(dataset: DatasetOptions, llm: LLM) -> DatasetOptions:
    """Random tokens must be tokens of the model."""
    return msgspec.structs.replace(
        dataset, vocab_size=min(dataset.vocab_size, llm.engine.renderer.vocab_size)
    )
