"""POST /v1/audio/transcriptions and /v1/audio/translations, as OpenAI has them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Form, Request, Response, UploadFile
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from toolkit_lm.errors import ToolkitError
from toolkit_lm_media.audio import BYTES_PER_SAMPLE, open_audio
from toolkit_lm_server.answers import answer
from toolkit_lm_server.errors import ApiError, described, printable
from toolkit_lm_server.event_stream import EventStream
from toolkit_lm_server.request_fields import SPEECH
from toolkit_lm_server.route import request_context
from toolkit_lm_server.unknown_fields import kept_fields
from toolkit_lm_whisper.formats import FORMATS, usage, verbose
from toolkit_lm_whisper.long_form import Recording, Segment, Thresholds
from toolkit_lm_whisper.recordings import LIMITS
from toolkit_lm_whisper.transcriber import AsyncTranscriber

from toolkit_lm_transcription.whole import AsyncWholeTranscriber, WholeRecording, rules_that_hear

if TYPE_CHECKING:
    from toolkit_lm.processing import RequestOptions
    from toolkit_lm_server.engines import Engines
    from toolkit_lm_serving.engine import ServingEngine

_TEXTS = {"text": "txt", "srt": "srt", "vtt": "vtt"}
_GRANULARITIES = "timestamp_granularities[]"


class TranslationForm(BaseModel):
    """POST /v1/audio/translations."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    file: UploadFile
    """WAV, FLAC, Ogg, MP3, AAC, M4A, MP4 or WEBM."""
    model: str | None = None
    """None: the model that is served."""
    prompt: Annotated[str, Field(max_length=10_000)] = ""
    """Text before the recording, or names to be spelled that way."""
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0: a window that repeats itself, or of which the model is unsure, is drawn again at higher
    ones."""
    stream: bool = False
    """Events `transcript.text.delta`, window by window, then `transcript.text.done`."""

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        known = [field.alias or name for name, field in cls.model_fields.items()]
        return kept_fields(data, known, SPEECH) if isinstance(data, dict) else data


class TranscriptionForm(TranslationForm):
    """POST /v1/audio/transcriptions."""

    language: str | None = None
    """Language code, such as "en". None: it is detected."""
    chunking_strategy: Literal["auto"] | None = None
    """It has no effect: windows follow the timestamps that the model sets."""
    timestamp_granularities: Annotated[
        list[Literal["segment"]], Field(alias=_GRANULARITIES, max_length=1)
    ] = []
    """Granularities of timestamps in verbose_json."""


class Duration(BaseModel):
    type: Literal["duration"]
    seconds: int


class Transcription(BaseModel):
    """Answer in the format `json`; `verbose_json` has more fields."""

    model_config = ConfigDict(extra="allow")

    text: str
    usage: Duration


_SUCCESS: dict[int | str, dict[str, Any]] = {
    200: {"model": Transcription, "content": {"text/plain": {}, "text/event-stream": {}}}
}


class _Work:
    """A recording on its way, and what it costs."""

    def __init__(
        self,
        recording: Recording | WholeRecording,
        segments: AsyncGenerator[list[Segment], None],
        paid: ExitStack,
    ) -> None:
        self.recording = recording
        self.segments = segments
        self._paid = paid

    async def aclose(self) -> None:
        """Aborts what is not finished."""
        try:
            await self.segments.aclose()
        finally:
            self._paid.close()


class Audio:
    """Recordings to text."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._transcribers: dict[ServingEngine, AsyncTranscriber | AsyncWholeTranscriber] = {}

    def _transcriber(self, engine: ServingEngine) -> AsyncTranscriber | AsyncWholeTranscriber:
        """Raises ApiError for a model that does not hear, or a Whisper that sets no timestamps."""
        if engine not in self._transcribers:
            is_whole = rules_that_hear(engine.config, engine.plugins) is not None
            try:
                self._transcribers[engine] = (
                    AsyncWholeTranscriber(engine) if is_whole else AsyncTranscriber(engine)
                )
            except ToolkitError as error:
                raise ApiError(400, str(error), param="model") from error
        return self._transcribers[engine]

    async def transcribe(
        self,
        form: Annotated[TranscriptionForm, Form(media_type="multipart/form-data")],
        request: Request,
    ) -> Response:
        """Transcribes a recording, in the language that is spoken."""
        return await self._answer(form, request, "transcribe", form.language)

    async def translate(
        self,
        form: Annotated[TranslationForm, Form(media_type="multipart/form-data")],
        request: Request,
    ) -> Response:
        """Translates what is said in a recording to English."""
        return await self._answer(form, request, "translate", None)

    async def _answer(
        self, form: TranslationForm, request: Request, task: str, language: str | None
    ) -> Response:
        engine = self._engines[form.model]
        if form.stream and form.response_format not in ("json", "text"):
            raise ApiError(
                400,
                f"stream gives text: response_format {form.response_format!r} cannot be streamed.",
                param="stream",
            )
        work = await self._begin(
            engine, form, task, language, {"context": request_context(request)}
        )
        if form.stream:
            return EventStream(_events(work), work)
        async with aclosing(work):
            async for _ in work.segments:
                pass
        found = work.recording.transcript
        if form.response_format in _TEXTS:
            return PlainTextResponse(FORMATS[_TEXTS[form.response_format]](found))
        if form.response_format == "verbose_json":
            return await answer(lambda: verbose(found, task))
        return await answer(lambda: {"text": found.text, "usage": usage(found)})

    async def _begin(
        self,
        engine: ServingEngine,
        form: TranslationForm,
        task: str,
        language: str | None,
        options: RequestOptions,
    ) -> _Work:
        """Decodes the file, and computes its features. Raises RequestError, QueueFullError."""
        with ExitStack() as paid:
            data = await form.file.read()
            name = printable(repr(form.file.filename or "the file"))
            transcriber = self._transcriber(engine)
            rate = transcriber.sampling_rate
            # A thread may outlive a request that is cancelled: so it holds nothing, and its file is
            # its own.
            seconds = await asyncio.to_thread(_seconds, data, name)
            paid.enter_context(
                engine.hold({"seconds of audio": int(seconds * rate * BYTES_PER_SAMPLE)}, options)
            )
            samples = await asyncio.to_thread(_samples, data, name, rate)
            thresholds = Thresholds(temperatures=(form.temperature,)) if form.temperature else None
            asked: dict[str, Any] = {
                "language": language,
                "task": task,
                "prompt": form.prompt,
                "thresholds": thresholds,
                "tells_no_speech": form.response_format == "verbose_json",
            }
            recording: Any = await transcriber.begin(samples, rate, **asked)
            segments = transcriber.segments(recording, **options)
            return _Work(recording, segments, paid.pop_all())


def _seconds(data: bytes, name: str) -> float:
    with open_audio(data, LIMITS, label=name, param="file") as audio:
        return audio.seconds


def _samples(data: bytes, name: str, sampling_rate: int) -> np.ndarray:
    with open_audio(data, LIMITS, label=name, param="file") as audio:
        return audio.read(sampling_rate)


async def _events(work: _Work) -> AsyncGenerator[list[dict[str, Any]], None]:
    async for found in work.segments:
        yield [{"type": "transcript.text.delta", "delta": segment.text} for segment in found]
    done = work.recording.transcript
    yield [{"type": "transcript.text.done", "text": done.text, "usage": usage(done)}]


def add_routes(router: APIRouter, engine: ServingEngine, engines: Engines) -> None:
    """Adds the routes if the model is a Whisper, or hears recordings whole; they are useless for
    others."""
    is_whisper = engine.config.hf_config.get("model_type") == "whisper"
    if not is_whisper and rules_that_hear(engine.config, engine.plugins) is None:
        return
    audio = Audio(engines)
    for path, handler in (
        ("/v1/audio/transcriptions", audio.transcribe),
        ("/v1/audio/translations", audio.translate),
    ):
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=None,
            responses=_SUCCESS | described(404, 429, 504),
        )
