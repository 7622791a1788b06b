"""The plugin's own flags in a command line: `--lora-dir`, `--lora-pin` and `--lora-merge`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from toolkit_lm.errors import ConfigError

_OPTIONS = {"--lora-dir": "folder", "--lora-pin": "pinned", "--lora-merge": "merge"}


def translate_flags(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words with `--plugin-option lora.NAME=VALUE` in place of each flag. Raises ConfigError
    for one without a value."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, has_value, value = word.partition("=")
        if word == "--":
            found += [word, *rest]
        elif flag not in _OPTIONS or flag in known:
            found.append(word)
        else:
            if not has_value:
                value = next(rest, "")
            if not value or value.startswith("--"):
                raise ConfigError(f"{flag} needs a value.")
            found += ["--plugin-option", f"lora.{_OPTIONS[flag]}={value}"]
    return found
