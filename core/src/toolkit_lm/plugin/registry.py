"""Registry: entries of plugins by key. Each names its target as text, "module:attribute", which is
imported on use."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

from toolkit_lm.errors import ConfigError, PluginError, ToolkitError, UnsupportedError, nearest
from toolkit_lm.plugin.info import PluginInfo, PluginWarning
from toolkit_lm.plugin.shipped import not_installed, way_to_get


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry that a plugin brings."""

    key: str
    target: str
    """"module:attribute", imported on use."""
    owner: PluginInfo
    """The plugin that brings the entry."""
    priority: int = 0
    """Order of selection: the highest priority that does not refuse wins, and among equals the
    first registered."""
    override: bool = False
    """True: the entry replaces another plugin's entry of this key."""
    replaced: Entry | None = None
    """The entry that this one replaced."""

    @property
    def plugin(self) -> str:
        """Name of the plugin that brings the entry."""
        return self.owner.name

    @property
    def shown(self) -> str:
        """The entry's targets, as shown to users."""
        return self.target


EntryT = TypeVar("EntryT", bound=Entry)
ResultT = TypeVar("ResultT")


@dataclass
class Registry(Generic[EntryT]):
    """Entries by key, in the order of registration. Plugins add entries in their
    `toolkit_register_...` hook, and only there.

    Entries take effect once all the register hooks of their plugin have returned. A plugin that
    raises leaves nothing behind.
    """

    noun: ClassVar[str] = "entry"
    missing: ClassVar[type[ToolkitError]] = ConfigError
    base: ClassVar[str | None] = ""
    """"module:Class" that targets must subclass. Empty: targets are functions. None: the loader of
    the targets checks them."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(
        r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
    )
    """Pattern that targets must match."""

    owner: PluginInfo | None = None
    """The plugin whose hook is being called; None: the registry is closed."""
    hint: str = ""
    """Last sentence of the error about an unknown key."""
    _entries: dict[str, EntryT] = field(default_factory=dict)

    @property
    def way_out(self) -> str:
        """Hint for a missing key: distributions to install, and plugins that are not in use."""
        return " ".join(part for part in (not_installed(self.noun, self), self.hint) if part)

    def copy(self, owner: PluginInfo | None, hint: str = "") -> Self:
        """Returns a copy that takes the entries of `owner`."""
        return type(self)(owner=owner, hint=hint, _entries=dict(self._entries))

    def get(self, key: str) -> EntryT:
        """Returns the entry of `key`. Raises for an unknown key, with the nearest known ones."""
        if key not in self._entries:
            way = way_to_get(self.noun, key) or nearest(key, self._entries)
            raise self.missing(f"no {self.noun} {key!r} is registered. {way} {self.hint}".rstrip())
        return self._entries[key]

    def load(self, key: str) -> Any:
        """Imports the target of `key`. Raises PluginError if that fails, or if it is of the wrong
        kind."""
        entry = self.get(key)
        return self.load_target(entry, entry.target, self.base)

    def load_target(self, entry: EntryT, target: str, base: str | None) -> Any:
        """Imports a target that an entry names. `base`: the class that it must subclass. Raises as
        `load` does."""
        with entry.owner.boundary(f"loading {self.noun} {entry.key!r} from {target!r}"):
            loaded = _import(target)
        subject = f"{entry.owner}: {self.noun} {entry.key!r}: {target!r}"
        if not base:
            if base is not None and not callable(loaded):
                raise PluginError(f"{subject} is not a function, but a {type(loaded).__name__}.")
        elif not (isinstance(loaded, type) and issubclass(loaded, _import(base))):
            raise PluginError(f"{subject} must be a subclass of {base.replace(':', '.')}.")
        elif missing := sorted(getattr(loaded, "__abstractmethods__", ())):
            raise PluginError(
                f"{subject} does not define {', '.join(missing)}, which {base.replace(':', '.')} "
                "leaves to its subclasses."
            )
        return loaded

    def make(self, key: str, *arguments: Any, **named: Any) -> Any:
        """Calls the target of `key`. Raises PluginError, which names the plugin, if that fails; a
        ToolkitError passes."""
        target = self.load(key)
        with self.get(key).owner.boundary(f"{self.noun} {key!r}", target=target):
            return target(*arguments, **named)

    def ask(self, key: str, *arguments: Any, by_name: bool = False) -> str | None:
        """Asks the class of `key` whether it refuses `arguments`. Returns the reason; None: it
        accepts them.

        A class that cannot be asked refuses with that reason, and is warned about. `by_name`: the
        user wants this class and no other, so that failure is a PluginError. An answer that is
        neither a text nor None is always a PluginError.
        """
        entry = self.get(key)
        try:
            target = self.load(key)
            with entry.owner.boundary(
                f"refuses() of {self.noun} {key!r}", passes=(), target=target
            ):
                answer = target.refuses(*arguments)
        except PluginError as error:
            if by_name:
                raise
            warnings.warn(str(error), PluginWarning, stacklevel=2)
            return str(error)
        if answer is None or isinstance(answer, str):
            return answer
        raise PluginError(
            f"{entry.owner}: refuses() of {self.noun} {key!r} must return a text or None, not "
            f"{answer!r}."
        )

    def choose(
        self, kind: str, refusal: Callable[[EntryT, bool], str | None], wanted: str = "auto"
    ) -> tuple[str, list[tuple[str, str | None]]]:
        """Selects the first key, by priority, that is not refused, or `wanted`. Returns it with all
        considered keys, each with its refusal (None: accepted).

        `kind`: the entry's purpose, for errors. `refusal` is called with an entry, and with whether
        it was requested by name. Raises UnsupportedError with the reasons if all refuse, or if
        `wanted` does. For an unknown `wanted`, raises as `get` does. Passes what `refusal` raises.
        """
        if wanted != "auto" and (reason := refusal(self.get(wanted), True)) is None:
            return wanted, [(wanted, None)]
        candidates = [
            (e.key, refusal(e, False)) for e in sorted(self.entries(), key=lambda e: -e.priority)
        ]
        able = [key for key, refused in candidates if refused is None]
        if wanted != "auto":
            raise UnsupportedError(
                f"{self.noun} {wanted!r} cannot {kind}: {reason}. Supported: "
                f"{', '.join(able) or 'none'}."
            )
        if not able:
            reasons = (
                "; ".join(f"{key}: {refused}" for key, refused in candidates) or "none is installed"
            )
            raise UnsupportedError(f"no {self.noun} can {kind}: {reasons}. {self.way_out}".rstrip())
        return able[0], candidates

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
        """Calls the registered functions with `arguments`, the last registered first. Returns the
        first result that is not None.

        In this order third parties win over the distributions of this repository. Raises as `make`
        does, and PluginError for a result that is not a `kind`.
        """
        for entry in reversed(self.entries()):
            result = self.make(entry.key, *arguments)
            if isinstance(result, kind):
                return result
            if result is not None:
                found = type(result).__name__
                raise PluginError(
                    f"{entry.owner}: {self.noun} {entry.key!r} must return a {kind.__name__} or "
                    f"None, not a {found}."
                )
        return None

    def add_entry(
        self, kind: type[EntryT], key: str, target: str, shape: str, **fields: Any
    ) -> None:
        """Adds an entry of `kind`, with its own fields; for the `add` of a registry. `shape`:
        description of the target, for errors.

        Raises PluginError for a malformed target or a key that another plugin has.
        """
        if self.owner is None:
            raise PluginError(
                f"{self.noun} {key!r} cannot be added: plugins add to a registry in their "
                "toolkit_register_... hook only."
            )
        if not isinstance(key, str) or not key.strip():
            raise PluginError(f"{self.owner}: a {self.noun} needs a name, not {key!r}.")
        self.check_target(key, target, shape)
        self.owner.add_package(target.partition(":")[0])
        new = kind(key=key, target=target, owner=self.owner, **fields)
        old = self._entries.get(key)
        if old is None:
            self._entries[key] = new
            return
        if old.override == new.override:
            claim = (
                "both say override=True"
                if new.override
                else "one of them must say override=True to win"
            )
            raise PluginError(
                f"{self.noun} {key!r} is registered by {old.owner} and by {new.owner}: {claim}."
            )
        winner, loser = (new, old) if new.override else (old, new)
        self._entries[key] = replace(winner, replaced=loser)

    def check_target(self, key: str, target: object, shape: str) -> None:
        """Raises PluginError for a malformed target of `key`. `shape`: as in `add_entry`."""
        if not isinstance(target, str) or not self.pattern.fullmatch(target):
            raise PluginError(
                f"{self.owner}: the target of {self.noun} {key!r} must be a text {shape!r}, not "
                f"{target!r}."
            )


class PlainRegistry(Registry[Entry]):
    """A registry whose entries have only a name and a target."""

    def add(self, name: str, target: str, *, override: bool = False) -> None:
        """Registers a target. Raises PluginError for a malformed one, or a name that another plugin
        has."""
        self.add_entry(
            Entry,
            name,
            target,
            "module:Class" if self.base else "module:function",
            override=override,
        )


def _import(target: str) -> Any:
    module, _, attributes = target.partition(":")
    loaded: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        loaded = getattr(loaded, attribute)
    return loaded
