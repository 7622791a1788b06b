"""The file of `--config`: options in YAML, below the environment and above the defaults."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
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
    given: Mapping[str, Any],
    *,
    environ: Mapping[str, str],
    file: str | Path | None,
    foreign: Container[str] = (),
    translate: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """As `load_options`, with the values of a file below those of the environment. `foreign` may
    stand in the file too.

    `translate` makes our names of those of other projects in the file.

    Raises ConfigError, also for an unknown key of the file.
    """
    known = {o.name: o for o in options}
    stated: dict[str, Any] = {}
    for key, value in (translate(read_file(file)) if file is not None else {}).items():
        if key in known:
            stated[key] = known[key].convert(value, f"config file {str(file)!r}")
        elif key not in foreign:
            raise ConfigError(
                f"config file {str(file)!r}: unknown option {key!r}. {nearest(key, known)}"
            )
    return stated | load_options(options, given, environ=environ, foreign=foreign)


def flag_value(option: Option, values: Sequence[str]) -> str | list[str]:
    """What `Option.convert` takes for a flag that is given several times."""
    return list(values) if option.is_mapping else ",".join(values)
