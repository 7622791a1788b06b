"""Finds the options that have no effect with the other options. The start reports them, and
`toolkit explain` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from toolkit_lm.config import CompilationOptions, VllmConfig
from toolkit_lm.plugin import Plugins


class NoEffect(NamedTuple):
    """An option that was set, and the reason for which it has no effect."""

    option: str
    reason: str

    def __str__(self) -> str:
        return f"option {self.option!r} has no effect: {self.reason}."


Reason = Callable[[VllmConfig, Plugins], str | None]
"""Function that returns why options of a resolved config have no effect; None: they have one."""


def without_effect(asked: VllmConfig, resolved: VllmConfig, plugins: Plugins) -> list[NoEffect]:
    """Options of `asked` that are not their defaults and have no effect in `resolved`, which was
    made from it."""
    found = [
        NoEffect(name, reason)
        for name, because in RULES.items()
        if _is_given(asked, name) and (reason := because(resolved, plugins))
    ]
    budget = resolved.scheduler.token_budget
    asked_budget = asked.scheduler.max_num_batched_tokens
    if asked_budget is not None and asked_budget < budget:
        found.append(
            NoEffect(
                "max_num_batched_tokens",
                f"prompts are computed whole, so that it is raised from {asked_budget} to {budget}",
            )
        )
    return [*found, *_compilation_options(resolved)]


def without_effect_offline(config: VllmConfig) -> list[NoEffect]:
    """Options that were set but have no effect for `LLM`, whose one caller waits for its
    requests."""
    reason = "it is for AsyncLLM and the server, which serve many callers"
    found = [NoEffect(name, reason) for name in _OF_SERVERS if _is_given(config, name)]
    parallel = config.parallel
    is_alone = max(
        parallel.num_ranks, parallel.nodes, parallel.data_parallel_size
    ) == 1 and parallel.executor in ("auto", "in_process")
    if is_alone and not config.engine.engine_process and _is_given(config, "start_timeout"):
        found.append(
            NoEffect(
                "start_timeout",
                "the engine starts in this process, and waits for no other (engine_process)",
            )
        )
    return found


def _is_given(config: VllmConfig, name: str) -> bool:
    """Whether an option, by its flat name, is not its default."""
    section = next(
        section
        for section in msgspec.structs.asdict(config).values()
        if name in getattr(section, "__struct_fields__", ())
    )
    return bool(getattr(section, name) != getattr(type(section)(), name))


def _compilation_options(config: VllmConfig) -> Iterator[NoEffect]:
    """Keys of compilation_config that have no effect with its other keys and the optimization
    level."""
    level = config.compilation.optimization_level
    details = config.compilation.details
    unset = CompilationOptions()
    for key in details.__struct_fields__:
        if getattr(details, key) == getattr(unset, key):
            continue
        reason = None
        if not level:
            reason = "nothing is compiled or captured at optimization_level 0"
        elif level < 2 and key in ("compile_sizes", "compile_ranges"):
            reason = f"sizes of their own are compiled from optimization_level 2, and it is {level}"
        elif key.startswith("cudagraph_") and details.cudagraph_mode == "none":
            reason = "no graph is captured without cudagraph_mode"
        elif key.startswith("cudagraph_") and config.device.device.startswith("cpu"):
            reason = f"there are no CUDA graphs on {config.device.device}"
        elif key == "inductor_compile_config" and details.backend != "inductor":
            reason = f"the backend {details.backend!r} compiles nothing by Inductor"
        elif key == "cache_dir" and not config.compilation.compile_cache:
            reason = "nothing is kept without compile_cache"
        if reason is not None:
            yield NoEffect(f"compilation_config.{key}", reason)


def _no_media(config: VllmConfig, plugins: Plugins) -> str | None:
    assert config.checkpoint is not None
    entry = plugins.models.get(config.checkpoint.architecture)
    return (
        None
        if entry.multimodal or entry.encoder_decoder
        else f"the model {entry.key!r} reads no media"
    )


def _no_encoder_of_media(config: VllmConfig, plugins: Plugins) -> str | None:
    assert config.checkpoint is not None
    entry = plugins.models.get(config.checkpoint.architecture)
    return None if entry.multimodal else f"the model {entry.key!r} has no encoder of media"


def _no_fallback(config: VllmConfig, plugins: Plugins) -> str | None:
    assert config.checkpoint is not None
    entry = plugins.models.get(config.checkpoint.architecture)
    return (
        None
        if entry.is_fallback
        else f"the model has a class of its own, {entry.key!r}, and no fallback runs it"
    )


def _no_kv_cache(config: VllmConfig, plugins: Plugins) -> str | None:
    return (
        None
        if config.keeps_kv_cache
        else "each prompt is computed at once, and no KV cache is kept"
    )


def _no_memory_for_blocks(config: VllmConfig, plugins: Plugins) -> str | None:
    return _no_kv_cache(config, plugins) or (
        "num_kv_blocks says how many" if config.cache.num_kv_blocks is not None else None
    )


def _no_swap(config: VllmConfig, plugins: Plugins) -> str | None:
    if config.model.runner == "pooling":
        return "requests that pool are never swapped"
    return (
        "preemption_mode is 'recompute'"
        if config.scheduler.preemption_mode == "recompute"
        else None
    )


def _no_draws(config: VllmConfig, plugins: Plugins) -> str | None:
    return "an engine that pools draws no tokens" if config.model.runner == "pooling" else None


def _no_process(config: VllmConfig, plugins: Plugins) -> str | None:
    has_process = config.engine.engine_process or config.parallel.data_parallel_size > 1
    return None if has_process else "the engine has no process of its own (engine_process)"


def _one_node(config: VllmConfig, plugins: Plugins) -> str | None:
    return "nodes is 1" if config.parallel.nodes == 1 else None


def _no_hub(config: VllmConfig, plugins: Plugins) -> str | None:
    model = config.model.model
    is_here = model in plugins.checkpoints or Path(model).expanduser().exists()
    return f"MODEL {model!r} is here, and not on a hub" if is_here else None


def _no_drafter(config: VllmConfig, plugins: Plugins) -> str | None:
    return None if config.scheduler.drafter else "there is no drafter"


def _no_shares(config: VllmConfig, plugins: Plugins) -> str | None:
    unshared = config.scheduler.policy in ("fcfs", "priority")
    return "the scheduling policy shares no step" if unshared else None


def _no_overlap(config: VllmConfig, plugins: Plugins) -> str | None:
    drafter = config.scheduler.drafter
    return (
        None
        if not config.engine.overlap or not drafter or config.scheduler.draft_budget == "auto"
        else f"with the drafter {', '.join(drafter)!r} no step is planned ahead"
    )


def _own_renderer(config: VllmConfig, plugins: Plugins) -> str | None:
    return (
        None
        if plugins.renderers.get(config.renderer.renderer).asks_servers
        else f"the renderer {config.renderer.renderer!r} renders in this process"
    )


def _nothing_quantized(config: VllmConfig, plugins: Plugins) -> str | None:
    is_at_load = config.load.quantization.endswith(plugins.quantization.at_load(""))
    return None if is_at_load else "no weight is quantized while it is loaded (quantization)"


def _nothing_compiled(config: VllmConfig, plugins: Plugins) -> str | None:
    return (
        None
        if config.compilation.optimization_level
        else "nothing is compiled at optimization_level 0"
    )


def _no_quantized_cache(config: VllmConfig, plugins: Plugins) -> str | None:
    wanted = config.cache.kv_cache_dtype
    if wanted in ("int8", "fp8"):
        return _no_kv_cache(config, plugins)
    return f"with kv_cache_dtype {wanted!r} no layer is chosen to be quantized"


_OF_SERVERS = ("restart_engine", "step_timeout", "max_queued_requests", "max_queued_tokens")
RULES: dict[str, Reason] = {
    "revision": _no_hub,
    "verify_fallback": _no_fallback,
    "generation_config": _no_draws,
    "override_generation_config": _no_draws,
    "seed": _no_draws,
    "quantization_skip": _nothing_quantized,
    "quantization_override": _nothing_quantized,
    "quantization_group_size": _nothing_quantized,
    "block_size": _no_kv_cache,
    "kv_cache_memory": _no_memory_for_blocks,
    "kv_cache_dtype": _no_kv_cache,
    "kv_cache_dtype_skip_layers": _no_quantized_cache,
    "num_kv_blocks": _no_kv_cache,
    "encoder_cache_memory": _no_encoder_of_media,
    "feature_cache_memory": _no_encoder_of_media,
    "swap_memory": _no_swap,
    "step_time_target": _no_shares,
    "preemption_mode": _no_draws,
    "draft_budget": _no_drafter,
    "overlap": _no_overlap,
    "restart_engine": _no_process,
    "node_rank": _one_node,
    "master": _one_node,
    "launch_key_file": _one_node,
    "node_timeout": _one_node,
    "compile_cache": _nothing_compiled,
    "renderer_url": _own_renderer,
    "limit_mm_per_prompt": _no_encoder_of_media,
    "allowed_media_hosts": _no_media,
    "max_media_bytes": _no_media,
    "max_media_pixels": _no_media,
    "max_media_frames": _no_media,
    "max_audio_seconds": _no_media,
    "max_n": _no_draws,
    "max_logprobs": _no_draws,
    "logprobs_mode": _no_draws,
}
"""Rules by option: when it has no effect. Options that are not listed always have one, or are
refused."""
