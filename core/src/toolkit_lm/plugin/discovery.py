"""The first phase of loading: finds the installed and wanted plugins. Reads the metadata of
distributions and imports nothing."""

from __future__ import annotations

import email
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from email.message import Message
from types import ModuleType

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from toolkit_lm._version import __version__
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import PluginError, nearest
from toolkit_lm.plugin.info import PluginInfo
from toolkit_lm.plugin.markers import PROJECT

CORE_DISTRIBUTION = "toolkit-lm-core"

AUTHOR = "The toolkit-lm authors"
"""Author of this repository's distributions, as in their metadata."""


@dataclass(slots=True)
class Candidate:
    """A plugin that is being loaded."""

    info: PluginInfo
    entry: importlib.metadata.EntryPoint | None = None
    requirement: str | None = None
    """Requirement of its distribution on toolkit-lm-core, such as ">=0.2,<0.3"."""
    plugin: object | None = None
    """The imported module or object; None before the import."""
    required: bool = False
    """The plugin was requested by name or from code: a failure is fatal."""
    refusal: str | None = None
    """Reason for which the plugin is not even imported."""
    builtin: bool = False
    """The distribution is from this repository. Such plugins load first, so that third parties win
    if only one result counts."""


def discover(config: PluginsConfig) -> list[Candidate]:
    """Returns the installed plugins in load order, with disabled ones. Plugins that share a name
    are refused, except one of this repository.

    Raises PluginError if an option names a plugin that is not installed.
    """
    found = _without_copies(_installed())
    names = {candidate.info.name for candidate in found}
    for option, listed in (
        ("plugins", config.plugins or []),
        ("disable_plugins", config.disable_plugins),
    ):
        for name in listed:
            if name not in names:
                raise PluginError(
                    f"option {option!r} names plugin {name!r}, which is not installed. "
                    f"{nearest(name, names)}"
                )
    for candidate in found:
        info = candidate.info
        candidate.required = config.plugins is not None and info.name in config.plugins
        if info.name in config.disable_plugins or (
            config.plugins is not None and not candidate.required
        ):
            info.status = "disabled"
    found.sort(key=lambda c: (not c.builtin, c.info.name, c.info.distribution or ""))
    _refuse_duplicates([c for c in found if c.info.status != "disabled"])
    return found


def from_objects(objects: Sequence[object]) -> list[Candidate]:
    """Makes candidates from modules or objects given in code. An object may have a `name`; a
    failure of one is fatal."""
    found = []
    for plugin in objects:
        if isinstance(plugin, str):
            raise PluginError(
                f"{plugin!r} is a text: plugins given from code are modules or objects. "
                "To choose installed plugins by name, set the option 'plugins' of VllmConfig."
            )
        name = (
            plugin.__name__
            if isinstance(plugin, ModuleType)
            else getattr(plugin, "name", type(plugin).__name__)
        )
        file = getattr(plugin, "__file__", None)
        found.append(Candidate(PluginInfo(str(name), file=file), plugin=plugin, required=True))
        found[-1].info.add_package(
            plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
        )
    return found


def check_api_version(candidate: Candidate) -> None:
    """Raises PluginError if the plugin's distribution does not admit this version of core."""
    if candidate.requirement is None:
        candidate.info.notes.append(
            f"its distribution requires no version of {CORE_DISTRIBUTION}: a later core may "
            "break it"
        )
    elif not Requirement(f"{CORE_DISTRIBUTION}{candidate.requirement}").specifier.contains(
        __version__, prereleases=True
    ):
        raise PluginError(
            f"it requires {CORE_DISTRIBUTION}{candidate.requirement}, and this is "
            f"{CORE_DISTRIBUTION} {__version__}. "
            f"Install a version of {candidate.info.distribution} that fits."
        )


def _installed() -> Iterator[Candidate]:
    for distribution in importlib.metadata.distributions():
        # Parsing a distribution's metadata is slow; most have no entry point of ours.
        if PROJECT not in (distribution.read_text("entry_points.txt") or ""):
            continue
        # An .egg-info has PKG-INFO, and its requirements elsewhere.
        text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        metadata = _parsed(text)
        requires = metadata.get_all("Requires-Dist") or distribution.requires or ()
        builtin = AUTHOR in metadata.get_all("Author", [])
        for entry in distribution.entry_points.select(group=PROJECT):
            info = PluginInfo(
                entry.name,
                canonicalize_name(metadata["Name"]),
                metadata["Version"],
                _file(entry.module),
            )
            info.add_package(entry.module)
            yield Candidate(info, entry, _core_requirement(tuple(requires)), builtin=builtin)


@functools.cache
def _parsed(text: str) -> Message:
    """Parses a metadata file's text, once for all engines of a process."""
    return email.message_from_string(text)


def _file(module: str) -> str | None:
    # Finding the top-level package imports nothing. Its submodules cannot be found without
    # importing it.
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        return None
    return spec.origin if spec else None


@functools.cache
def _core_requirement(requires: tuple[str, ...]) -> str | None:
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if (
            canonicalize_name(requirement.name) == CORE_DISTRIBUTION
            and applies
            and requirement.specifier
        ):
            return str(requirement.specifier)
    return None


def _without_copies(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Drops further metadata folders of the same distribution and version. The first on the path
    remains, which is also the imported one."""
    first: dict[tuple[str | None, ...], Candidate] = {}
    for candidate in candidates:
        assert candidate.entry is not None
        key = (
            candidate.info.name,
            candidate.info.distribution,
            candidate.info.version,
            candidate.entry.value,
        )
        first.setdefault(key, candidate)
    return list(first.values())


def _refuse_duplicates(candidates: Iterable[Candidate]) -> None:
    """Refuses plugins that share a name, unless one of them is of this repository."""
    named: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        named.setdefault(candidate.info.name, []).append(candidate)
    for name, same in named.items():
        if len(same) > 1:
            both = " and ".join(str(candidate.info) for candidate in same)
            for candidate in same:
                if not candidate.builtin:
                    candidate.refusal = (
                        f"two installed plugins have the name {name!r}: {both}. Uninstall one"
                    )
