"""Which plugins to load, found before any command is known: plugins bring commands, so the parser
comes second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from toolkit_lm.config import PluginsConfig, options_of
from toolkit_lm_commands.config_file import flag_value, merge_options, read_file


def plugins_config(arguments: Sequence[str], environ: Mapping[str, str]) -> PluginsConfig:
    """The plugins section of what flags, environment and config file say. Raises ConfigError."""
    options = options_of(PluginsConfig)
    file = next(reversed(list(_values(arguments, "--config"))), None)
    flags = {
        o.name: flag_value(o, values)
        for o in options
        if (values := list(_values(arguments, o.flag)))
    }
    variables = {o.env: environ[o.env] for o in options if o.env in environ}
    foreign = tuple(read_file(file)) if file is not None else ()
    return PluginsConfig(
        **merge_options(options, flags, environ=variables, file=file, foreign=foreign)
    )


def _values(arguments: Sequence[str], flag: str) -> Iterator[str]:
    words = iter(arguments)
    for word in words:
        if word == "--":
            return
        if word == flag:
            if (value := next(words, None)) is not None:
                yield value
        elif word.startswith(flag + "="):
            yield word[len(flag) + 1 :]
