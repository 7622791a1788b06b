"""Core's hooks. A plugin implements any of them in its entry module, marked with `@hookimpl`, with
all or some of the arguments.

Every process that runs a part of an engine loads the plugins at its start, on its main thread,
before anything else; the register hooks are called then, once per `Plugins` object, plugin by
plugin: an implementation that raises fails with its own plugin only.
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
    """Brings hooks of the plugin's own.

    Caller: the loader, before any other hook. Process: every one. Thread: main. Return: the module,
    or modules, whose functions are marked with `@hookspec`; of all plugins.
    """
    raise NotImplementedError


@hookspec
def toolkit_register_models(models: ModelRegistry) -> None:
    """Registers model classes under the architectures that checkpoints name.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    """Registers attention backends.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_kernels(kernels: KernelsRegistry) -> None:
    """Registers kernels: what the layers of models compute with, on devices of their kind.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_compilers(compilers: CompilerRegistry) -> None:
    """Registers compilers: what computes the forward passes of models in their place, where the
    option optimization_level asks for it.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_executors(executors: ExecutorRegistry) -> None:
    """Registers executors: how an engine reaches its workers.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    """Registers kinds of KV cache specs: what layers keep of sequences, beside the keys and values
    of all tokens or of a window.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_kv_tiers(kv_tiers: KVTierRegistry) -> None:
    """Registers KV tiers: places for KV blocks beside the device, in halves for the scheduler and
    the workers.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    """Registers renderers.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_parsers(parsers: ParserRegistry) -> None:
    """Registers answer formats, whose parsers tell reasoning and tool calls from content.

    Caller: the loader. Process: every one, though only a front parses answers. Thread: main.
    Return: nothing; all implementations are called.
    """


@hookspec
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    """Registers logits processors, which requests ask for by name.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    """Registers drafters for speculative decoding, one of which the option drafter asks for by
    name.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_parts(parts: PartRegistry) -> None:
    """Registers parts of a step: what enters a step beside tokens, such as an adapter, in halves
    for the front, the scheduler and the workers.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_scheduling_policies(policies: SchedulingPolicyRegistry) -> None:
    """Registers scheduling policies, which the option scheduling_policy asks for by name.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_pooling(converters: ConverterRegistry) -> None:
    """Registers pooling adapters: functions that make a pooling model of another model's class.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_pooling_profiles(profiles: PoolingProfileRegistry) -> None:
    """Registers readers of what checkpoints' own files say of pooling: prompts, methods, heads,
    late interaction.

    Caller: the loader. Process: every one, though only the front reads checkpoints. Thread: main.
    Return: nothing; all implementations are called.
    """


@hookspec
def toolkit_register_pooling_inputs(inputs: PoolingInputsRegistry) -> None:
    """Registers what reads the texts of pooling requests, and scores pairs of them.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_engine_clients(engine_clients: EngineClientRegistry) -> None:
    """Registers what starts the engines of a front in a way of its own: several of them, say.

    Caller: the loader. Process: every one, though only a front starts engines. Thread: main.
    Return: nothing; all implementations are called.
    """


@hookspec
def toolkit_register_checkpoints(checkpoints: CheckpointRegistry) -> None:
    """Registers checkpoint folders that ship inside the plugin's package, under names that MODEL
    may give.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_loaders(loaders: LoaderRegistry) -> None:
    """Registers checkpoint loaders, which read weights in formats of their own, under names that
    the option `load_format` may give.

    Caller: the loader. Process: every one; the front has checkpoints unpacked that are one file.
    Thread: main. Return: nothing; all implementations are called.
    """


@hookspec
def toolkit_register_quantization(quantization: QuantizationRegistry) -> None:
    """Registers what chooses the linear methods of layers, under the names that checkpoints'
    `quant_method` and `--quantization` give.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_option_names(option_names: OptionNamesRegistry) -> None:
    """Registers translators of options as other projects name them.

    Caller: the loader. Process: every one, though only the front translates. Thread: main. Return:
    nothing; all implementations are called.
    """


@hookspec
def toolkit_configure(config: VllmConfig, options: Any) -> VllmConfig | None:
    """Changes the config of an engine before it is resolved, for instance
    `config.replace(block_size=32)`.

    `options` are the plugin's own: an instance of its `Options`, or None where it has none.

    Caller: the engine, once at its start. Process: the front. Thread: the one that makes the
    engine. Return: the replaced config, or None to leave it; all implementations are called in load
    order, each with what the one before returned. One that raises is fatal.
    """


@hookspec
def toolkit_event(event: Event) -> None:
    """Watches requests and steps, for instance for metrics.

    Caller: the front, as it takes in what the engine gave, so it must be quick. Process: the front.
    Thread: the one that takes the engine's outputs: the caller's own of `LLM` and `LLMEngine`, a
    thread of its own of `AsyncLLM`. Return: nothing; all implementations are called. One that
    raises is warned about once, and called no more.
    """


@hookspec
def toolkit_watch(config: VllmConfig, options: Any) -> EventListener | None:
    """Makes what watches one engine, where `toolkit_event` would mix up engines, or where there may
    be nothing to watch for.

    `config` is resolved; `options` are the plugin's own: an instance of its `Options`, or None
    where it has none.

    Caller: the engine, once at its start. Process: the front. Thread: the one that makes the
    engine. Return: a listener, which gets each event where `toolkit_event` would, or None; all
    implementations are called. One that raises is fatal.
    """
