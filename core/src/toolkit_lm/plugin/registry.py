"""Registries: what plugins bring, under a key, as the text "module:attribute" that is imported when it is used."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import filter
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

from toolkit_lm.config import PoolingProfile
from toolkit_lm.errors import CheckpointError, ConfigError, PluginError, RequestError, ToolkitError, UnsupportedError, nearest
from toolkit_lm.plugin.info import PluginInfo, PluginWarning

_TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
LENGTH_KEYS = ("max_position_embeddings", "n_positions")
"""Keys of config.json that most models state their longest sequence under."""
_FOLDER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[\w-]+(/[\w-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One thing that a plugin brings."""

    key: str
    target: str
    """"module:attribute", imported when it is used."""
    owner: PluginInfo
    """The plugin that brings it."""
    override: bool = False
    """True: takes the place of another plugin's entry of this key."""
    replaced: Entry | None = None
    """The entry that this one took the place of."""

    @property
    def plugin(self) -> str:
        """Name of the plugin that brings it."""
        return self.owner.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry(Entry):
    """A model class."""

    runner: str = "generate"
    """The kind of runner that drives it."""
    renderer: str | None = None
    """Name of the renderer that it needs; None: any that can read the checkpoint."""
    reserved_positions: int = 0
    """Of the positions that the checkpoint states, how many no token ever has (RoBERTa: those up to padding's)."""
    length_keys: tuple[str, ...] = LENGTH_KEYS
    """Keys of config.json: the first that is there states the longest sequence. Empty: there is none, as with ALiBi."""
    is_fallback: bool = False
    """True: the key names no architecture; the class runs those that have no class of their own, and says which it refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackendEntry(Entry):
    """An attention backend class."""

    priority: int = 0
    """Of the backends that do not refuse a layer, the one of the highest priority runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorEntry(Entry):
    """An executor class."""

    max_ranks: int | None = None
    """Most workers that it runs; None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererEntry(Entry):
    """A renderer class."""

    reads: tuple[str, ...] = ()
    """File names; it can read a checkpoint folder that holds any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderEntry(Entry):
    """A class that loads checkpoints."""

    reads: tuple[str, ...] = ()
    """Patterns of file names ("*.gguf"): it can load such a file, and a folder that holds one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorEntry(Entry):
    """A logits processor class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicyEntry(Entry):
    """A scheduling policy: a function."""

    reads_priority: bool = False
    """True: it looks at the priority that a request gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry(Entry):
    """A sub-command of `toolkit`: a function or a Typer app."""

    help: str
    """One line for `--help`, which does not import the command."""


EntryT = TypeVar("EntryT", bound=Entry)
ResultT = TypeVar("ResultT")


@dataclass
class Registry(Generic[EntryT]):
    """Entries by key, in the order in which they came. Plugins add to it in their `toolkit_register_...` hook, and only there.

    What a hook adds counts when all the register hooks of its plugin have returned: a plugin that raises leaves nothing behind.
    """

    noun: ClassVar[str] = "entry"
    missing: ClassVar[type[ToolkitError]] = UnsupportedError
    base: ClassVar[str] = ""
    """"module:Class", of which targets are subclasses; empty: they are functions."""

    owner: PluginInfo | None = None
    """The plugin whose hook is being called; None: the registry is closed."""
    hint: str = ""
    """A last sentence for the error about an unknown key."""
    _entries: dict[str, EntryT] = field(default_factory=dict)

    def copy(self, owner: PluginInfo | None, hint: str = "") -> Self:
        """A copy that takes the entries of `owner`."""
        return type(self)(owner=owner, hint=hint, _entries=dict(self._entries))

    def get(self, key: str) -> EntryT:
        """The entry of `key`. Raises for an unknown key, with the nearest known ones."""
        if key not in self._entries:
            raise self.missing(f"no {self.noun} {key!r} is registered. {nearest(key, self._entries)} {self.hint}".rstrip())
        return self._entries[key]

    def load(self, key: str) -> Any:
        """Imports what is registered under `key`. Raises PluginError where that fails, or it is not what the registry is for."""
        entry = self.get(key)
        with entry.owner.boundary(f"loading {self.noun} {key!r} from {entry.target!r}"):
            loaded = _import(entry.target)
        what = f"{entry.owner}: {self.noun} {key!r}: {entry.target!r}"
        if not self.base:
            if not callable(loaded):
                raise PluginError(f"{what} is not a function, but a {type(loaded).__name__}.")
        elif not (isinstance(loaded, type) and issubclass(loaded, _import(self.base))):
            raise PluginError(f"{what} must be a subclass of {self.base.replace(':', '.')}.")
        elif missing := sorted(getattr(loaded, "__abstractmethods__", ())):
            raise PluginError(f"{what} does not define {', '.join(missing)}, which {self.base.replace(':', '.')} leaves to its subclasses.")
        return loaded

    def make(self, key: str, *arguments: Any) -> Any:
        """Calls what is registered under `key`. Raises PluginError, naming the plugin, where that fails; a ToolkitError passes."""
        target = self.load(key)
        with self.get(key).owner.boundary(f"{self.noun} {key!r}"):
            return target(*arguments)

    def ask(self, key: str, *arguments: Any, by_name: bool = False) -> str | None:
        """Why the class that is registered under `key` refuses `arguments`; None when it can take them.

        One that cannot be asked refuses with that reason, and is warned about. `by_name`: the user wants this one and no other, so that it
        is a PluginError. So it always is where the answer is neither a text nor None: nobody knows what is meant.
        """
        entry = self.get(key)
        try:
            target = self.load(key)
            with entry.owner.boundary(f"refuses() of {self.noun} {key!r}", passes=()):
                answer = target.refuses(*arguments)
        except PluginError as error:
            if by_name:
                raise
            warnings.warn(str(error), PluginWarning, stacklevel=2)
            return str(error)
        if answer is None or isinstance(answer, str):
            return answer
        raise PluginError(f"{entry.owner}: refuses() of {self.noun} {key!r} must return a text or None, not {answer!r}.")

    def keys(self) -> list[str]:
        return list(self._entries)

    def entries(self) -> list[EntryT]:
        return list(self._entries.values())

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def first_result(self, kind: type[ResultT], *arguments: Any) -> ResultT | None:
        """What the registered functions make of `arguments`: the first result that is not None. Those that came last are asked first.

        The order makes third parties win over the distributions of this repository. Raises as `make` does, and PluginError for a function
        that returns something else than `kind`.
        """
        for entry in reversed(self.entries()):
            result = self.make(entry.key, *arguments)
            if isinstance(result, kind):
                return result
            if result is not None:
                found = type(result).__name__
                raise PluginError(f"{entry.owner}: {self.noun} {entry.key!r} must return a {kind.__name__} or None, not a {found}.")
        return None

    def add_entry(self, kind: type[EntryT], key: str, target: str, shape: str, **fields: Any) -> None:
        """For the `add` of a registry: adds an entry of `kind`, with the fields of its own. `shape`: what the target is, in errors.

        Raises PluginError for a malformed target or a key that another plugin has.
        """
        self._add(kind, key, target, _TARGET, shape, **fields)

    def _add(self, kind: type[EntryT], key: str, target: str, pattern: re.Pattern[str], shape: str, **fields: Any) -> None:
        if self.owner is None:
            raise PluginError(f"{self.noun} {key!r} cannot be added: plugins add to a registry in their toolkit_register_... hook only.")
        if not isinstance(key, str) or not key.strip():
            raise PluginError(f"{self.owner}: a {self.noun} needs a name, not {key!r}.")
        if not isinstance(target, str) or not pattern.fullmatch(target):
            raise PluginError(f"{self.owner}: the target of {self.noun} {key!r} must be a text {shape!r}, not {target!r}.")
        self.owner.add_package(target.partition(":")[0])
        new, old = kind(key=key, target=target, owner=self.owner, **fields), self._entries.get(key)
        if old is None:
            self._entries[key] = new
            return
        if old.override == new.override:
            claim = "both say override=True" if new.override else "one of them must say override=True to win"
            raise PluginError(f"{self.noun} {key!r} is registered by {old.owner} and by {new.owner}: {claim}.")
        winner, loser = (new, old) if new.override else (old, new)
        self._entries[key] = replace(winner, replaced=loser)


class PlainRegistry(Registry[Entry]):
    """Entries of which there is nothing to say but name and target."""

    missing = ConfigError

    def add(self, name: str, target: str, *, override: bool = False) -> None:
        """Registers a target. Raises PluginError for a malformed one, or a name that another plugin has."""
        self.add_entry(Entry, name, target, "module:Class" if self.base else "module:function", override=override)


class ModelRegistry(Registry[ModelEntry]):
    """Model classes, by the architecture that a checkpoint's config.json names; and fallbacks, by their own names."""

    noun = "model architecture"
    missing = UnsupportedError
    base = "toolkit_lm.model:Model"

    def add(
        self,
        architecture: str,
        target: str,
        *,
        runner: str = "generate",
        renderer: str | None = None,
        reserved_positions: int = 0,
        length_keys: tuple[str, ...] = LENGTH_KEYS,
        override: bool = False,
    ) -> None:
        """Registers a model class. Raises PluginError for a malformed target or a key that another plugin has."""
        positions = {"reserved_positions": reserved_positions, "length_keys": length_keys}
        fields = {"runner": runner, "renderer": renderer, "override": override}
        self.add_entry(ModelEntry, architecture, target, "module:Class", **fields, **positions)

    def add_fallback(
        self, name: str, target: str, *, runner: str = "generate", renderer: str | None = None, override: bool = False
    ) -> None:
        """Registers a `FallbackModel`: of those that do not refuse a checkpoint without a class of its own, the first runs it.

        `name` is what the option `model_impl` calls it. Raises PluginError, as `add` does.
        """
        fields = {"runner": runner, "renderer": renderer, "override": override, "is_fallback": True}
        self.add_entry(ModelEntry, name, target, "module:Class", **fields)

    def architectures(self) -> list[str]:
        """The architectures that have a class of their own."""
        return [entry.key for entry in self.entries() if not entry.is_fallback]

    def fallbacks(self) -> list[str]:
        """The names of the fallbacks, in the order in which they are asked."""
        return [entry.key for entry in self.entries() if entry.is_fallback]


class AttentionBackendRegistry(Registry[AttentionBackendEntry]):
    """Attention backends, by name."""

    noun = "attention backend"
    missing = ConfigError
    base = "toolkit_lm.attention:AttentionBackend"

    def add(self, name: str, target: str, *, priority: int = 0, override: bool = False) -> None:
        """Registers a backend class. Of those that do not refuse a layer, the one of the highest priority is chosen."""
        self.add_entry(AttentionBackendEntry, name, target, "module:Class", priority=priority, override=override)


class ExecutorRegistry(Registry[ExecutorEntry]):
    """Executors, by name."""

    noun = "executor"
    missing = ConfigError
    base = "toolkit_lm.executor:Executor"

    def add(self, name: str, target: str, *, max_ranks: int | None = None, override: bool = False) -> None:
        """Registers a subclass of toolkit_lm.executor.Executor. `max_ranks`: most workers that it runs; None: any number."""
        self.add_entry(ExecutorEntry, name, target, "module:Class", max_ranks=max_ranks, override=override)


class RendererRegistry(Registry[RendererEntry]):
    """Renderers, by name."""

    noun = "renderer"
    missing = ConfigError
    base = "toolkit_lm.renderer:Renderer"

    def add(self, name: str, target: str, *, reads: tuple[str, ...] = ("tokenizer.json",), override: bool = False) -> None:
        """Registers a renderer class. `reads`: file names, any of which in a checkpoint folder says that it can read it."""
        self.add_entry(RendererEntry, name, target, "module:Class", reads=tuple(reads), override=override)


class LogitsProcessorRegistry(Registry[LogitsProcessorEntry]):
    """Logits processors, by the name that SamplingParams.logits_processors gives."""

    noun = "logits processor"
    missing = RequestError
    base = "toolkit_lm.sampling:LogitsProcessor"

    def add(self, name: str, target: str, *, override: bool = False) -> None:
        """Registers a subclass of toolkit_lm.sampling.LogitsProcessor."""
        self.add_entry(LogitsProcessorEntry, name, target, "module:Class", override=override)


class SchedulingPolicyRegistry(Registry[SchedulingPolicyEntry]):
    """Scheduling policies, by the name that the option scheduling_policy gives."""

    noun = "scheduling policy"
    missing = ConfigError

    def add(self, name: str, target: str, *, reads_priority: bool = False, override: bool = False) -> None:
        """Registers a function, a toolkit_lm.scheduler.SchedulingPolicy. `reads_priority`: it looks at the priority of requests."""
        self.add_entry(SchedulingPolicyEntry, name, target, "module:function", reads_priority=reads_priority, override=override)


class ConverterRegistry(PlainRegistry):
    """Pooling adapters, by the convert type that they are for: "embed", "classify", ...

    A target is a function (model class, vllm_config) -> pooling model class. It raises UnsupportedError for what it cannot convert.
    """

    noun = "convert type"


class PoolingProfileRegistry(PlainRegistry):
    """Readers of what checkpoints' files say of pooling, by name.

    A target is a function (folder: Path, hf_config: dict, tokenizer: Path) -> PoolingProfile | None. Its module imports no torch.
    `hf_config` is the folder's config.json, `tokenizer` the folder of the tokenizer. It returns None for a folder without files of its
    kind, and raises CheckpointError for files that it does not understand.
    """

    noun = "reader of pooling profiles"

    def read(self, folder: Path, hf_config: dict[str, Any], tokenizer: Path) -> PoolingProfile | None:
        """What the files of a checkpoint say; None: no reader knows its files.

        Raises CheckpointError for files that a reader does not understand, and as `first_result` does.
        """
        return self.first_result(PoolingProfile, folder, hf_config, tokenizer)


class PairRendererRegistry(PlainRegistry):
    """What reads a query and a document as one text, by name.

    A target is a function (config, renderer, plugins) -> toolkit_lm.renderer.PairRenderer | None. Its module imports no torch. `config` is
    that of an engine that pools, resolved; `plugins` is the loaded set. None: queries and documents stay pairs of texts.
    """

    noun = "pair renderer"


class CheckpointRegistry(Registry[Entry]):
    """Checkpoint folders that ship inside packages, by the name that MODEL may give."""

    noun = "checkpoint"
    missing = ConfigError

    def add(self, name: str, folder: str, *, override: bool = False) -> None:
        """Registers a folder, as "package:folder/inside/it"."""
        self._add(Entry, name, folder, _FOLDER, "package:folder", override=override)

    def path(self, name: str) -> Path:
        """The folder of a registered checkpoint. Raises CheckpointError when it is not there."""
        entry = self.get(name)
        package, _, folder = entry.target.partition(":")
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations if spec else None) or ():
            if (path := Path(root, folder)).is_dir():
                return path
        raise CheckpointError(f"{entry.owner}: checkpoint {name!r} is registered, but there is no folder {entry.target!r}.")


class LoaderRegistry(Registry[LoaderEntry]):
    """Checkpoint loaders, by load format."""

    noun = "load format"
    missing = ConfigError
    base = "toolkit_lm.model:CheckpointLoader"

    def add(self, load_format: str, target: str, *, reads: tuple[str, ...] = (), override: bool = False) -> None:
        """Registers a subclass of toolkit_lm.model.CheckpointLoader. `reads`: patterns of names; none: it is never chosen by itself."""
        self.add_entry(LoaderEntry, load_format, target, "module:Class", reads=tuple(reads), override=override)

    def reading(self, source: Path) -> str | None:
        """The first load format that reads a file, or a file of a folder."""
        names = [path.name for path in source.iterdir()] if source.is_dir() else [source.name]
        return next((e.key for e in self.entries() if any(filter(names, pattern) for pattern in e.reads)), None)


class KVKindRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.attention.KVCacheSpec, by their tags. Their modules import no torch."""

    noun = "KV kind"
    base = "toolkit_lm.attention:KVCacheSpec"


class QuantizationRegistry(PlainRegistry):
    """Subclasses of toolkit_lm.model.Quantization, by the `quant_method` of checkpoints, or a name for those that quantize at load."""

    noun = "quantization"
    base = "toolkit_lm.model:Quantization"


class CommandRegistry(Registry[CommandEntry]):
    """Sub-commands of `toolkit`, by name. The names "plugins list" and "plugins new" make a group, `toolkit plugins`."""

    noun = "command"
    missing = ConfigError

    def add(self, name: str, target: str, *, help: str, override: bool = False) -> None:
        """Registers a command.

        `name`: its words, with a space between two. All but the last name a group, which several plugins may share.
        `target`: a function that Typer can read, or a Typer app. `help`: one line for `--help`.

        Raises PluginError for a malformed name or target, for a key that another plugin has, and where a command and a group
        would have one name.
        """
        if isinstance(name, str):
            self._check_place(name)
        self.add_entry(CommandEntry, name, target, "module:function", help=help, override=override)

    def children(self, group: str = "") -> dict[str, str]:
        """The commands and groups of a group, by their last words, with a line of help for each. "": those of `toolkit` itself."""
        found: dict[str, list[CommandEntry]] = {}
        for entry in self.entries():
            if _is_below(entry.key, group):
                found.setdefault(entry.key[len(group) :].split()[0], []).append(entry)
        return {word: self._help(f"{group} {word}".strip()) for word in sorted(found)}

    def _help(self, name: str) -> str:
        return self.get(name).help if name in self else f"Commands: {', '.join(self.children(name))}."

    def _check_place(self, name: str) -> None:
        if name.split() != name.split(" "):
            raise PluginError(f"{self.owner}: a {self.noun} needs a name with one space between two words, not {name!r}.")
        for other in self.entries():
            if _is_below(name, other.key) or _is_below(other.key, name):
                raise PluginError(
                    f"{self.noun} {name!r} of {self.owner} and {self.noun} {other.key!r} of {other.owner}: "
                    f"{min(name, other.key, key=len)!r} cannot be both a command and a group."
                )


def _import(target: str) -> Any:
    module, _, attributes = target.partition(":")
    loaded: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        loaded = getattr(loaded, attribute)
    return loaded


def _is_below(name: str, group: str) -> bool:
    return not group or name.startswith(f"{group} ")
