"""Fingerprint: identifies a plugin set, to compare those of two processes."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path
from types import ModuleType

import msgspec
from msgspec import Struct

from toolkit_lm._version import __version__
from toolkit_lm.plugin.info import PluginInfo


class PluginPrint(Struct, frozen=True):
    """One plugin of a fingerprint."""

    name: str
    distribution: str | None
    version: str | None
    content: str
    """SHA-256 over the .py files of the plugin's package."""


class Fingerprint(Struct, frozen=True):
    """The version of core and the loaded plugins, in load order. Equal fingerprints mean equal
    code."""

    core: str
    plugins: tuple[PluginPrint, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of the whole fingerprint, as hex."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()

    def difference(self, other: Fingerprint) -> str:
        """Differences of `other` from this fingerprint, one per line; empty if they are equal."""
        lines = (
            []
            if self.core == other.core
            else [f"toolkit-lm-core: {self.core} here, {other.core} there"]
        )
        here, there = (
            {plugin.name: plugin for plugin in fingerprint.plugins} for fingerprint in (self, other)
        )
        for name in sorted(here.keys() | there.keys()):
            a = here.get(name)
            b = there.get(name)
            if a is None or b is None:
                lines.append(f"plugin {name!r}: only {'there' if a is None else 'here'}")
            elif a != b:
                lines.append(f"plugin {name!r}: {_state(a)} here, {_state(b)} there")
        if not lines and self != other:
            lines.append(f"load order: {', '.join(here)} here, {', '.join(there)} there")
        return "\n".join(lines)


def fingerprint(plugins: list[tuple[PluginInfo, object]]) -> Fingerprint:
    """Computes the fingerprint of loaded plugins.

    The files of a package are read once in a process. Later changes of them do not count, since the
    loaded code does not change with them.
    """
    return Fingerprint(
        __version__,
        tuple(PluginPrint(i.name, i.distribution, i.version, _content(p)) for i, p in plugins),
    )


def _state(plugin: PluginPrint) -> str:
    return f"{plugin.distribution or 'from code'} {plugin.version or ''} ({plugin.content[:12]})"


def _content(plugin: object) -> str:
    module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
    return _digest(sys.modules.get(module.partition(".")[0]))


@functools.cache
def _digest(package: ModuleType | None) -> str:
    digest = hashlib.sha256()
    roots = getattr(package, "__path__", None)
    file = getattr(package, "__file__", None)
    for root in roots or []:
        for path in sorted(Path(root).rglob("*.py")):
            digest.update(
                f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes() + b"\0"
            )
    if roots is None and file and Path(file).is_file():
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()
