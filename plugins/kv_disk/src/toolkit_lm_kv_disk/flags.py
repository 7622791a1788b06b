"""The plugin's own flags in a command line: `--kv-cache-dir`, `--kv-cache-disk` and
`--kv-cache-host`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from toolkit_lm.errors import ConfigError

_OPTIONS = {"--kv-cache-dir": "dir", "--kv-cache-disk": "disk", "--kv-cache-host": "host"}


def translate_flags(words: Sequence[str], known: Collection[str]) -> list[str]:
    """The words with `--plugin-option kv_disk.NAME=VALUE` in place of each flag. Raises ConfigError
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
            found += ["--plugin-option", f"kv_disk.{_OPTIONS[flag]}={value}"]
    return found
