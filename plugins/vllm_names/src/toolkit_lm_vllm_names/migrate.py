"""`toolkit migrate-vllm`: the line of ours that does what a `vllm serve` line does."""

from __future__ import annotations

import shlex
from typing import Annotated, Any, NamedTuple

import typer
from toolkit_lm.errors import ConfigError, nearest

from toolkit_lm_vllm_names.flags import flags_of, read_flag
from toolkit_lm_vllm_names.table import COMPILATION, TABLE, compilation_options, lowers_level

_MODULE = "vllm.entrypoints.openai.api_server"


class Migration(NamedTuple):
    """A line of ours, and what it leaves out."""

    line: str
    left_out: list[str]
    """Flags that ask for unavailable features, each with a replacement."""
    needless: list[str]
    """Flags that change nothing here, each with the reason."""


def migrate(line: str) -> Migration:
    """Translates "vllm serve MODEL --flags", or a line of python -m that runs its server. Raises
    ConfigError for another line."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise ConfigError(f"the line cannot be read: {error}.") from None
    words = _after_command(words)
    options: dict[str, Any] = {}
    about_compilation: list[tuple[str, Any]] = []
    needless: list[tuple[str, str]] = []
    left_out = []
    models = []
    kept = []
    while words:
        word = words[0]
        flag = read_flag(words)
        if flag is None:
            del words[0]
            if not word.startswith("-"):
                models.append(word)
            elif word.partition("=")[0] == "--config":
                kept = [word] if "=" in word else [word, *words[:1]]
                del words[: len(kept) - 1]
            else:
                left_out.append(
                    f"{word}: vLLM has no such flag. "
                    f"{nearest(word, [row.flag for row in TABLE.values()])}"
                )
            continue
        del words[: len(flag.words)]
        written = shlex.join(flag.words)
        try:
            made = flag.row.translate(flag.value)
        except ConfigError as error:
            left_out.append(f"{written}: {error}")
            continue
        if flag.row.kind == "free":
            needless.append((flag.row.name, f"{written}: {flag.row.note}"))
        elif ignored := flag.row.without_effect(flag.value):
            needless += [(flag.row.name, f"{written}: {reason}") for reason in ignored]
        elif not made:
            needless.append((flag.row.name, f"{written}: it is the default"))
        if flag.row.name in COMPILATION:
            about_compilation.append((flag.row.name, flag.value))
        else:
            options |= made
    options |= compilation_options(about_compilation)
    if lowers_level(about_compilation):
        needless = [(name, reason) for name, reason in needless if name != "enforce_eager"]
    model = options.pop("model", None) or (models.pop(0) if models else None)
    left_out += [f"{word}: there is one model already." for word in models]
    written = shlex.join(
        ["toolkit", "serve", *([model] if model else []), *kept, *flags_of(options)]
    )
    return Migration(written, left_out, [reason for _, reason in needless])


def migrate_vllm(
    line: Annotated[
        list[str],
        typer.Argument(metavar="LINE", help='"vllm serve MODEL --flags", in quotes or after --.'),
    ],
) -> None:
    """Print the `toolkit serve` line that does the same as a `vllm serve` line, and list the flags
    without an equivalent."""
    found = migrate(line[0] if len(line) == 1 else shlex.join(line))
    typer.echo(found.line)
    for title, rows in (
        ("Without an equivalent:", found.left_out),
        ("Not needed:", found.needless),
    ):
        if rows:
            typer.echo(f"\n{title}")
        for row in rows:
            typer.echo(f"  {row}")


def _after_command(words: list[str]) -> list[str]:
    while words and "=" in words[0] and not words[0].startswith("-"):
        # Variables that are set before the command.
        words = words[1:]
    if words[:2] == ["vllm", "serve"]:
        return words[2:]
    if words[1:3] == ["-m", _MODULE]:
        return words[3:]
    raise ConfigError(f'give a line "vllm serve MODEL --flags", not {" ".join(words[:2])!r}.')
