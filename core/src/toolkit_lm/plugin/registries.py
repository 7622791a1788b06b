"""Registries: a registry for each kind of thing that plugins bring to core."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import filter
from pathlib import Path
from typing import Any

from msgspec import msgpack

from toolkit_lm.config import Option, PoolingProfile
from toolkit_lm.errors import (
    CheckpointError,
    ConfigError,
    PluginError,
    RequestError,
    UnsupportedError,
    nearest,
)
from toolkit_lm.param_spec import ProcessorParams, checks_of, params_of, spec_of
from toolkit_lm.params import SAMPLING_PARAMS
from toolkit_lm.plugin.info import PluginInfo
from toolkit_lm.plugin.registry import Entry, PlainRegistry, Registry
from toolkit_lm.plugin.shipped import parameter_source

LENGTH_KEYS = ("max_position_embeddings", "n_positions")
"""Keys of config.json that most models state their longest sequence under."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry(Entry):
    """A model class."""

    runner: str = "generate"
    """The kind of runner that drives it."""
    model_type: str | None = None
    """The `model_type` of its checkpoints; None: of many, or of those that another class runs as
    well."""
    renderer: str | None = None
    """Name of the renderer that it needs; None: any that can read the checkpoint."""
    reserved_positions: int = 0
    """Of the positions that the checkpoint states, how many no token ever has (RoBERTa: those up to
    padding's)."""
    length_keys: tuple[str, ...] = LENGTH_KEYS
    """Keys of config.json: the first that is there states the longest sequence. "decoder.x" is x of
    its object `decoder`. Empty: there is none, as with ALiBi.
    """
    caches_prefixes: bool = True
    """What it keeps of a prompt can serve other requests that begin alike. False: prefix caching is
    off for it."""
    bounded: bool = True
    """No sequence can be longer than stated. False: it is what is taken where no other length is
    asked for."""
    encoder_decoder: str | None = None
    """Of an encoder-decoder model: "module:Class", the EncoderDecoderRules of its prompts."""
    multimodal: str | None = None
    """Of a multimodal model: "module:Class", the MultiModalRules of its images and other media."""
    is_fallback: bool = False
    """True: the key names no architecture; the class runs those that have no class of their own,
    and says which it refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorEntry(Entry):
    """An executor class."""

    max_ranks: int | None = None
    """Most workers that it runs; None: any number."""
    runs_nodes: bool = False
    """True: its workers can be on several machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererEntry(Entry):
    """A renderer class."""

    reads: tuple[str, ...] = ()
    """File names; it can read a checkpoint folder that holds any of them. Empty: it is taken by its
    name only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderEntry(Entry):
    """A class that loads checkpoints."""

    reads: tuple[str, ...] = ()
    """Patterns of file names ("*.gguf"): it can load such a file, and a folder that holds one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorEntry(Entry):
    """A logits processor: its class, and the parameters that requests turn it on with."""

    params: type[ProcessorParams]
    for_model: bool = False
    """There is no processor: the parameters are for the model, and the target is their class."""
    priority: int = 0
    """Of those that work at the same place, the one of the highest priority works first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicyEntry(Entry):
    """A scheduling policy: a function, or a class."""

    reads_priority: bool = False
    """True: it looks at the priority that a request gives."""


class ModelRegistry(Registry[ModelEntry]):
    """Model classes, by the architecture that a checkpoint's config.json names; and fallbacks, by
    their own names."""

    noun = "model architecture"
    missing = UnsupportedError
    base = "toolkit_lm.model:Model"

    def add(
        self,
        architecture: str,
        target: str,
        *,
        runner: str = "generate",
        model_type: str | None = None,
        renderer: str | None = None,
        reserved_positions: int = 0,
        length_keys: tuple[str, ...] = LENGTH_KEYS,
        bounded: bool = True,
        caches_prefixes: bool = True,
        encoder_decoder: str | None = None,
        multimodal: str | None = None,
        override: bool = False,
    ) -> None:
        """Registers a model class. Raises PluginError for a malformed target or a key that another
        plugin has."""
        traits = {
            "reserved_positions": reserved_positions,
            "length_keys": length_keys,
            "bounded": bounded,
        }
        traits |= {
            "caches_prefixes": caches_prefixes,
            "encoder_decoder": encoder_decoder,
            "multimodal": multimodal,
        }
        fields = {
            "runner": runner,
            "model_type": model_type,
            "renderer": renderer,
            "override": override,
        }
        self.add_entry(ModelEntry, architecture, target, "module:Class", **fields, **traits)

    def add_fallback(
        self,
        name: str,
        target: str,
        *,
        runner: str = "generate",
        renderer: str | None = None,
        override: bool = False,
    ) -> None:
        """Registers a `FallbackModel`: of those that do not refuse a checkpoint without a class of
        its own, the first runs it.

        `name` is what the option `model_impl` calls it. Raises PluginError, as `add` does.
        """
        fields = {"runner": runner, "renderer": renderer, "override": override, "is_fallback": True}
        self.add_entry(ModelEntry, name, target, "module:Class", **fields)

    def architectures_of(self, model_type: str) -> list[str]:
        """Those that are registered for a `model_type`; where there are none, what the first
        fallback says that knows one."""
        found = [entry.key for entry in self.entries() if entry.model_type == model_type]
        for name in () if found else self.fallbacks():
            with self.get(name).owner.boundary(f"architecture_of() of {self.noun} {name!r}"):
                architecture = self.load(name).architecture_of(model_type)
            if architecture is not None:
                return [architecture]
        return found

    def reserved_positions(self, key: str, config: Any) -> int:
        """Of the positions that a checkpoint states, how many no token ever has. Of a fallback its
        class says so of the checkpoint."""
        entry = self.get(key)
        if not entry.is_fallback:
            return entry.reserved_positions
        with entry.owner.boundary(f"reserved_positions() of {self.noun} {key!r}"):
            return int(self.load(key).reserved_positions(config))

    def load_rules(self, architecture: str) -> Any:
        """The class of an encoder-decoder model's rules for prompts; None of another model. Raises
        PluginError, as `load` does."""
        entry = self.get(architecture)
        if entry.encoder_decoder is None:
            return None
        return self.load_target(
            entry, entry.encoder_decoder, "toolkit_lm.renderer:EncoderDecoderRules"
        )

    def load_multimodal(self, architecture: str) -> Any:
        """As `load_rules`: the class of a multimodal model's rules for media."""
        entry = self.get(architecture)
        return (
            None
            if entry.multimodal is None
            else self.load_target(entry, entry.multimodal, "toolkit_lm.renderer:MultiModalRules")
        )

    def computes_items_whole(self, architecture: str) -> bool:
        """No chunk of a prompt ends inside an item of media. Raises PluginError, as `load` does."""
        rules = self.load_multimodal(architecture) if architecture in self else None
        return rules is not None and rules.bidirectional

    def architectures(self) -> list[str]:
        """The architectures that have a class of their own."""
        return [entry.key for entry in self.entries() if not entry.is_fallback]

    def fallbacks(self) -> list[str]:
        """The names of the fallbacks, in the order in which they are asked."""
        return [entry.key for entry in self.entries() if entry.is_fallback]


class AttentionBackendRegistry(Registry[Entry]):
    """Attention backends, by name."""

    noun = "attention backend"
    base = "toolkit_lm.attention:AttentionBackend"

    def add(self, name: str, target: str, *, priority: int = 0, override: bool = False) -> None:
        """Registers a class. Of those that do not refuse, the one of the highest priority is
        chosen: for each layer, or each model."""
        self.add_entry(Entry, name, target, "module:Class", priority=priority, override=override)


class KernelsRegistry(AttentionBackendRegistry):
    """Kernels of layers, by name."""

    noun = "kernels"
    base = "toolkit_lm.model:Kernels"


class CompilerRegistry(AttentionBackendRegistry):
    """Compilers of models, by name."""

    noun = "compiler"
    base = "toolkit_lm.model:ModelCompiler"


class ExecutorRegistry(Registry[ExecutorEntry]):
    """Executors, by name."""

    noun = "executor"
    base = "toolkit_lm.executor:Executor"

    def add(
        self,
        name: str,
        target: str,
        *,
        max_ranks: int | None = None,
        runs_nodes: bool = False,
        override: bool = False,
    ) -> None:
        """Registers a subclass of toolkit_lm.executor.Executor.

        `max_ranks`: most workers that it runs; None: any number. `runs_nodes`: they can be on
        several machines.
        """
        self.add_entry(
            ExecutorEntry,
            name,
            target,
            "module:Class",
            max_ranks=max_ranks,
            runs_nodes=runs_nodes,
            override=override,
        )


class RendererRegistry(Registry[RendererEntry]):
    """Renderers, by name."""

    noun = "renderer"
    base = "toolkit_lm.renderer:Renderer"

    def add(
        self,
        name: str,
        target: str,
        *,
        reads: tuple[str, ...] = ("tokenizer.json",),
        priority: int = 0,
        override: bool = False,
    ) -> None:
        """Registers a renderer class. Of those that do not refuse a checkpoint, the one of the
        highest priority is chosen.

        `reads`: file names, any of which a folder must hold for the class to be asked.
        """
        self.add_entry(
            RendererEntry,
            name,
            target,
            "module:Class",
            reads=tuple(reads),
            priority=priority,
            override=override,
        )


class ParserRegistry(AttentionBackendRegistry):
    """Answer formats, by the names that the server's options tool_call_parser and reasoning_parser
    give."""

    noun = "answer parser"
    base = "toolkit_lm.renderer:AnswerFormat"

    def find_format(self, what: str, template: str, wanted: str = "auto") -> str | None:
        """The name of the format by which `what`, "tool_calls" or "reasoning", is found in answers
        to prompts of a template.

        `wanted`: a name, auto or none. None: it is found by none. Raises ConfigError for a name
        that no plugin has, or that finds no such thing, PluginError where a plugin fails.
        """
        if wanted == "none":
            return None
        if wanted == "auto":
            entries = sorted(self.entries(), key=lambda entry: -entry.priority)
            return next(
                (
                    e.key
                    for e in entries
                    if what in self.load(e.key).finds and self.ask(e.key, template) is None
                ),
                None,
            )
        if what not in self.load(wanted).finds:
            able = ", ".join(key for key in self if what in self.load(key).finds)
            raise ConfigError(
                f"answer parser {wanted!r} finds no {what.replace('_', ' ')}. Those that do: "
                f"{able}."
            )
        return wanted


class LogitsProcessorRegistry(Registry[LogitsProcessorEntry]):
    """Logits processors, by name."""

    noun = "logits processor"
    missing = RequestError
    base = "toolkit_lm.sampling:LogitsProcessor"

    def add(
        self,
        name: str,
        target: str | None,
        *,
        params: type[ProcessorParams],
        priority: int = 0,
        override: bool = False,
    ) -> None:
        """Registers a subclass of toolkit_lm.sampling.LogitsProcessor, and the parameters that
        requests turn it on with.

        `target` None: there is no processor. A ModelState reads the arguments, as
        `seq.inputs.model_arguments[name]`.

        Of those that work at the same place, the one of the highest `priority` works first; of
        equals, the first registered. Raises PluginError where a parameter has the name of another.
        """
        if not (isinstance(params, type) and issubclass(params, ProcessorParams)):
            raise PluginError(
                f"{self.owner}: params of {self.noun} {name!r} must be a "
                "toolkit_lm.param_spec.ProcessorParams."
            )
        for param, *_ in checks_of(params):
            owners = [
                str(entry.owner)
                for entry in self.entries()
                if entry.key != name and param in entry.params.__struct_fields__
            ]
            if (
                param in SAMPLING_PARAMS and not spec_of(SAMPLING_PARAMS[param]).by_processor
            ) or owners:
                raise PluginError(
                    f"{self.owner}: {self.noun} {name!r}: there is a parameter {param!r} of "
                    f"{[*owners, 'core'][0]} already."
                )
        traits = {
            "params": params,
            "priority": priority,
            "override": override,
            "for_model": target is None,
        }
        target = f"{params.__module__}:{params.__qualname__}" if target is None else target
        self.add_entry(LogitsProcessorEntry, name, target, "module:Class", **traits)

    def load(self, key: str) -> Any:
        entry = self.get(key)
        return self.load_target(entry, entry.target, None if entry.for_model else self.base)

    def cache_key(self, arguments: Mapping[str, Mapping[str, Any]]) -> str | None:
        """Names what arguments, by processor, can change in the forward pass; None: they change
        nothing."""
        counted = {
            name: given
            for name, given in arguments.items()
            if self.get(name).params.changes_forward
        }
        return (
            (
                "arguments "
                f"{hashlib.sha256(msgpack.encode(counted, order='deterministic')).hexdigest()}"
            )
            if counted
            else None
        )

    @property
    def params(self) -> dict[str, Option]:
        """The parameters of all logits processors, by name; those that core states are left out."""
        return {
            name: o
            for entry in self.entries()
            for name, o in params_of(entry.params).items()
            if name not in SAMPLING_PARAMS
        }

    def parse(self, extra_args: Mapping[str, Any]) -> dict[str, ProcessorParams]:
        """The parameters of each logits processor of which any is given. Raises RequestError for
        one that is unknown or out of range."""
        given: dict[str, dict[str, Any]] = {}
        for name, value in extra_args.items():
            entry = next(
                (one for one in self.entries() if name in one.params.__struct_fields__), None
            )
            if entry is None:
                known = nearest(
                    name,
                    [one for one in (*SAMPLING_PARAMS, *self.params) if one != name],
                    otherwise="",
                )
                where = " ".join(
                    part for part in (parameter_source(name), known, self.hint) if part
                )
                raise RequestError(f"unknown sampling parameter {name!r}. {where}".rstrip(), name)
            given.setdefault(entry.key, {})[name] = value
        return {key: self.get(key).params(**values) for key, values in given.items()}


class OptionNamesRegistry(PlainRegistry):
    """Translators of options as other projects name them, by project.

    A target is a function (options: dict) -> dict: options in our names, and unchanged what it does
    not know. It raises ConfigError for what cannot be had here, and says what to use. It is asked
    only where an option is unknown, or has a value that it cannot have.
    """

    noun = "translator of options"

    def translate(self, options: dict[str, Any]) -> dict[str, Any]:
        """`options` after all translators. Raises ConfigError."""
        for name in self:
            options = self.make(name, options)
        return options


class SchedulingPolicyRegistry(Registry[SchedulingPolicyEntry]):
    """Scheduling policies, by the name that the option scheduling_policy gives."""

    noun = "scheduling policy"

    def add(
        self, name: str, target: str, *, reads_priority: bool = False, override: bool = False
    ) -> None:
        """Registers a subclass of toolkit_lm.scheduler.SchedulingPolicy, or a function that is its
        `key`.

        `reads_priority`: it looks at the priority of requests.
        """
        self.add_entry(
            SchedulingPolicyEntry,
            name,
            target,
            "module:function",
            reads_priority=reads_priority,
            override=override,
        )


class DrafterRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.model.Drafter, by the name that the option drafter gives."""

    noun = "drafter"
    base = "toolkit_lm.model:Drafter"


class ConverterRegistry(PlainRegistry):
    """Pooling adapters, by the convert type that they are for: "embed", "classify", ...

    A target is a function (model class, vllm_config) -> pooling model class. It raises
    UnsupportedError for what it cannot convert.
    """

    noun = "convert type"


class PoolingProfileRegistry(PlainRegistry):
    """Readers of what checkpoints' files say of pooling, by name.

    A target is a function (folder: Path, hf_config: dict, tokenizer: Path) -> PoolingProfile |
    None. Its module imports no torch. `hf_config` is the folder's config.json, `tokenizer` the
    folder of the tokenizer. It returns None for a folder without files of its kind, and raises
    CheckpointError for files that it does not understand.
    """

    noun = "reader of pooling profiles"

    def read(
        self, folder: Path, hf_config: dict[str, Any], tokenizer: Path
    ) -> PoolingProfile | None:
        """What the files of a checkpoint say; None: no reader knows its files.

        Raises CheckpointError for files that a reader does not understand, and as `first_result`
        does.
        """
        return self.first_result(PoolingProfile, folder, hf_config, tokenizer)


class PoolingInputsRegistry(PlainRegistry):
    """What reads the texts of pooling requests, by name.

    A target is a function (config, renderer, plugins) -> toolkit_lm.pooling.PoolingInputs | None.
    Its module imports no torch. `config` is resolved; `plugins` is the loaded set. None: it does
    not read those of this engine.
    """

    noun = "reader of pooling inputs"


class EngineClientRegistry(PlainRegistry):
    """What starts the engines of a front in a way of its own, by name.

    A target is a function (config, plugins) -> toolkit_lm.engine.EngineClient | None. Its module
    imports no torch. `config` is resolved, but for the device; `plugins` is the loaded set. None:
    such a config is not its own.
    """

    noun = "engine client"


class CheckpointRegistry(Registry[Entry]):
    """Checkpoint folders that ship inside packages, by the name that MODEL may give."""

    noun = "checkpoint"
    pattern = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[\w-]+(/[\w-]+)*")

    def add(self, name: str, folder: str, *, override: bool = False) -> None:
        """Registers a folder, as "package:folder/inside/it"."""
        self.add_entry(Entry, name, folder, "package:folder", override=override)

    def path(self, name: str) -> Path:
        """The folder of a registered checkpoint. Raises CheckpointError when it is not there."""
        entry = self.get(name)
        package, _, folder = entry.target.partition(":")
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations if spec else None) or ():
            if (path := Path(root, folder)).is_dir():
                return path
        raise CheckpointError(
            f"{entry.owner}: checkpoint {name!r} is registered, but there is no folder "
            f"{entry.target!r}."
        )


class LoaderRegistry(Registry[LoaderEntry]):
    """Checkpoint loaders, by load format."""

    noun = "load format"
    base = "toolkit_lm.model:CheckpointLoader"

    def add(
        self, load_format: str, target: str, *, reads: tuple[str, ...] = (), override: bool = False
    ) -> None:
        """Registers a subclass of toolkit_lm.model.CheckpointLoader. `reads`: patterns of names;
        none: it is never chosen by itself."""
        self.add_entry(
            LoaderEntry, load_format, target, "module:Class", reads=tuple(reads), override=override
        )

    def reading(self, source: Path) -> str | None:
        """The first load format that reads a file, or a file of a folder."""
        names = [path.name for path in source.iterdir()] if source.is_dir() else [source.name]
        return next(
            (e.key for e in self.entries() if any(filter(names, pattern) for pattern in e.reads)),
            None,
        )


class KVKindRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.attention.KVCacheSpec, by their tags. Their modules import no
    torch."""

    noun = "KV kind"
    base = "toolkit_lm.attention:KVCacheSpec"


class QuantizationRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.model.Quantization, by the `quant_method` of checkpoints, or a name
    for those that quantize at load."""

    noun = "quantization"
    base = "toolkit_lm.model:Quantization"


@dataclass(eq=False, repr=False)
class Registries:
    """The registry `name` is filled by the hook toolkit_register_name."""

    models: ModelRegistry = field(default_factory=ModelRegistry)
    attention_backends: AttentionBackendRegistry = field(default_factory=AttentionBackendRegistry)
    kernels: KernelsRegistry = field(default_factory=KernelsRegistry)
    compilers: CompilerRegistry = field(default_factory=CompilerRegistry)
    kv_kinds: KVKindRegistry = field(default_factory=KVKindRegistry)
    executors: ExecutorRegistry = field(default_factory=ExecutorRegistry)
    renderers: RendererRegistry = field(default_factory=RendererRegistry)
    parsers: ParserRegistry = field(default_factory=ParserRegistry)
    logits_processors: LogitsProcessorRegistry = field(default_factory=LogitsProcessorRegistry)
    scheduling_policies: SchedulingPolicyRegistry = field(default_factory=SchedulingPolicyRegistry)
    drafters: DrafterRegistry = field(default_factory=DrafterRegistry)
    pooling: ConverterRegistry = field(default_factory=ConverterRegistry)
    pooling_profiles: PoolingProfileRegistry = field(default_factory=PoolingProfileRegistry)
    pooling_inputs: PoolingInputsRegistry = field(default_factory=PoolingInputsRegistry)
    engine_clients: EngineClientRegistry = field(default_factory=EngineClientRegistry)
    checkpoints: CheckpointRegistry = field(default_factory=CheckpointRegistry)
    loaders: LoaderRegistry = field(default_factory=LoaderRegistry)
    quantization: QuantizationRegistry = field(default_factory=QuantizationRegistry)
    option_names: OptionNamesRegistry = field(default_factory=OptionNamesRegistry)
    brought: dict[str, Registry[Any]] = field(default_factory=dict)
    """Those that plugins bring together with a hook, by the hook that fills them."""


def by_hook(registries: Registries) -> dict[str, Registry[Any]]:
    """All registries, by the hook that fills them."""
    own = {
        f"toolkit_register_{name}": one
        for name, one in vars(registries).items()
        if isinstance(one, Registry)
    }
    return own | registries.brought


def copied(registries: Registries, owner: PluginInfo | None, hint: str = "") -> Registries:
    """A copy that takes the entries of `owner`."""
    own: dict[str, Any] = {
        name: one.copy(owner, hint)
        for name, one in vars(registries).items()
        if isinstance(one, Registry)
    }
    return Registries(
        **own, brought={hook: one.copy(owner, hint) for hook, one in registries.brought.items()}
    )
