"""`toolkit generate`: a file of prompts, offline, as one batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer
from msgspec import structs
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.outputs import CompletionOutput, RequestOutput
from toolkit_lm.plugin import Plugins
from toolkit_lm.prompts import ExplicitEncoderDecoderPrompt, parse_prompt
from toolkit_lm_commands.options import engine_command

from toolkit_lm_cli.sampling import SamplingFlags

if TYPE_CHECKING:
    from toolkit_lm.frontend import LLMEngine

BOTH_SIDES = ("encoder_prompt", "decoder_prompt")
"""Keys of a prompt for an encoder-decoder model. Each value is a text or token ids."""
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages", *BOTH_SIDES)


@engine_command()
def generate(
    config: VllmConfig,
    plugins: Plugins,
    flags: SamplingFlags,
    prompts: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="Prompts: .txt with one per line, or .jsonl with an object per line. Blank "
            "lines are left out.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Outputs: a .jsonl file, in the order of the prompts."),
    ],
) -> None:
    """Complete a file of prompts, offline, as one batch.

    A line of a .jsonl file holds "prompt", "prompt_token_ids" or "messages", or for an
    encoder-decoder model "encoder_prompt" and "decoder_prompt", and may hold sampling parameters of
    its own. If a prompt cannot be served, its line of the output has an "error". The other prompts
    go on. The exit code is then 1.
    """
    lines = _read(prompts)
    if out.exists() and out.samefile(prompts):
        raise ConfigError(
            f"option 'out': {str(out)!r} is the file of prompts, which would be overwritten."
        )
    from toolkit_lm.frontend import LLMEngine

    with _open(out) as file:
        engine = LLMEngine(config, plugins=plugins)
        try:
            failed = _run(engine, lines, flags, _Writer(file))
        finally:
            engine.close()
    if failed:
        typer.echo(
            f'error: {failed} of {len(lines)} prompts failed: see their "error" in {str(out)!r}',
            err=True,
        )
        raise typer.Exit(1)


class _Writer:
    """Writes rows in order, each as soon as those before it are there."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._waiting: dict[int, dict[str, Any]] = {}
        self._next = 0

    def put(self, index: int, row: dict[str, Any]) -> None:
        self._waiting[index] = row
        while self._next in self._waiting:
            self._file.write(json.dumps(self._waiting.pop(self._next), ensure_ascii=False) + "\n")
            self._next += 1
        self._file.flush()


def _run(
    engine: LLMEngine, lines: list[str | dict[str, Any]], flags: SamplingFlags, writer: _Writer
) -> int:
    failed = 0
    columns = (
        TextColumn("prompts", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}", markup=False),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(lines), speed="")
        num_tokens = 0
        for index, row in _rows(engine, lines, flags):
            writer.put(index, row)
            failed += row["error"] is not None
            num_tokens += sum(output["num_tokens"] for output in row["outputs"])
            elapsed = progress.tasks[0].elapsed or 0
            progress.update(
                task, advance=1, speed=f"{num_tokens / elapsed:.0f} tokens/s" if elapsed else ""
            )
    return failed


def _rows(
    engine: LLMEngine, lines: list[str | dict[str, Any]], flags: SamplingFlags
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each line's index and output row, as they are finished."""
    for index, line in enumerate(lines):
        try:
            _add(engine, str(index), line, flags)
        except RequestError as error:
            yield index, {"prompt": _prompt_of(line), "outputs": [], "error": str(error)}
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if output.finished:
                index = int(output.request_id)
                yield index, _row(lines[index], output)


def _add(
    engine: LLMEngine, request_id: str, line: str | dict[str, Any], flags: SamplingFlags
) -> None:
    parsed = _parse(line) if isinstance(line, str) else line
    keys = [key for key in PROMPT_KEYS if key in parsed]
    is_both = not set(keys).isdisjoint(BOTH_SIDES)
    if (
        not keys
        or ("messages" in keys and len(keys) > 1)
        or (is_both and not set(keys) <= set(BOTH_SIDES))
    ):
        raise RequestError(
            f"a line needs one of {', '.join(PROMPT_KEYS)}; this one has "
            f"{', '.join(keys) or 'none'}.",
            "prompt",
        )
    own = {key: value for key, value in parsed.items() if key not in PROMPT_KEYS}
    params = flags.params(own, **engine.config.sampling_defaults)
    if "messages" in parsed:
        engine.submit(engine.processor.prepare_chat(request_id, parsed["messages"], params))
    elif is_both:
        engine.add_request(
            request_id,
            cast("ExplicitEncoderDecoderPrompt", {key: _side(parsed[key]) for key in keys}),
            params,
        )
    else:
        engine.add_request(request_id, parse_prompt({key: parsed[key] for key in keys}), params)


def _side(prompt: Any) -> Any:
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def _parse(line: str) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except ValueError as error:
        raise RequestError(f"the line is not JSON: {error}", "prompt") from None
    if not isinstance(parsed, dict):
        raise RequestError(f"a line must be an object, not a {type(parsed).__name__}.", "prompt")
    return parsed


def _row(line: str | dict[str, Any], output: RequestOutput) -> dict[str, Any]:
    outputs = [_output(completion) for completion in output.outputs]
    return {
        "prompt": _prompt_of(line),
        "num_prompt_tokens": output.num_prompt_tokens,
        "outputs": outputs,
        "error": output.error,
    }


def _output(completion: CompletionOutput) -> dict[str, Any]:
    row = {
        "text": completion.text,
        "num_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        row["token_ids"] = completion.token_ids
        row["logprobs"] = [
            {token: structs.asdict(entry) for token, entry in entries.items()}
            for entries in completion.logprobs
        ]
    return row


def _prompt_of(line: str | dict[str, Any]) -> Any:
    try:
        parsed = _parse(line) if isinstance(line, str) else line
    except RequestError:
        return line
    return next((parsed[key] for key in PROMPT_KEYS if key in parsed), line)


def _read(path: Path) -> list[str | dict[str, Any]]:
    """The prompts of a file: objects for a .txt file, still unparsed lines for a .jsonl file.
    Raises ConfigError."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"option 'prompts': {str(path)!r} must end in .txt or .jsonl.")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"option 'prompts': {str(path)!r} cannot be read: {error}") from error
    return [{"prompt": line} for line in lines] if path.suffix == ".txt" else list(lines)


def _open(path: Path) -> IO[str]:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"option 'out': {str(path)!r} cannot be written: {error}") from error
