"""`toolkit transcribe`: recordings to text, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_commands.options import engine_command
from toolkit_lm_whisper.features import LogMel
from toolkit_lm_whisper.recordings import read_recording

if TYPE_CHECKING:
    from toolkit_lm import LLM
    from toolkit_lm_whisper.transcriber import Transcriber

    from toolkit_lm_transcription.whole import WholeTranscriber

_FORMATS = ("txt", "srt", "vtt", "json")


@engine_command()
def transcribe(
    config: VllmConfig,
    plugins: Plugins,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Recordings: WAV, FLAC, Ogg, MP3, AAC, M4A, MP4, WEBM."
        ),
    ],
    format: Annotated[
        str, typer.Option(metavar="|".join(_FORMATS), help="Format of the transcripts.")
    ] = "txt",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of the transcripts. Default: they are printed."
        ),
    ] = None,
    language: Annotated[
        str | None,
        typer.Option(
            metavar="CODE", help="Language that is spoken, such as en. Default: detected."
        ),
    ] = None,
    task: Annotated[
        str, typer.Option(metavar="transcribe|translate", help="Task. translate: to English.")
    ] = "transcribe",
) -> None:
    """Transcribe recordings with a model that hears, offline.

    A file that cannot be read is reported on stderr; the others go on, and the exit code is then
    1."""
    if format not in _FORMATS:
        raise ConfigError(f"option 'format': {format!r} must be one of {', '.join(_FORMATS)}.")
    if out is not None:
        _check_names(files)
    recordings = {}
    failed = 0
    for path in files:
        try:
            recordings[path] = (read_recording(path, LogMel.sampling_rate), LogMel.sampling_rate)
        except RequestError as error:
            failed += 1
            typer.echo(f"error: {error}", err=True)
    if recordings:
        texts = _transcripts(config, plugins, list(recordings.values()), format, language, task)
        for path, text in zip(recordings, texts, strict=True):
            if out is None:
                typer.echo(text, nl=False)
            else:
                out.mkdir(parents=True, exist_ok=True)
                (out / f"{path.stem}.{format}").write_text(text, encoding="utf-8")
    if failed:
        raise typer.Exit(1)


def _check_names(files: list[Path]) -> None:
    """Raises ConfigError where two transcripts would be one file."""
    named: dict[str, Path] = {}
    for path in files:
        if (other := named.setdefault(path.stem, path)) is not path:
            raise ConfigError(
                f"option 'out': {str(other)!r} and {str(path)!r} would have transcripts of one "
                "name. Give one of them alone."
            )


def _transcripts(
    config: VllmConfig,
    plugins: Plugins,
    files: list[Any],
    format: str,
    language: str | None,
    task: str,
) -> list[str]:
    from toolkit_lm import LLM
    from toolkit_lm_whisper.formats import FORMATS

    console = Console(stderr=True, markup=False, emoji=False)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} s", markup=False),
        TimeRemainingColumn(),
    )
    with (
        LLM(config=config, plugins=plugins) as llm,
        Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        ) as bars,
    ):
        rows = [
            bars.add_task(f"recording {i}", total=len(samples) / rate)
            for i, (samples, rate) in enumerate(files, 1)
        ]
        transcriber = _transcriber(llm)
        found = transcriber.transcribe(
            files,
            language=language,
            task=task,
            progress=lambda i, done: bars.update(rows[i], completed=done),
        )
    return [FORMATS[format](transcription) for transcription in found]


def _transcriber(llm: LLM) -> Transcriber | WholeTranscriber:
    """Raises ToolkitError for a model that does not hear, ConfigError for one of another rate."""
    from toolkit_lm_whisper.transcriber import Transcriber

    from toolkit_lm_transcription.whole import WholeTranscriber, rules_that_hear

    if rules_that_hear(llm.config, llm.engine.plugins) is None:
        return Transcriber(llm)
    made = WholeTranscriber(llm)
    if made.sampling_rate != LogMel.sampling_rate:
        raise ConfigError(
            f"{llm.config.model.model!r} hears {made.sampling_rate} samples a second, and this "
            f"command reads {LogMel.sampling_rate}: use the HTTP API, which resamples."
        )
    return made
