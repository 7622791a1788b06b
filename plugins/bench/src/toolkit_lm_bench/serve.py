"""`toolkit bench serve`: one load of a server, and what it measured."""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from toolkit_lm.errors import ConfigError

from toolkit_lm_bench.client import Client
from toolkit_lm_bench.datasets import SEED_STRIDE, Conversation, Work, make_works
from toolkit_lm_bench.figures import Figures, Sample, make_figures
from toolkit_lm_bench.options import (
    DatasetOptions,
    FigureOptions,
    Load,
    LoadOptions,
    SamplingOptions,
    TargetOptions,
)


@dataclass(frozen=True)
class SweepSetup:
    """All that is the same for the loads of a sweep."""

    target: TargetOptions
    dataset: DatasetOptions
    sampling: SamplingOptions
    options: LoadOptions
    figures: FigureOptions
    model: str | None

    @property
    def endpoint(self) -> str:
        """Raises ConfigError."""
        is_chat = self.dataset.dataset == "conversation"
        if is_chat and self.target.endpoint == "completions":
            raise ConfigError(
                "option 'endpoint': the dataset 'conversation' is for chat, and 'completions' is "
                "asked for."
            )
        return self.target.endpoint or ("chat" if is_chat else "completions")


@dataclass(frozen=True)
class Served:
    """One load, measured."""

    load: Load
    model: str
    """Name of the model on the server."""
    figures: Figures


def serve(plan: SweepSetup, load: Load, *, index: int = 0) -> Served:
    """Sends a load to a server. Another `index` gives other prompts. Raises ToolkitError where no
    server answers, ConfigError."""
    client = Client(plan.target, plan.sampling, plan.model, plan.endpoint)
    slo = plan.options.slo
    seed = SEED_STRIDE * plan.options.seed + 2 * index
    _allow_connections()
    rng = random.Random(seed)  # nosec B311 # no secret

    def make(vocab_size: int) -> tuple[list[Work], list[Work]]:
        """The warm-up's prompts, which leave nothing in a prefix cache, and those to measure."""
        dataset = msgspec.structs.replace(plan.dataset, vocab_size=vocab_size)
        works = make_works(dataset, seed)
        few = msgspec.structs.replace(dataset, num_prompts=min(plan.options.warmup, len(works)))
        return make_works(few, seed + 1) if few.num_prompts else [], works

    # Prompts are made before the first request, and faults of a file are told before a connection.
    warmup, works = make(plan.dataset.vocab_size)

    async def run() -> tuple[list[Sample], float]:
        async with client.connect():
            nonlocal warmup, works
            known = min(plan.dataset.vocab_size, client.vocab_size or plan.dataset.vocab_size)
            if known < plan.dataset.vocab_size:
                warmup, works = make(known)
            await send_works(client, warmup, load, rng)
            start = time.perf_counter()
            samples = await send_works(client, works, load, rng)
            return samples, time.perf_counter() - start

    samples, duration = asyncio.run(run())
    return Served(
        load, client.model or "", make_figures(samples, duration, plan.figures.percentiles, slo)
    )


def _allow_connections() -> None:
    """Lets this process have as many connections as the system admits: the default, 1024 files, is
    soon too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def send_works(
    client: Client, works: Sequence[Work], load: Load, rng: random.Random
) -> list[Sample]:
    """The samples of all requests, by work. A conversation has a place of `concurrency` until its
    end."""
    places = asyncio.Semaphore(load.concurrency or max(1, len(works)))
    start = time.perf_counter()

    async def send_at(arrival: float, work: Work) -> list[Sample]:
        await asyncio.sleep(start + arrival - time.perf_counter())
        async with places:
            return await _send(client, work)

    jobs = [
        send_at(arrival, work)
        for arrival, work in zip(arrivals(len(works), load.request_rate, rng), works, strict=True)
    ]
    return [sample for samples in await asyncio.gather(*jobs) for sample in samples]


def arrivals(count: int, request_rate: float, rng: random.Random) -> list[float]:
    """Seconds after the start: the first at once, and exponential gaps (a Poisson process)."""
    found = []
    now = 0.0
    for _ in range(count):
        found.append(now)
        now += rng.expovariate(request_rate)
    return found


async def _send(client: Client, work: Work) -> list[Sample]:
    if not isinstance(work, Conversation):
        return [await client.complete(work)]
    samples: list[Sample] = []
    history: list[dict[str, Any]] = []
    for message in work.messages:
        history.append(message)
        if message["role"] == "user":
            sample = await client.chat(history, work.max_tokens)
            samples.append(sample)
            if sample.error is not None:
                # Later messages would differ from those of a whole conversation.
                break
            history.append({"role": "assistant", "content": sample.text})
    return samples
