"""The file of `--config`: options in YAML, below the environment and above the defaults."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from toolkit_lm.config import Option, load_options
from toolkit_lm.errors import ConfigError, nearest


def read_file(path: str | Path) -> dict[str, Any]:
    """Reads a YAML file of options: one mapping, keys with dashes or underscores. Raises
    ConfigError."""
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"config file {str(path)!r} must hold a mapping of option names to values, not a "
            f"{type(data).__name__}."
        )
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def merge_options(
    options: Sequence[Option],
    values: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    file: str | Path | None,
    foreign: Container[str] = (),
    translate: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Loads options like `load_options`; a file's values have lower precedence than the
    environment. `foreign` keys may stand in the file too.

    `translate` maps other projects' names in the file to ours.

    Raises ConfigError, also for an unknown key of the file."""
    known = {o.name: o for o in options}
    stated: dict[str, Any] = {}
    for key, value in (translate(read_file(file)) if file is not None else {}).items():
        if key in known:
            stated[key] = known[key].convert(value, f"config file {str(file)!r}: {key}")
        elif key not in foreign:
            raise ConfigError(
                f"config file {str(file)!r}: unknown option {key!r}. {nearest(key, known)}"
            )
    return stated | load_options(
        options, values, environ=environ, foreign=foreign, named=attrgetter("flag")
    )


def flag_value(option: Option, values: Sequence[str]) -> str | list[str]:
    """Input for `Option.convert` of a flag that is given several times."""
    return list(values) if option.is_mapping else ",".join(values)
