"""Registry: what plugins bring, under a key, as the text "module:attribute" that is imported when
it is used."""

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
    """One thing that a plugin brings."""

    key: str
    target: str
    """"module:attribute", imported when it is used."""
    owner: PluginInfo
    """The plugin that brings it."""
    priority: int = 0
    """Of those that do not refuse, the one of the highest priority is taken; of equals the one that
    came first."""
    override: bool = False
    """True: takes the place of another plugin's entry of this key."""
    replaced: Entry | None = None
    """The entry that this one took the place of."""

    @property
    def plugin(self) -> str:
        """Name of the plugin that brings it."""
        return self.owner.name

    @property
    def shown(self) -> str:
        """What a person is told of its targets."""
        return self.target


EntryT = TypeVar("EntryT", bound=Entry)
ResultT = TypeVar("ResultT")


@dataclass
class Registry(Generic[EntryT]):
    """Entries by key, in the order in which they came. Plugins add to it in their
    `toolkit_register_...` hook, and only there.

    What a hook adds counts when all the register hooks of its plugin have returned: a plugin that
    raises leaves nothing behind.
    """

    noun: ClassVar[str] = "entry"
    missing: ClassVar[type[ToolkitError]] = ConfigError
    base: ClassVar[str | None] = ""
    """"module:Class", of which targets are subclasses; empty: they are functions; None: who loads
    them knows what they are."""

    pattern: ClassVar[re.Pattern[str]] = re.compile(
        r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
    )
    """What targets look like."""

    owner: PluginInfo | None = None
    """The plugin whose hook is being called; None: the registry is closed."""
    hint: str = ""
    """A last sentence for the error about an unknown key."""
    _entries: dict[str, EntryT] = field(default_factory=dict)

    @property
    def way_out(self) -> str:
        """What might bring what is missing here: distributions to install, and plugins that are not
        in use."""
        return " ".join(part for part in (not_installed(self.noun, self), self.hint) if part)

    def copy(self, owner: PluginInfo | None, hint: str = "") -> Self:
        """A copy that takes the entries of `owner`."""
        return type(self)(owner=owner, hint=hint, _entries=dict(self._entries))

    def get(self, key: str) -> EntryT:
        """The entry of `key`. Raises for an unknown key, with the nearest known ones."""
        if key not in self._entries:
            way = way_to_get(self.noun, key) or nearest(key, self._entries)
            raise self.missing(f"no {self.noun} {key!r} is registered. {way} {self.hint}".rstrip())
        return self._entries[key]

    def load(self, key: str) -> Any:
        """Imports what is registered under `key`. Raises PluginError where that fails, or it is not
        what the registry is for."""
        entry = self.get(key)
        return self.load_target(entry, entry.target, self.base)

    def load_target(self, entry: EntryT, target: str, base: str | None) -> Any:
        """As `load`, of a target that an entry names; `base` is what it is to be a subclass of."""
        with entry.owner.boundary(f"loading {self.noun} {entry.key!r} from {target!r}"):
            loaded = _import(target)
        what = f"{entry.owner}: {self.noun} {entry.key!r}: {target!r}"
        if not base:
            if base is not None and not callable(loaded):
                raise PluginError(f"{what} is not a function, but a {type(loaded).__name__}.")
        elif not (isinstance(loaded, type) and issubclass(loaded, _import(base))):
            raise PluginError(f"{what} must be a subclass of {base.replace(':', '.')}.")
        elif missing := sorted(getattr(loaded, "__abstractmethods__", ())):
            raise PluginError(
                f"{what} does not define {', '.join(missing)}, which {base.replace(':', '.')} "
                "leaves to its subclasses."
            )
        return loaded

    def make(self, key: str, *arguments: Any, **named: Any) -> Any:
        """Calls what is registered under `key`. Raises PluginError, naming the plugin, where that
        fails; a ToolkitError passes."""
        target = self.load(key)
        with self.get(key).owner.boundary(f"{self.noun} {key!r}", target=target):
            return target(*arguments, **named)

    def ask(self, key: str, *arguments: Any, by_name: bool = False) -> str | None:
        """Why the class that is registered under `key` refuses `arguments`; None when it can take
        them.

        One that cannot be asked refuses with that reason, and is warned about. `by_name`: the user
        wants this one and no other, so that it is a PluginError. So it always is where the answer
        is neither a text nor None: nobody knows what is meant.
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
        self, what: str, refusal: Callable[[EntryT, bool], str | None], wanted: str = "auto"
    ) -> tuple[str, list[tuple[str, str | None]]]:
        """The first key, by priority, that is not refused, or `wanted`; and all that were
        considered, each with its refusal (None: able).

        `what` the entry is to do, in errors. `refusal` of an entry, which was asked for by name or
        not. Raises UnsupportedError with the reasons where all refuse, or `wanted` does; as `get`
        does, where it is unknown; and what `refusal` raises.
        """
        if wanted != "auto" and (reason := refusal(self.get(wanted), True)) is None:
            return wanted, [(wanted, None)]
        candidates = [
            (e.key, refusal(e, False)) for e in sorted(self.entries(), key=lambda e: -e.priority)
        ]
        able = [key for key, refused in candidates if refused is None]
        if wanted != "auto":
            raise UnsupportedError(
                f"{self.noun} {wanted!r} cannot {what}: {reason}. Supported: "
                f"{', '.join(able) or 'none'}."
            )
        if not able:
            reasons = (
                "; ".join(f"{key}: {refused}" for key, refused in candidates) or "none is installed"
            )
            raise UnsupportedError(f"no {self.noun} can {what}: {reasons}. {self.way_out}".rstrip())
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
        """What the registered functions make of `arguments`: the first result that is not None.
        Those that came last are asked first.

        The order makes third parties win over the distributions of this repository. Raises as
        `make` does, and PluginError for a function that returns something else than `kind`.
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
        """For the `add` of a registry: adds an entry of `kind`, with the fields of its own.
        `shape`: what the target is, in errors.

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
    """Entries of which there is nothing to say but name and target."""

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
