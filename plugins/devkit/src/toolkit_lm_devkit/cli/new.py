"""`toolkit plugins new`: writes a distribution that installs, and passes its own tests."""

from __future__ import annotations

import re
from enum import StrEnum
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Annotated, NamedTuple

import typer
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import API_VERSION, CORE_DISTRIBUTION

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_SUFFIX = ".in"


class Kind(StrEnum):
    """Kind of a new plugin. The value is also the folder name of its templates."""

    MODEL = "model"
    ATTENTION_BACKEND = "attention-backend"
    KV_KIND = "kv-kind"
    DRAFTER = "drafter"
    EXECUTOR = "executor"
    RENDERER = "renderer"
    QUANTIZATION = "quantization"
    KERNELS = "kernels"
    CHECKPOINT_LOADER = "checkpoint-loader"
    LOGITS_PROCESSOR = "logits-processor"
    SCHEDULING_POLICY = "scheduling-policy"
    COMMAND = "command"


class _About(NamedTuple):
    summary: str
    test_requires: tuple[str, ...] = ("toolkit-lm-devkit",)
    requires: tuple[str, ...] = (CORE_DISTRIBUTION,)


_RUNS_LLAMA = (
    "toolkit-lm-devkit",
    "toolkit-lm-decoder",
    "toolkit-lm-sdpa",
    "toolkit-lm-renderer-hf",
)
"""Packages that the kit needs to run its small Llama."""

_ABOUT = {
    Kind.MODEL: _About(
        "A model",
        (
            "toolkit-lm-devkit",
            "toolkit-lm-sdpa",
            "toolkit-lm-renderer-hf",
            "toolkit-lm-pooling-adapters",
        ),
        requires=(CORE_DISTRIBUTION, "toolkit-lm-rotary"),
    ),
    Kind.ATTENTION_BACKEND: _About(
        "An attention backend", requires=(CORE_DISTRIBUTION, "toolkit-lm-paged-attention")
    ),
    Kind.KV_KIND: _About("A kind of KV cache specs"),
    Kind.DRAFTER: _About("A drafter", _RUNS_LLAMA),
    Kind.EXECUTOR: _About("An executor", _RUNS_LLAMA),
    Kind.RENDERER: _About("A renderer"),
    Kind.QUANTIZATION: _About("A quantization"),
    Kind.KERNELS: _About("Kernels of layers"),
    Kind.CHECKPOINT_LOADER: _About("A checkpoint loader"),
    Kind.LOGITS_PROCESSOR: _About("A logits processor"),
    Kind.SCHEDULING_POLICY: _About("A scheduling policy"),
    Kind.COMMAND: _About(
        "A command of toolkit",
        requires=(CORE_DISTRIBUTION, "toolkit-lm-cli", "toolkit-lm-commands"),
    ),
}


def new_plugin(
    kind: Annotated[
        Kind, typer.Argument(metavar="KIND", help=f"Kind of plugin: {', '.join(Kind)}.")
    ],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the plugin, such as 'my-model'.")
    ],
    directory: Annotated[
        Path,
        typer.Option(
            "--dir", metavar="FOLDER", help="Folder in which the plugin's folder is made."
        ),
    ] = Path(),
) -> None:
    """Write a new plugin: a distribution with one class or command, a README, and tests that it
    passes."""
    home = write_plugin(kind, name, directory)
    for path in sorted(path for path in home.rglob("*") if path.is_file()):
        typer.echo(str(path))
    typer.echo(f'\nNow: cd {home} && pip install -e ".[test]" && pytest')


def write_plugin(kind: Kind, name: str, directory: Path) -> Path:
    """Makes the folder toolkit-lm-NAME in `directory`, and returns it. Raises ConfigError for a bad
    name, or when it is there already."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is not a name for a plugin: it must be lower-case letters and digits, "
            "with '-' between words."
        )
    home = directory / f"toolkit-lm-{name}"
    if home.exists():
        raise ConfigError(
            f"{str(home)!r} exists already. Choose another name, or another folder with --dir."
        )
    values = _values(kind, name)
    templates = files("toolkit_lm_devkit.cli") / "templates"
    for source in (templates / "common", templates / kind):
        _write(source, home, values)
    return home


def _values(kind: Kind, name: str) -> dict[str, str]:
    package = f"toolkit_lm_{name.replace('-', '_')}"
    major, minor = API_VERSION.split(".")
    return {
        "name": name,
        "identifier": name.replace("-", "_"),
        "distribution": f"toolkit-lm-{name}",
        "package": package,
        "Class": "".join(word.capitalize() for word in name.split("-")),
        "summary": _ABOUT[kind].summary,
        "test_requires": ", ".join(
            f'"{requirement}"' for requirement in _ABOUT[kind].test_requires
        ),
        "requires": ", ".join(
            f'"{requirement}>={API_VERSION},<{major}.{int(minor) + 1}"'
            for requirement in _ABOUT[kind].requires
        ),
    }


def _write(source: Traversable, target: Path, values: dict[str, str]) -> None:
    for template in source.iterdir():
        if template.is_dir():
            inside = (
                target / "src" / values["package"]
                if template.name == "package"
                else target / template.name
            )
            _write(template, inside, values)
        elif template.name.endswith(_SUFFIX):
            target.mkdir(parents=True, exist_ok=True)
            text = Template(template.read_text(encoding="utf-8")).substitute(values)
            # Two plugins' tests may be run together, and test modules have no package.
            file = template.name.removesuffix(_SUFFIX).replace(
                "test_", f"test_{values['name'].replace('-', '_')}_", 1
            )
            (target / file).write_text(text, encoding="utf-8")
