"""The registries of commands, and of flags as other projects name them. The plugin `cli` brings
their hooks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from toolkit_lm.errors import PluginError
from toolkit_lm.plugin import Entry, PlainRegistry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry(Entry):
    """A sub-command of `toolkit`: a function or a Typer app."""

    help: str
    """One line for `--help`, which does not import the command."""


class CommandRegistry(Registry[CommandEntry]):
    """Sub-commands of `toolkit`, by name. The names "plugins list" and "plugins new" make a group,
    `toolkit plugins`."""

    noun = "command"

    def add(self, name: str, target: str, *, help: str, override: bool = False) -> None:
        """Registers a command.

        `name`: its words, with a space between two. All but the last name a group, which several
        plugins may share. `target`: a function that Typer can read, or a Typer app. `help`: one
        line for `--help`.

        Raises PluginError for a malformed name or target, for a key that another plugin has, and
        where a command and a group would have one name.
        """
        if isinstance(name, str):
            self._check_place(name)
        self.add_entry(CommandEntry, name, target, "module:function", help=help, override=override)

    def children(self, group: str = "") -> dict[str, str]:
        """The commands and groups of a group, by their last words, with a line of help for each.
        "": those of `toolkit` itself."""
        found: dict[str, list[CommandEntry]] = {}
        for entry in self.entries():
            if _is_below(entry.key, group):
                found.setdefault(entry.key[len(group) :].split()[0], []).append(entry)
        return {word: self._help(f"{group} {word}".strip()) for word in sorted(found)}

    def _help(self, name: str) -> str:
        return (
            self.get(name).help if name in self else f"Commands: {', '.join(self.children(name))}."
        )

    def _check_place(self, name: str) -> None:
        if name.split() != name.split(" "):
            raise PluginError(
                f"{self.owner}: a {self.noun} needs a name with one space between two words, not "
                f"{name!r}."
            )
        for other in self.entries():
            if _is_below(name, other.key) or _is_below(other.key, name):
                raise PluginError(
                    f"{self.noun} {name!r} of {self.owner} and {self.noun} {other.key!r} of "
                    f"{other.owner}: "
                    f"{min(name, other.key, key=len)!r} cannot be both a command and a group."
                )


class FlagNamesRegistry(PlainRegistry):
    """Translators of flags as other projects name them, by project.

    A target is a function (words: Sequence[str], known: Collection[str]) -> list[str]: the words
    after a command, with flags of ours in place of the other project's. `known` are the command's
    own flags. It raises ConfigError for what cannot be had here.
    """

    noun = "translator of flags"

    def translate(self, words: list[str], known: Collection[str]) -> list[str]:
        """The words after all translators. Raises ConfigError."""
        for name in self:
            words = self.make(name, words, known)
        return words


def _is_below(name: str, group: str) -> bool:
    return not group or name.startswith(f"{group} ")
