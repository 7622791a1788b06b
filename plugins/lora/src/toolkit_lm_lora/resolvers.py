"""Adapter resolvers: where adapters come from that are not registered yet. This module imports no
torch."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.plugin import PlainRegistry

from toolkit_lm_lora.files import CONFIG, WEIGHTS


class AdapterResolver(ABC):
    """Finds the folder of an adapter, by the name that a request gives. There is one per front."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        """`config` is resolved. `options`: the plugin's own options, or None. Raises
        ConfigError."""
        self.config = config
        self.options = options

    def names(self) -> Iterable[str]:
        """Names that are known at the start. They are registered then, and /v1/models lists
        them."""
        return ()

    def may_have(self, name: str) -> bool:
        """Whether `resolve` could find the name. Called in the server's event loop, so it must be
        quick: True if that is not known without waiting."""
        return True

    @abstractmethod
    def resolve(self, name: str) -> Path | None:
        """Returns the folder of an adapter, after it has been fetched; None: there is none of that
        name. Called in threads, once for each request with a name that is not registered.

        An exception ends the request with the status 503 and the exception's text. A RequestError
        ends it as it is.
        """


class AdapterResolverRegistry(PlainRegistry):
    """Subclasses of AdapterResolver. They are asked in the order of registration."""

    noun = "adapter resolver"
    base = "toolkit_lm_lora.resolvers:AdapterResolver"


class FolderResolver(AdapterResolver):
    """The folders in the folder of the option, by their names. A link that leads out of it is
    refused."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        super().__init__(config, options=options)
        self._folder = None if options.folder is None else Path(options.folder)
        if self._folder is not None and not self._folder.is_dir():
            raise ConfigError(f"plugin lora: option folder: there is no folder {self._folder}.")

    def names(self) -> Iterable[str]:
        if self._folder is None:
            return ()
        found = sorted(self._folder.glob(f"[!.]*/{CONFIG}"))
        return [path.parent.name for path in found if contains(self._folder, path.parent)]

    def may_have(self, name: str) -> bool:
        return self.resolve(name) is not None

    def resolve(self, name: str) -> Path | None:
        if self._folder is None or name[:1] in ("", ".") or not {"/", "\0"}.isdisjoint(name):
            return None
        path = self._folder / name
        if len(name) > 255 or not (path / CONFIG).is_file():
            return None
        return path if contains(self._folder, path) else None


def contains(root: Path, folder: Path) -> bool:
    """Whether the folder of an adapter, and its files, are in `root`, links followed."""
    paths = (folder, folder / CONFIG, folder / WEIGHTS)
    if folder.parent == root and not any(map(os.path.islink, paths)):
        return True
    real = root.resolve()
    return all(real in path.resolve().parents for path in paths)


class UnknownAdapterError(RequestError):
    """There is no adapter of that name."""

    http_status = 404
    code = "model_not_found"


class ResolverError(RequestError):
    """An adapter resolver has failed."""

    http_status = 503
    code = "adapter_resolver_failed"
