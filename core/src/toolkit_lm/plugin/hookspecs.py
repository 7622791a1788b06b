"""Core's hooks. A plugin implements any of them in its entry module, marked with `@hookimpl`, and
names the arguments it wants: all or some.

Register hooks (`toolkit_register_*`)
    Caller: the loader, once per `Plugins` object, plugin by plugin. Process: every process that
    runs a part of an engine, at its start, before anything else. Thread: main. Return: nothing.
    All implementations are called. One that raises fails with its own plugin only.

Hooks of a running engine (`toolkit_configure`, `toolkit_event`, `toolkit_watch`)
    Process: the front. All implementations are called.

A hook's docstring states only what differs. Registries that fewer processes read say so.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.events import Event
from toolkit_lm.plugin import (
    AttentionBackendRegistry,
    CheckpointRegistry,
    CompilerRegistry,
    ConverterRegistry,
    DrafterRegistry,
    EngineClientRegistry,
    EventListener,
    ExecutorRegistry,
    KernelsRegistry,
    KVKindRegistry,
    KVTierRegistry,
    LoaderRegistry,
    LogitsProcessorRegistry,
    ModelRegistry,
    OptionNamesRegistry,
    ParserRegistry,
    PartRegistry,
    PoolingInputsRegistry,
    PoolingProfileRegistry,
    QuantizationRegistry,
    RendererRegistry,
    SchedulingPolicyRegistry,
    hookspec,
)


@hookspec
def toolkit_register_hookspecs() -> ModuleType | list[ModuleType]:
    """Adds hooks of the plugin's own.

    Caller: the loader, before any other hook. Return: the module, or modules, whose functions are
    marked with `@hookspec`. The hooks of all plugins count.
    """
    raise NotImplementedError


@hookspec
def toolkit_register_models(models: ModelRegistry) -> None:
    """Registers model classes under the architecture names that checkpoints give."""


@hookspec
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    """Registers attention backends."""


@hookspec
def toolkit_register_kernels(kernels: KernelsRegistry) -> None:
    """Registers kernels: the functions that model layers compute with on one kind of device."""


@hookspec
def toolkit_register_compilers(compilers: CompilerRegistry) -> None:
    """Registers compilers. A compiler runs a model's forward pass in the model's place if the
    option optimization_level asks for it.
    """


@hookspec
def toolkit_register_executors(executors: ExecutorRegistry) -> None:
    """Registers executors: how an engine reaches its workers."""


@hookspec
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    """Registers kinds of KV cache specs: what a layer caches per sequence, if not the keys and
    values of all tokens or of a window.
    """


@hookspec
def toolkit_register_kv_tiers(kv_tiers: KVTierRegistry) -> None:
    """Registers KV tiers: places off the device that hold KV blocks. A tier has one half for the
    scheduler and one for the workers.
    """


@hookspec
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    """Registers renderers, which turn prompts and chats into token ids."""


@hookspec
def toolkit_register_parsers(parsers: ParserRegistry) -> None:
    """Registers answer formats. Their parsers separate reasoning and tool calls from content.

    Only a front parses answers.
    """


@hookspec
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    """Registers logits processors, which requests choose by name."""


@hookspec
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    """Registers drafters for speculative decoding. The option drafter chooses one by name."""


@hookspec
def toolkit_register_parts(parts: PartRegistry) -> None:
    """Registers parts of a step. A part brings data other than tokens into a step, such as an
    adapter. It has halves for the front, the scheduler and the workers.
    """


@hookspec
def toolkit_register_scheduling_policies(policies: SchedulingPolicyRegistry) -> None:
    """Registers scheduling policies. The option scheduling_policy chooses one by name."""


@hookspec
def toolkit_register_pooling(converters: ConverterRegistry) -> None:
    """Registers pooling adapters, which turn another model's class into a pooling model."""


@hookspec
def toolkit_register_pooling_profiles(profiles: PoolingProfileRegistry) -> None:
    """Registers readers of the pooling settings in checkpoints' own files: prompts, methods, heads
    and late interaction.

    Only the front reads checkpoints.
    """


@hookspec
def toolkit_register_pooling_inputs(inputs: PoolingInputsRegistry) -> None:
    """Registers readers of the texts of pooling requests, which also score pairs of texts."""


@hookspec
def toolkit_register_engine_clients(engine_clients: EngineClientRegistry) -> None:
    """Registers engine clients, which start a front's engine in their own way, for instance as
    several engines.

    Only a front starts engines.
    """


@hookspec
def toolkit_register_checkpoints(checkpoints: CheckpointRegistry) -> None:
    """Registers checkpoint folders inside the plugin's package, under names that MODEL accepts."""


@hookspec
def toolkit_register_loaders(loaders: LoaderRegistry) -> None:
    """Registers checkpoint loaders, which read weights in their own formats. The option
    `load_format` chooses one by name.

    The front also uses them, to unpack a checkpoint that is a single file.
    """


@hookspec
def toolkit_register_quantization(quantization: QuantizationRegistry) -> None:
    """Registers quantization methods, which choose the linear methods of layers. The checkpoint's
    `quant_method` or the option `--quantization` chooses one by name.
    """


@hookspec
def toolkit_register_option_names(option_names: OptionNamesRegistry) -> None:
    """Registers translators for other projects' option names.

    Only the front translates.
    """


@hookspec
def toolkit_configure(config: VllmConfig, options: Any) -> VllmConfig | None:
    """Changes an engine's config before it is resolved, for instance
    `config.replace(block_size=32)`.

    `options` is the instance of the plugin's own `Options`, or None if it has none.

    Caller: the engine, once at its start. Thread: the one that makes the engine. Return: the
    replaced config, or None to leave it. Implementations run in load order, each with the config
    of the one before. One that raises is fatal.
    """


@hookspec
def toolkit_event(event: Event) -> None:
    """Receives events of requests and steps, for instance for metrics.

    Caller: the front, while it processes the engine's outputs, so an implementation must be quick.
    Thread: the one that takes the outputs. For `LLM` and `LLMEngine` it is the caller's own, for
    `AsyncLLM` a separate one. Return: nothing. One that raises is warned about once, and not called
    again.
    """


@hookspec
def toolkit_watch(config: VllmConfig, options: Any) -> EventListener | None:
    """Returns an event listener for this engine. Use it to keep state per engine, or to listen only
    if configured.

    `config` is resolved. `options` is the instance of the plugin's own `Options`, or None if it has
    none.

    Caller: the engine, once at its start. Thread: the one that makes the engine. Return: a listener
    that gets each event as `toolkit_event` does, or None. One that raises is fatal.
    """
