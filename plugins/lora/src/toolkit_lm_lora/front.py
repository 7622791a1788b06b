"""At the front: the adapters by name, and which ones a request names."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Raw, Struct, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError, nearest
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.processing import RequestHalf
from toolkit_lm_serving import ADAPTER, ADAPTERS

from toolkit_lm_lora.enabled import KEYWORDS, own_adapter
from toolkit_lm_lora.files import AdapterFolder
from toolkit_lm_lora.listed import listed
from toolkit_lm_lora.numbers import Numbers
from toolkit_lm_lora.resolvers import (
    AdapterResolver,
    AdapterResolverRegistry,
    ResolverError,
    UnknownAdapterError,
)
from toolkit_lm_lora.share import Use
from toolkit_lm_lora.usage import Usage

OWN = "audio"
"""Name of the adapter that a checkpoint of a model that hears brings with it."""


class LoRARequest(Struct, kw_only=False):
    """An adapter for `LLM.generate(..., lora_request=)`, with the fields of vLLM's class."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None


class Registered:
    """An adapter under a name. Its files are read when it is first used."""

    def __init__(
        self, name: str, path: str, *, most_bytes: int | None = None, pinned: bool = False
    ) -> None:
        """`most_bytes`: largest file of weights; None: any. `pinned`: it stays in memory once it is
        read."""
        self.name = name
        self.path = path
        self.pinned = pinned
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._folder: AdapterFolder | None = None

    @property
    def known_digest(self) -> str | None:
        """Its digest; None: its files were not read yet."""
        return None if self._folder is None else self._folder.digest

    @property
    def folder(self) -> AdapterFolder:
        """Its files, with their digest. Raises CheckpointError."""
        with self._lock:
            if self._folder is None:
                folder = AdapterFolder(self.path, self._most_bytes)
                _ = folder.digest
                self._folder = folder
            return self._folder


class LoraRequests(RequestHalf):
    """The share of a request: its adapters. Cached prefixes are kept apart by the digests of their
    contents."""

    keywords = KEYWORDS

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        self.options = options
        self.adapters: dict[str, Registered] = {}
        """By name."""
        self.usage = Usage()
        self.numbers = Numbers()
        self.scales: dict[str, float] = {}
        """By name, adapters that requests have which name none, as operators have set them."""
        self._config = config
        self._served = {config.model.model, *config.served_model_names}
        self._pinned = frozenset(listed(options.pinned, "pinned"))
        self._most_bytes = int(options.max_file_gib * 2**30)
        self.unloaded: frozenset[str] = frozenset()
        """Names that resolvers are not asked for, since they were unloaded."""
        self._locks: dict[str, threading.Lock] = {}
        """By name that is being resolved."""
        self._of_media: dict[str, str] = {}
        """By modality, the adapter of requests that have items of it and name none."""
        if (own := own_adapter(config)) is not None:
            self.register(OWN, str(own))
            self._of_media["audio"] = OWN
        for name, path in _pairs(options.modules, "modules", "NAME=PATH").items():
            self.register(name, path)
        self._of_media |= _pairs(options.modalities, "modalities", "MODALITY=NAME")
        if options.folder is not None and not Path(options.folder).is_dir():
            raise ConfigError(f"plugin lora: option folder: there is no folder {options.folder}.")

    def register(self, name: str, path: str) -> Registered:
        """Adds an adapter, or puts it in the place of the one with its name. Raises ConfigError for
        a name of the model's, or a folder that is none."""
        made = self.made(name, path)
        self.add(made)
        return made

    def add(self, made: Registered) -> None:
        """Adds an adapter, or puts it in the place of the one with its name."""
        self.adapters = {**self.adapters, made.name: made}
        self.unloaded -= {made.name}

    @cached_property
    def resolvers(self) -> dict[str, AdapterResolver]:
        """The adapter resolvers of all plugins, by name. The names that they know are registered.
        Raises PluginError, and ConfigError."""
        registry = self.plugins.brought_registry(AdapterResolverRegistry)
        made: dict[str, AdapterResolver] = {
            entry.key: registry.make(
                entry.key, self._config, options=self.plugins.options(entry.plugin)
            )
            for entry in registry.entries()
        }
        known: dict[str, Registered] = {}
        for resolver in made.values():
            for name in resolver.names():
                if name in self._served or name in known:
                    continue
                if (path := resolver.resolve(name)) is not None:
                    known[name] = self._registered(name, str(path))
        self.adapters = {**known, **self.adapters}
        return made

    def may_have(self, name: str) -> Registered | bool:
        """The adapter of that name, if it is registered. Otherwise whether a resolver may find
        it: quickly."""
        if (known := self.adapters.get(name)) is not None:
            return known
        if name in self._served or name in self.unloaded:
            return False
        return any(resolver.may_have(name) for resolver in self.resolvers.values())

    def resolve(self, name: str) -> Registered | None:
        """The adapter of that name; None: there is none. What a resolver finds is registered. It
        may wait for one. Raises ResolverError."""
        if (known := self.adapters.get(name)) is not None:
            return known
        if name in self._served or name in self.unloaded:
            return None
        with self._locks.setdefault(name, threading.Lock()):
            try:
                known = self.adapters.get(name)
                return self._resolved(name) if known is None else known
            finally:
                self._locks.pop(name, None)

    def _resolved(self, name: str) -> Registered | None:
        for key, resolver in self.resolvers.items():
            try:
                if (path := resolver.resolve(name)) is not None:
                    return self.register(name, str(path))
            except RequestError:
                raise
            except Exception as error:
                raise ResolverError(
                    f"adapter {name!r}: the adapter resolver {key!r} has failed: "
                    f"{type(error).__name__}: {error}",
                    "adapter",
                ) from error
        return None

    def _registered(self, name: str, path: str, *, pinned: bool = False) -> Registered:
        pinned = pinned or name in self._pinned
        return Registered(name, path, most_bytes=self._most_bytes, pinned=pinned)

    def made(self, name: str, path: str, *, pinned: bool = False) -> Registered:
        """An adapter that is not registered yet. Raises ConfigError as `register` does."""
        if name in self._served:
            raise ConfigError(f"adapter {name!r}: the model has this name.")
        if path.endswith(".gguf"):
            raise ConfigError(
                f"adapter {name!r}: {path!r} is a GGUF file. Convert it: `toolkit lora convert "
                f"{self._config.model.model} --adapter {path} --out FOLDER`"
            )
        if not Path(path).is_dir():
            raise ConfigError(f"adapter {name!r}: there is no folder {path!r}.")
        return self._registered(name, path, pinned=pinned)

    def unregister(self, name: str) -> Registered:
        """Forgets a name, for resolvers too. Requests that run go on. Raises KeyError for an
        unknown one."""
        known = self.adapters[name]
        self.unloaded |= {name}
        self.scales = {key: scale for key, scale in self.scales.items() if key != name}
        self.adapters = {key: other for key, other in self.adapters.items() if key != name}
        return known

    def numbered(self, allowed: Sequence[str] | None) -> dict[str, int]:
        """The registered adapters that a client may use, with their numbers. `allowed`: patterns of
        their names; None: all."""
        return self.numbers.of(allowed, [name for name in self.adapters if _is_of(name, allowed)])

    def _find(self, name: str, allowed: Collection[str] | None) -> Registered:
        """`allowed`: patterns of the names that the client may use; None: all."""
        known = self.resolve(name) if _is_of(name, allowed) else None
        if known is None:
            near = nearest(name, [own for own in self.adapters if _is_of(own, allowed)])
            raise UnknownAdapterError(f"there is no adapter {name!r}. {near}", "adapter")
        return known

    def keyword(self, name: str, value: Any) -> Mapping[str, str]:
        """The context of vLLM's `lora_request`, whose adapter is registered."""
        lora_name = getattr(value, "lora_name", None)
        lora_path = getattr(value, "lora_path", None)
        if not (isinstance(lora_name, str) and isinstance(lora_path, str) and lora_name):
            raise RequestError("lora_request needs a lora_name and a lora_path.", name)
        known = self.adapters.get(lora_name)
        if known is None or known.path != lora_path:
            try:
                self.register(lora_name, lora_path)
            except ConfigError as error:
                raise RequestError(str(error), name) from error
        return {ADAPTER: lora_name}

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        patterns = request.context.get(ADAPTERS)
        allowed = None if patterns is None else patterns.split("\n")
        wanted = self._wanted(arguments, request.context.get(ADAPTER), allowed)
        if wanted is None:
            # Operators choose them for all clients.
            wanted = self._unnamed(request, allowed)
            allowed = None
        if not wanted:
            return None, []
        known = {name: self._find(name, allowed) for name in wanted}
        token_ids = request.prompt_token_ids
        found = [
            self._use(known[name], scale, token_ids) for name, scale in wanted.items() if scale
        ]
        uses = [use for use in found if use is not None]
        if not uses:
            return None, []
        # Two names may be one adapter.
        if len({use.digest for use in uses}) < len(uses):
            raise RequestError("adapters: two of them are the same.", "adapters")
        request.context = {**request.context, **self.usage.context(uses)}
        keys = []
        for start in sorted({use.start for use in uses}):
            names = sorted(f"{use.digest}*{use.scale}" for use in uses if use.start == start)
            keys.append(CacheKey(start, start + 1, f"lora {' '.join(names)}"))
        return Raw(msgpack.encode(uses)), keys

    def _wanted(
        self, arguments: Mapping[str, Any], alias: str | None, allowed: Sequence[str] | None
    ) -> dict[str, float] | None:
        """Scales of the adapters that a request names, by name; None: it says nothing of them.
        `alias`: the one that it has as its model."""
        wanted: dict[str, float] = {}
        for name in (arguments.get("adapter"), arguments.get("lora_path"), alias):
            if name is not None:
                wanted[name] = 1.0
        entries = [_checked(entry) for entry in arguments.get("adapters") or ()]
        if numbered := arguments.get("lora"):
            names = {number: name for name, number in self.numbered(allowed).items()}
            entries += [_named(entry, names) for entry in numbered]
        for name, scale in entries:
            if name in wanted:
                raise RequestError(f"adapters: {name!r} is there twice.", "adapters")
            wanted[name] = scale
        if wanted or any(arguments.get(name) is not None for name in ("adapters", "lora")):
            return wanted
        return None

    def _unnamed(self, request: EngineRequest, allowed: Sequence[str] | None) -> dict[str, float]:
        """Scales of the adapters of a request that names none: of its media, and those that
        operators have set."""
        found = {name: scale for name, scale in self.scales.items() if _is_of(name, allowed)}
        for feature in request.features:
            if (name := self._of_media.get(feature.modality)) is not None:
                found[name] = 1.0
        return found

    def _use(self, registered: Registered, scale: float, token_ids: Sequence[int]) -> Use | None:
        """None: an aLoRA that the prompt does not invoke."""
        name = registered.name
        try:
            folder = registered.folder
        except (CheckpointError, OSError) as error:
            raise RequestError(f"adapter {name!r} cannot be used: {error}", "adapter") from error
        if scale != 1 and not folder.is_additive:
            raise RequestError(
                f"adapter {name!r} has DoRA or parameters in the place of the model's: its scale "
                "can only be 1.",
                "adapters",
            )
        start = folder.config.first_token(token_ids)
        if start is None:
            return None
        return Use(
            folder.digest,
            scale,
            name,
            str(folder.path),
            start,
            registered.pinned,
            folder.may_change_media,
        )


def _is_of(name: str, allowed: Collection[str] | None) -> bool:
    """Whether a client may use an adapter of that name."""
    return allowed is None or any(fnmatchcase(name, pattern) for pattern in allowed)


def _checked(entry: Any) -> tuple[str, float]:
    """Name and scale of an entry of `adapters`. Raises RequestError."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise RequestError("adapters: each must be {'name': ..., 'scale': ...}.", "adapters")
    if unknown := entry.keys() - {"name", "scale"}:
        raise RequestError(f"adapters: there is no {min(unknown)!r}.", "adapters")
    return entry["name"], checked_scale(entry.get("scale", 1.0), "adapters")


def _named(entry: Any, names: Mapping[int, str]) -> tuple[str, float]:
    """Name and scale of an entry of `lora`. Raises RequestError."""
    if not isinstance(entry, Mapping) or entry.keys() != {"id", "scale"}:
        raise RequestError("lora: each must be {'id': ..., 'scale': ...}.", "lora")
    number = entry["id"]
    if not isinstance(number, int) or isinstance(number, bool) or number not in names:
        raise UnknownAdapterError(f"lora: /lora-adapters has no id {number!r:.40}.", "lora")
    return names[number], checked_scale(entry["scale"], "lora")


def checked_scale(scale: Any, param: str) -> float:
    """A scale of an adapter. Raises RequestError."""
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_number or not -100 <= scale <= 100:
        raise RequestError(f"{param}: scale must be a number from -100 to 100.", param)
    return float(scale)


def _pairs(value: list[str] | str, option: str, form: str) -> dict[str, str]:
    """An option of pairs. Raises ConfigError."""
    made = {}
    for entry in listed(value, option):
        name, _, other = entry.partition("=")
        if not name or not other:
            raise ConfigError(f"plugin lora: option {option}: {entry!r} is not {form}.")
        made[name] = other
    return made
