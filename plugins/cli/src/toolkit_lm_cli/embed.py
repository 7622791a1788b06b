"""`toolkit embed`: a file of texts to a file of vectors, offline."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated, NamedTuple, cast

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from toolkit_lm.config import PoolingTask, VllmConfig
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.outputs import PoolingRequestOutput
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_commands.options import engine_command

from toolkit_lm_cli.vectors import VectorFile, check_path, vector_file

if TYPE_CHECKING:
    from toolkit_lm.frontend import LLMEngine

_TASKS = ("embed", "classify", "score")
_CHUNK = 256
"""Lines that are tokenized together."""
_TOLD = 20
"""Bad lines that are reported one by one."""


class Line(NamedTuple):
    """A line of the input."""

    number: int
    """From 0."""
    text: str
    error: RequestError | None = None
    """Why it holds no text."""


class How(NamedTuple):
    """Parameters that apply to every text."""

    params: PoolingParams
    prompt_name: str | None
    truncate_prompt_tokens: int | None


_Source = Annotated[
    Path,
    typer.Option(
        "--in",
        metavar="FILE",
        help="Texts: .txt, or - for standard input, with one per line; .jsonl with an object per "
        "line.",
    ),
]
_Out = Annotated[
    Path,
    typer.Option(
        metavar="FILE", help="Vectors: a .npy or .parquet file, in the order of the lines."
    ),
]
_Field = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Key of the text in a .jsonl file's objects. Default: text."),
]
_Task = Annotated[
    str, typer.Option(metavar="|".join(_TASKS), help="Task: what is computed from each text.")
]
_PromptName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Name of a prompt of the checkpoint, which is put before each text."
    ),
]
_Truncate = Annotated[
    int | None,
    typer.Option(
        metavar="INTEGER",
        help="Maximum number of tokens of a text; the rest is cut. -1: what the model takes. "
        "Default: a longer text is an error.",
    ),
]
_Dimensions = Annotated[
    int | None,
    typer.Option(
        metavar="INTEGER", help="Number of an embedding's first dimensions to keep. Default: all."
    ),
]


@engine_command()
def embed(
    config: VllmConfig,
    plugins: Plugins,
    source: _Source,
    out: _Out,
    field: _Field = None,
    task: _Task = "embed",
    prompt_name: _PromptName = None,
    truncate_prompt_tokens: _Truncate = None,
    dimensions: _Dimensions = None,
) -> None:
    """Embed a file of texts, offline.

    Each line has one row in the output. If a line cannot be embedded, its row is NaN (.npy), or
    null with an error (.parquet), and its number and error go to stderr. The other lines go on. The
    exit code is then 1.

    The options from "Model" on may also come from TOOLKIT_LM_... variables or from --config's file.
    Those before may not.
    """
    if task not in _TASKS:
        raise ConfigError(
            f"option 'task': {task!r} must be one of {', '.join(_TASKS)}, which give one row for "
            "each text."
        )
    check_path(out)
    if field is not None and source.suffix != ".jsonl":
        raise ConfigError(f"option 'field' is for .jsonl files, and 'in' is {str(source)!r}.")
    params = PoolingParams(task=cast("PoolingTask", task), dimensions=dimensions)
    how = How(params, prompt_name, truncate_prompt_tokens)
    from toolkit_lm.frontend import LLMEngine

    with _readable(source) as path:
        num_lines = _count_lines(path)
        if num_lines == 0:
            raise ConfigError(f"option 'in': {str(source)!r} is empty.")
        with vector_file(out, num_lines) as file:
            engine = LLMEngine(config, plugins=plugins)
            try:
                failed = _run(engine, _lines(path, field or "text"), num_lines, how, file)
            finally:
                engine.close()
    if failed:
        typer.echo(f"error: {failed} of {num_lines} lines could not be embedded.", err=True)
        raise typer.Exit(1)


def _run(
    engine: LLMEngine, lines: Iterator[Line], num_lines: int, how: How, file: VectorFile
) -> int:
    failed = 0
    console = Console(stderr=True, markup=False, emoji=False)
    columns = (
        TextColumn("texts", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}", markup=False),
    )
    progress = Progress(*columns, console=console)
    bar = progress.add_task("", total=num_lines, speed="")
    results = _results(engine, lines, how)
    # A fault in all lines is raised here, before anything is shown.
    first = next(results)
    with progress:
        for done, (line, output) in enumerate(chain([first], results), 1):
            error = str(output) if isinstance(output, RequestError) else output.error
            file.put(
                line.number,
                line.text,
                None if isinstance(output, RequestError) else output.outputs.data,
                error,
            )
            failed += error is not None
            if error is not None and failed <= _TOLD:
                console.print(f"line {line.number + 1}: {error}", highlight=False, soft_wrap=True)
            elapsed = progress.tasks[0].elapsed or 0
            progress.update(
                bar, advance=1, speed=f"{done / elapsed:.0f} texts/s" if elapsed else ""
            )
    return failed


def _results(
    engine: LLMEngine, lines: Iterator[Line], how: How
) -> Iterator[tuple[Line, PoolingRequestOutput | RequestError]]:
    """Each line with its result, as they are finished. So many lines are in the engine that its
    steps are full."""
    waiting: dict[str, Line] = {}
    enough = max(_CHUNK, 2 * engine.config.scheduler.max_num_seqs)
    more = True
    while more or waiting:
        while more and len(waiting) < enough:
            chunk = list(islice(lines, _CHUNK))
            more = len(chunk) == _CHUNK
            yield from _submit(engine, chunk, how, waiting)
        for output in engine.step():
            assert isinstance(output, PoolingRequestOutput)
            yield waiting.pop(output.request_id), output


def _submit(
    engine: LLMEngine, chunk: list[Line], how: How, waiting: dict[str, Line]
) -> Iterator[tuple[Line, RequestError]]:
    """Gives the lines to the engine, and back those that it cannot take. Raises RequestError for
    what is wrong with all of them."""
    good = [line for line in chunk if line.error is None]
    prepared = engine.processor.pooling.prepare_batch(
        [str(line.number) for line in good],
        [line.text for line in good],
        [how.params] * len(good),
        prompt_name=how.prompt_name,
        truncate_prompt_tokens=how.truncate_prompt_tokens,
    )
    ready = []
    for line, entry in zip(good, prepared, strict=True):
        if isinstance(entry, RequestError):
            yield line, entry
        else:
            ready.append(entry)
            waiting[str(line.number)] = line
    yield from ((line, line.error) for line in chunk if line.error is not None)
    if ready:
        # Sequences of equal length that meet in a step are computed together.
        engine.submit_batch(sorted(ready, key=lambda entry: len(entry.message.prompt_token_ids)))


@contextmanager
def _readable(source: Path) -> Iterator[Path]:
    """A file of the lines: of standard input (-) a copy, because lines are counted before they are
    read."""
    if str(source) != "-":
        yield source
        return
    with NamedTemporaryFile(suffix=".txt") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield Path(copy.name)


def _count_lines(path: Path) -> int:
    """Raises ConfigError for a file that cannot be read, or is of another kind."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(
            f"option 'in': {str(path)!r} must end in .txt or .jsonl, or be - for standard input."
        )
    try:
        with path.open("rb") as file:
            return sum(1 for _ in file)
    except OSError as error:
        raise ConfigError(f"option 'in': {str(path)!r} cannot be read: {error}") from error


def _lines(path: Path, field: str) -> Iterator[Line]:
    with path.open("rb") as file:
        for index, raw in enumerate(file):
            try:
                text = raw.decode().rstrip("\r\n")
                yield Line(index, _field(text, field) if path.suffix == ".jsonl" else text)
            except RequestError as error:
                yield Line(index, text, error)
            except UnicodeDecodeError as error:
                yield Line(
                    index,
                    "",
                    RequestError(
                        f"it is not UTF-8: {error.reason} at byte {error.start}.", "input"
                    ),
                )


def _field(line: str, name: str) -> str:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"it is not JSON: {error}", "input") from None
    if not isinstance(found, dict) or name not in found:
        raise RequestError(f"it is not an object with a field {name!r}.", "input")
    if not isinstance(found[name], str):
        raise RequestError(f"{name!r} must be a text, not a {type(found[name]).__name__}.", "input")
    try:
        found[name].encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name!r} is not a valid text: lone surrogate at position {error.start}.", "input"
        ) from None
    return str(found[name])
