"""The command `toolkit run-batch`."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Annotated, Any, Protocol

import typer
from msgspec import Struct
from toolkit_lm.config import VllmConfig, option, parse_memory
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands import engine_command

from toolkit_lm_server.batch.rows import Answered, read_rows
from toolkit_lm_server.batch.run import Counts, run_rows

_STANDARD = "-"


class BatchOptions(Struct, frozen=True, kw_only=True):
    """The target that answers a batch's rows, and how many it is asked at a time."""

    url: Annotated[
        str | None,
        option(
            "Server that answers, such as http://127.0.0.1:8000.", none="an engine in this process"
        ),
    ] = None
    api_key: Annotated[str | None, option("Key of the server.")] = None
    concurrency: Annotated[
        int | None,
        option(
            "Rows under way at a time.",
            ge=1,
            le=65536,
            none="64 with a server, else twice max_num_seqs",
        ),
    ] = None
    request_timeout: Annotated[float, option("Seconds that a server may take for a row.", gt=0)] = (
        3600.0
    )
    max_body_size: Annotated[str, option("Maximum size of a row ('16MiB').")] = "16MiB"

    def __post_init__(self) -> None:
        if not isinstance(parse_memory(self.max_body_size), int):
            raise ConfigError(
                "max_body_size must be a number of bytes, such as '16MiB', not "
                f"{self.max_body_size!r}."
            )


class Watch(Protocol):
    def __call__(self, counts: Counts) -> object: ...


@engine_command(BatchOptions)
def run_batch(
    ctx: typer.Context,
    config: VllmConfig,
    options: BatchOptions,
    plugins: Plugins,
    input: Annotated[
        str,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="Requests: a .jsonl file in OpenAI's batch format. -: stdin.",
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Answers: a row each, as they come. -: stdout."
        ),
    ],
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Go on with an output: rows that it holds are not asked again."
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an output that holds rows.")
    ] = False,
) -> None:
    """Answer a file of requests, here or by a server (--url).

    A row has a custom_id, the method POST, the url of a route such as /v1/chat/completions, and a
    body. Rows of the output are in the order in which they were answered: custom_id tells which is
    which. A row that is refused has its "error". The exit code is 1 where a line of the input was
    no request, or the batch broke off: --resume then goes on.
    """
    if options.url is not None and ctx.params.get("model"):
        raise typer.BadParameter("with --url, the rows name the model.", param_hint="'MODEL'")
    if resume and (overwrite or output == _STANDARD):
        raise typer.BadParameter(
            "it goes on with a file, and leaves what is in it.", param_hint="'--resume'"
        )
    with (
        _reading(input) as requests,
        _writing(output, input, resume=resume, overwrite=overwrite) as (answers, answered),
    ):
        begin = time.monotonic()
        with _progress(requests) as watch:
            counts = asyncio.run(_run(config, options, plugins, requests, answers, answered, watch))
    _tell(counts, time.monotonic() - begin, output)
    if counts.unreadable:
        raise typer.Exit(1)


async def _run(
    config: VllmConfig,
    options: BatchOptions,
    plugins: Plugins,
    requests: IO[bytes],
    answers: IO[bytes],
    answered: Answered,
    watch: Watch,
) -> Counts:
    from toolkit_lm_server.batch import target

    rows = read_rows(requests, int(parse_memory(options.max_body_size)))
    if options.url is not None:
        concurrency = options.concurrency or 64
        answering = target.server(
            options.url, options.api_key, concurrency, options.request_timeout
        )
    else:
        concurrency = options.concurrency or 2 * config.scheduler.max_num_seqs
        answering = target.engine(config, plugins, options.max_body_size)
    async with answering as asked:
        return await run_rows(
            rows, asked, answers, concurrency=concurrency, answered=answered, on_row=watch
        )


@contextmanager
def _reading(name: str) -> Iterator[IO[bytes]]:
    _check_local(name, "input")
    if name == _STANDARD:
        yield _standard_input()
        return
    with _open(Path(name), "rb", "input") as file:
        yield file


@contextmanager
def _writing(
    name: str, requests: str, *, resume: bool, overwrite: bool
) -> Iterator[tuple[IO[bytes], Answered]]:
    """The output, and the rows that it holds already."""
    _check_local(name, "output")
    if name == _STANDARD:
        yield sys.stdout.buffer, Answered()
        return
    path = Path(name)
    if path.exists() and requests != _STANDARD and path.samefile(requests):
        raise ConfigError(
            f"option 'output': {name!r} is the file of requests, which would be overwritten."
        )
    if not (resume or overwrite) and path.is_file() and path.stat().st_size:
        raise ConfigError(
            f"option 'output': {name!r} is there already: --resume goes on with it, --overwrite "
            "replaces it."
        )
    with _open(path, "r+b" if resume and path.exists() else "wb", "output") as file:
        yield file, Answered.of(file, name) if resume else Answered()


def _standard_input() -> IO[bytes]:
    """A reader of standard input that is not sys.stdin. When the process ends, sys.stdin is closed,
    and a thread may still wait in it."""
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:
        return sys.stdin.buffer


def _open(path: Path, mode: str, kind: str) -> IO[Any]:
    try:
        return path.open(mode)
    except OSError as error:
        raise ConfigError(
            f"option {kind!r}: {str(path)!r} cannot be opened: {error.strerror}"
        ) from error


def _check_local(name: str, kind: str) -> None:
    if "://" in name:
        raise ConfigError(
            f"option {kind!r}: {name!r} is an address. It must be a file here: download or "
            "upload it yourself."
        )


@contextmanager
def _progress(requests: IO[bytes]) -> Iterator[Watch]:
    """A progress bar for people. It goes by bytes of the input, so that the input is read once."""
    if not sys.stderr.isatty():
        with nullcontext():
            yield lambda counts: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    total = os.fstat(requests.fileno()).st_size or None
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=Console(stderr=True, markup=False, emoji=False), transient=True
    ) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda counts: bar.update(task, completed=counts.bytes, description=_words(counts))


def _words(counts: Counts) -> str:
    parts = {
        "rows": counts.done,
        "refused": counts.refused,
        "unreadable": counts.unreadable,
        "skipped": counts.skipped,
    }
    return ", ".join(
        f"{count:,} {name}" for name, count in parts.items() if count or name == "rows"
    )


def _tell(counts: Counts, seconds: float, output: str) -> None:
    where = "" if output == _STANDARD else f" in {output}"
    typer.echo(f"{_words(counts)}{where} after {seconds:.1f} s", err=True)
    if counts.ignored:
        typer.echo(f"ignored fields of requests: {', '.join(counts.ignored)}", err=True)
