"""Names of vLLM that are not here, and what to use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from toolkit_lm.errors import page

_CONFIG = f"options of an engine are keywords of LLM and EngineArgs: {page('vllm.md')} lists them"
_TRANSFER = (
    "the options kv_transfer.listen and kv_transfer.peers send KV caches between engines: "
    f"{page('kv_transfer.md')}"
)
_OFFLOAD = f"blocks of KV caches are kept by tiers: {page('kv_tiers.md')}"
_EVENTS = f"give kv_events_config as a dict: {page('observability.md#kv-cache-events')}"
_MODEL = "write a model: the hook toolkit_register_models"
_PARSER = "write a parser: the hook toolkit_register_parsers"
_ROUTES = "write routes: the hook toolkit_register_routes"
_SCHEDULER = "write a scheduling policy: the hook toolkit_register_scheduling_policies"
_BENCH = "use the command `toolkit bench`"
_RAY = "set distributed_executor_backend to 'ray'"
_MEDIA_HOOKS = "a family's media is a part of its model: the hook toolkit_register_models"
_EXECUTOR = "write an executor: the hook toolkit_register_executors"

NAMES = {
    "KVTransferConfig": _TRANSFER,
    "KVEventsConfig": _EVENTS,
    "ECTransferConfig": "outputs of encoders stay in their engine",
    "ModelRegistry": _MODEL,
    "initialize_ray_cluster": _RAY,
    "MULTIMODAL_REGISTRY": _MEDIA_HOOKS,
    "LateInteractionParams": "score() of a late-interaction model needs no parameters",
    "LateChunkingParams": "embed each chunk: chunks of one document share no attention here",
    "RepetitionDetectionParams": "use repetition_penalty, or no_repeat_ngram_size in extra_args",
    "ToolParser": _PARSER,
    "ToolParserManager": _PARSER,
    "ReasoningParser": _PARSER,
    "ReasoningParserManager": _PARSER,
    "Scheduler": _SCHEDULER,
    "set_current_vllm_config": _CONFIG,
    "get_current_vllm_config": _CONFIG,
    **dict.fromkeys(
        ("ModelConfig", "CacheConfig", "ParallelConfig", "SchedulerConfig", "DeviceConfig"), _CONFIG
    ),
    **dict.fromkeys(("LoadConfig", "LoRAConfig", "ObservabilityConfig", "KernelConfig"), _CONFIG),
}
"""What to use, by the name that a module lacks."""
MODULES = {
    "benchmarks.lib": _BENCH,
    "benchmarks.serve": _BENCH,
    "benchmarks.throughput": _BENCH,
    "benchmarks.latency": _BENCH,
    "compilation": "options of compilation are keys of compilation_config",
    "device_allocator": "memory is PyTorch's",
    "distributed.kv_transfer": _TRANSFER,
    "distributed.kv_events": _EVENTS,
    "distributed.weight_transfer": f"a trainer's ends are trainer_init of nccl_common and "
    f"packed_tensor: {page('rl.md')}",
    "entrypoints.anthropic": _ROUTES,
    "entrypoints.openai": "start the server by the command `toolkit serve`",
    "entrypoints.serve": _ROUTES,
    "forward_context": _MODEL,
    "kernels": "write kernels: the hook toolkit_register_kernels",
    "model_executor": _MODEL,
    "models": _MODEL,
    "parser": _PARSER,
    "plugins": f"plugins are found by their entry points: {page('plugins.md')}",
    "ray": _RAY,
    "reasoning": _PARSER,
    "renderers": "write a renderer: the hook toolkit_register_renderers",
    "tool_parsers": _PARSER,
    "v1.core": _SCHEDULER,
    "v1.executor": _EXECUTOR,
    "v1.worker": _EXECUTOR,
    "v1.kv_offload": _OFFLOAD,
}
"""What to use, by the module without `vllm.` that is not here, or one above it."""
METHODS = {
    "apply_model": "name a class by worker_extension_cls, and call its methods by collective_rpc",
    "add_lora": "a request names its adapter: lora_request",
    "remove_lora": "adapters that are not used leave the memory: the option max_loras",
    "list_loras": "a request names its adapter: lora_request",
    "start_profile": "torch.profiler, in a class that worker_extension_cls names",
    "stop_profile": "torch.profiler, in a class that worker_extension_cls names",
    "engine_core": "AsyncLLM.abort ends a request",
    "start_weight_update": f"give new weights to a Control of toolkit_lm_rl: {page('rl.md')}",
}
"""What to use, by the method of an engine that is not here."""
_OTHERWISE = f"{page('vllm.md')} lists what there is"


def use(path: str) -> str:
    """Advice for a module that is not here, by its path without `vllm.`: what to use instead."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if (way := MODULES.get(".".join(parts[:length]))) is not None:
            return way
    return _OTHERWISE


def absent(module: str) -> Callable[[str], object]:
    """`__getattr__` of a module of vLLM's: says what to use for a name that it lacks."""

    def missing(name: str) -> object:
        """Raises AttributeError, and ImportError for `from module import name`."""
        if name.startswith("__"):
            raise AttributeError(name)
        # A package's own `__getattr__` may stand between.
        frame = sys._getframe(1)
        callers = [frame.f_code.co_name, frame.f_back and frame.f_back.f_code.co_name]
        imports = "_handle_fromlist" in callers
        if imports and _is_module(f"{module}.{name}"):
            # Python imports it then.
            raise AttributeError(name)
        way = NAMES.get(name, _OTHERWISE)
        # For an AttributeError, `from module import name` would show its own message.
        kind = ImportError if imports else AttributeError
        raise kind(f"cannot import {name!r} from {module!r}: {way}.")

    return missing


def _is_module(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except ImportError:
        return False


class SaysWhatToUse:
    """Has a class say what to use for a method of vLLM's that it lacks."""

    if not TYPE_CHECKING:  # A type checker knows what there is.

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError."""
            way = METHODS.get(name)
            hint = "" if way is None else f": {way}"
            message = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(message, name=name, obj=self)
