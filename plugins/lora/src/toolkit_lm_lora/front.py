"""At the front: the adapters by name, and which ones a request names."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError, nearest
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.processing import RequestHalf

from toolkit_lm_lora.enabled import KEYWORDS
from toolkit_lm_lora.files import CONFIG, AdapterFolder
from toolkit_lm_lora.share import Use

ADAPTER = "lora.adapter"
"""Key of a request's context: the name of its adapter, which was given as the model."""


class LoRARequest(Struct, kw_only=False):
    """An adapter for `LLM.generate(..., lora_request=)`, with the fields of vLLM's class."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""
    base_model_name: str | None = None


class Registered:
    """An adapter under a name. Its files are read when it is first used."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.path = path
        self._lock = threading.Lock()
        self._folder: AdapterFolder | None = None

    @property
    def folder(self) -> AdapterFolder:
        """Its files, with their digest. Raises CheckpointError."""
        with self._lock:
            if self._folder is None:
                folder = AdapterFolder(self.path)
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
        self._served = {config.model.model, *config.served_model_names}
        for entry in _listed(options.modules):
            name, found, path = entry.partition("=")
            if not found or not name or not path:
                raise ConfigError(f"plugin lora: option modules: {entry!r} is not NAME=PATH.")
            self.register(name, path)
        if options.folder is not None:
            folder = Path(options.folder)
            if not folder.is_dir():
                raise ConfigError(f"plugin lora: option folder: there is no folder {folder}.")
            for config_file in sorted(folder.glob("[!.]*/adapter_config.json")):
                found_folder = config_file.parent
                self.adapters.setdefault(
                    found_folder.name, Registered(found_folder.name, str(found_folder))
                )

    def register(self, name: str, path: str) -> Registered:
        """Adds an adapter, or puts it in the place of the one with its name. Raises ConfigError for
        a name of the model's, or a folder that is none."""
        made = self.made(name, path)
        self.add(made)
        return made

    def add(self, made: Registered) -> None:
        """Adds an adapter, or puts it in the place of the one with its name."""
        self.adapters = {**self.adapters, made.name: made}

    def resolve(self, name: str) -> Registered | None:
        """The adapter of that name; None: there is none. One that came into the folder of the
        options meanwhile is registered."""
        known = self.adapters.get(name)
        folder = self.options.folder
        if known is None and folder is not None and name[:1] not in ("", "."):
            path = Path(folder) / name
            if (
                name not in self._served
                and path.parent == Path(folder)
                and (path / CONFIG).is_file()
            ):
                known = self.register(name, str(path))
        return known

    def made(self, name: str, path: str) -> Registered:
        """An adapter that is not registered yet. Raises ConfigError as `register` does."""
        if name in self._served:
            raise ConfigError(f"adapter {name!r}: the model has this name.")
        if not Path(path).is_dir():
            raise ConfigError(f"adapter {name!r}: there is no folder {path!r}.")
        return Registered(name, path)

    def unregister(self, name: str) -> None:
        """Forgets a name. Requests that run go on. Raises RequestError for an unknown one."""
        self._find(name, "lora_name")
        self.adapters = {key: known for key, known in self.adapters.items() if key != name}

    def _find(self, name: str, param: str) -> Registered:
        if (known := self.resolve(name)) is None:
            near = nearest(name, self.adapters)
            raise RequestError(f"there is no adapter {name!r}. {near}", param)
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
        wanted: dict[str, float] = {}
        for name in (arguments.get("adapter"), request.context.get(ADAPTER)):
            if name is not None:
                wanted[name] = 1.0
        for entry in arguments.get("adapters") or ():
            name, scale = self._checked(entry)
            if name in wanted:
                raise RequestError(f"adapters: {name!r} is there twice.", "adapters")
            wanted[name] = scale
        token_ids = request.prompt_token_ids
        found = [self._use(name, scale, token_ids) for name, scale in wanted.items() if scale]
        uses = [use for use in found if use is not None]
        if not uses:
            return None, []
        # Two names may be one adapter.
        if len({use.digest for use in uses}) < len(uses):
            raise RequestError("adapters: two of them are the same.", "adapters")
        keys = []
        for start in sorted({use.start for use in uses}):
            names = sorted(f"{use.digest}*{use.scale}" for use in uses if use.start == start)
            keys.append(CacheKey(start, start + 1, f"lora {' '.join(names)}"))
        return Raw(msgpack.encode(uses)), keys

    @staticmethod
    def _checked(entry: Any) -> tuple[str, float]:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise RequestError("adapters: each must be {'name': ..., 'scale': ...}.", "adapters")
        if unknown := entry.keys() - {"name", "scale"}:
            raise RequestError(f"adapters: there is no {min(unknown)!r}.", "adapters")
        scale = entry.get("scale", 1.0)
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool)
        if not is_number or not -100 <= scale <= 100:
            raise RequestError("adapters: scale must be a number from -100 to 100.", "adapters")
        return entry["name"], float(scale)

    def _use(self, name: str, scale: float, token_ids: Sequence[int]) -> Use | None:
        """None: an aLoRA that the prompt does not invoke."""
        registered = self._find(name, "adapter")
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
        return None if start is None else Use(folder.digest, scale, name, str(folder.path), start)


def _listed(modules: list[str] | str) -> list[str]:
    if not isinstance(modules, str):
        return modules
    if not modules.startswith("["):
        return [entry.strip() for entry in modules.split(",")]
    try:
        return msgspec.json.decode(modules, type=list[str])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"plugin lora: option modules: {error}.") from error
