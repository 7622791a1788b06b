"""Flags that a plugin gives its own options."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from toolkit_lm.errors import ConfigError


class PluginFlags:
    """Translator of a plugin's own flags, for `toolkit_register_flag_names`. Each takes a value:
    `--lora-dir=D` becomes `--plugin-option lora.folder=D`."""

    def __init__(self, plugin: str, options: Mapping[str, str]) -> None:
        """`options`: names of the plugin's options, by flag."""
        self._plugin = plugin
        self._options = options

    def __call__(self, words: Sequence[str], known: Collection[str]) -> list[str]:
        """The words with `--plugin-option NAME.KEY=VALUE` in place of each flag. Words after `--`
        and flags in `known` stay.

        Raises ConfigError for a flag without a value.
        """
        found: list[str] = []
        rest = iter(words)
        for word in rest:
            flag, has_value, value = word.partition("=")
            if word == "--":
                found += [word, *rest]
            elif flag not in self._options or flag in known:
                found.append(word)
            else:
                if not has_value:
                    value = next(rest, "")
                if not value or value.startswith("--"):
                    raise ConfigError(f"{flag} needs a value.")
                found += ["--plugin-option", f"{self._plugin}.{self._options[flag]}={value}"]
        return found
