"""The log's lines on the engine: a summary at the start, and the throughput while there is work."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit_lm_server.log import Clock, fields
from toolkit_lm_server.metrics import Metrics, Totals, num_fitting
from toolkit_lm_server.recent import percentile

if TYPE_CHECKING:
    from toolkit_lm import AsyncLLM
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.kv import KVCacheConfig

logger = logging.getLogger(__name__)

_INTERVAL = 10.0
"""Seconds from one line of throughput to the next."""
_WEIGHTS = (".safetensors", ".gguf")


class Throughput:
    """Logs the engine's throughput every ten seconds, while there is work."""

    def __init__(self, metrics: Metrics, seconds: float = _INTERVAL) -> None:
        self._metrics = metrics
        self._clock = Clock(seconds)
        self._before = Totals()

    def tend(self) -> None:
        """Writes the line when it is time. Call it often."""
        if (seconds := self._clock.elapsed()) is None:
            return
        now = self._metrics.totals
        before = self._before
        self._before = Totals(now.prompt, now.cached, now.output)
        prompt = now.prompt - before.prompt
        cached = now.cached - before.cached
        output = now.output - before.output
        first, between = self._metrics.recent.drain()
        load = self._metrics.load
        running, waiting = (0, 0) if load is None else (load.num_running, load.num_waiting)
        if not (prompt or output or running or waiting):
            return
        usage = 0.0 if load is None else load.num_used_blocks / max(load.num_total_blocks, 1)
        hits = cached / prompt if prompt else 0.0
        logger.info(
            "%.1f prompt tokens/s, %.1f output tokens/s; %d sequences running, %d requests "
            "waiting; KV cache %.1f%% used, "
            "prefix cache hits %.1f%%%s%s",
            *(prompt / seconds, output / seconds, running, waiting, 100 * usage, 100 * hits),
            _shown("first token", first),
            _shown("between tokens", between),
            extra=fields(
                **_percentiles("time_to_first_token", first),
                **_percentiles("inter_token_latency", between),
                prompt_tokens_per_second=round(prompt / seconds, 3),
                output_tokens_per_second=round(output / seconds, 3),
                num_running=running,
                num_waiting=waiting,
                kv_cache_usage=round(usage, 6),
                prefix_cache_hit_rate=round(hits, 6),
            ),
        )


_PERCENTS = (50, 99)


def _shown(name: str, values: list[tuple[float, int]]) -> str:
    """The percentiles for people: "; first token p50 12.0 ms, p99 40.1 ms"."""
    if not values:
        return ""
    shown = (
        f"p{percent} {1000 * (percentile(values, percent) or 0):.1f} ms" for percent in _PERCENTS
    )
    return f"; {name} {', '.join(shown)}"


def _percentiles(name: str, values: list[tuple[float, int]]) -> dict[str, float | None]:
    """The percentiles in seconds, as fields of a line in JSON. None where there are none."""
    return {
        f"{name}_p{percent}_seconds": None
        if (value := percentile(values, percent)) is None
        else round(value, 6)
        for percent in _PERCENTS
    }


def report_start(engine: Any, seconds: float) -> None:
    """Logs the summary of a started engine. `seconds`: the time of the start."""
    # A server that only renders has no engine.
    for line in summary(engine) if hasattr(engine, "processor") else ():
        logger.info("%s", line)
    logger.info("Ready after %.1f s", seconds, extra=fields(seconds=round(seconds, 3)))


def summary(engine: AsyncLLM) -> Iterator[str]:
    """Lines on an engine that is ready: model, weights, KV cache, backends, plugins."""
    config = engine.config
    assert config.checkpoint is not None, "the engine is ready"
    names = ", ".join(config.served_model_names)
    yield (
        f"Model {names}: {config.checkpoint.architecture}, {config.model.dtype} on "
        f"{config.device.device}, "
        f"{config.max_model_len:,} tokens of context"
    )
    quantization = config.load.quantization
    yield (
        f"Weights: {as_size(weight_bytes(config))} of files ({config.load.load_format}), "
        f"quantization {quantization}"
    )
    kv_cache = engine.processor.limits.kv_cache
    yield f"KV cache: {_capacity(kv_cache, config)}"
    backends = ", ".join(sorted({group.backend for group in kv_cache.groups})) or "none"
    yield f"Attention: {backends}; scheduling: {config.scheduler.policy}"
    if defaults := config.sampling_defaults:
        shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
        yield (
            f"Sampling defaults of generation_config.json: {shown} (--generation-config none "
            "leaves them out)"
        )
    yield f"Plugins: {', '.join(info.name for info in engine.plugins.infos if info.status == 'ok')}"


def _capacity(kv_cache: KVCacheConfig, config: VllmConfig) -> str:
    if not kv_cache.pools:
        return "none"
    size = as_size(sum(pool.block_bytes * pool.num_blocks for pool in kv_cache.pools))
    fit = num_fitting(kv_cache, config)
    return (
        f"{int(fit * config.max_model_len):,} tokens in {size}, {fit:.1f} requests of the "
        "longest context at a time"
    )


def weight_bytes(config: VllmConfig) -> int:
    """Bytes of the files with a checkpoint's weights. 0 where there are none."""
    assert config.checkpoint is not None
    source = Path(config.checkpoint.source or config.checkpoint.path)
    with suppress(OSError):
        files = (
            [source]
            if source.is_file()
            else [path for path in source.iterdir() if path.suffix in _WEIGHTS]
        )
        return sum(path.stat().st_size for path in files)
    return 0


def as_size(num_bytes: int) -> str:
    """A size for people: 1536 gives "1.5 KiB"."""
    size = float(num_bytes)
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
