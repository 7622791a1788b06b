"""Transcriber and AsyncTranscriber: recordings to transcripts, with an engine of either kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from toolkit_lm import LLM

from toolkit_lm_whisper.long_form import (
    Ask,
    LongForm,
    Recording,
    Segment,
    Steps,
    Thresholds,
    Transcript,
)

if TYPE_CHECKING:
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.outputs import RequestOutput
    from toolkit_lm.params import SamplingParams
    from toolkit_lm.processing import RequestOptions
    from toolkit_lm.prompts import Prompt
    from toolkit_lm.renderer import Renderer


class Transcriber:
    """Several recordings are transcribed side by side, the windows of each one after the other."""

    def __init__(
        self, llm: LLM, thresholds: Thresholds | None = None, *, uses_context: bool = True
    ) -> None:
        """`uses_context`: the text before each window is given to the model as context. Raises
        ToolkitError if the model is not a Whisper."""
        self._llm = llm
        self._model = LongForm(llm.config, llm.engine.renderer)
        self._options: dict[str, Any] = {"thresholds": thresholds, "uses_context": uses_context}

    def transcribe(
        self,
        recordings: Sequence[tuple[Any, int]],
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str = "",
        progress: Callable[[int, float], None] | None = None,
    ) -> list[Transcript]:
        """Transcribes recordings: pairs of samples [N] of one channel, and samples per second.

        `language`: such as "en"; None: detected. `task`: "transcribe", or "translate" (to English).
        `prompt`: earlier text, or names to be spelled that way. `progress` is called with the index
        of a recording and its finished seconds. Raises RequestError."""
        options = {**self._options, "language": language, "task": task, "prompt": prompt}
        works = [Recording(self._model, *recording, **options) for recording in recordings]
        going: list[tuple[int, Steps, Ask]] = []
        for index, work in enumerate(works):
            steps = work.steps()
            going.append((index, steps, next(steps)))
        while going:
            outputs = self._llm.generate(
                [ask.prompt for *_, ask in going], [ask.params for *_, ask in going], use_tqdm=False
            )
            left = []
            for (index, steps, _), output in zip(going, outputs, strict=True):
                with suppress(StopIteration):
                    left.append((index, steps, steps.send(output)))
                if progress is not None:
                    progress(index, works[index].seconds_done)
            going = left
        return [work.transcript for work in works]


class AsyncEngine(Protocol):
    """An AsyncLLM, or an engine as routes get it."""

    @property
    def config(self) -> VllmConfig: ...

    @property
    def renderer(self) -> Renderer: ...

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]: ...


class AsyncTranscriber:
    """The same for an AsyncLLM: one recording at a call, and segments as they come."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Raises ToolkitError if the model is not a Whisper."""
        self._engine = engine
        self._model = LongForm(engine.config, engine.renderer)

    @property
    def sampling_rate(self) -> int:
        """Samples a second of what the model hears."""
        return self._model.rules.mel.sampling_rate

    async def begin(self, samples: Any, sampling_rate: int, **options: Any) -> Recording:
        """`options`: those of Recording. Raises RequestError."""
        return await asyncio.to_thread(Recording, self._model, samples, sampling_rate, **options)

    async def segments(
        self, recording: Recording, **options: Any
    ) -> AsyncGenerator[list[Segment], None]:
        """Segments of one window after another; `recording.transcript` collects all of them.
        `options`: those of AsyncLLM.generate.

        Closing the generator aborts the running requests. Raises the errors of `generate`, and
        ToolkitError for a window that fails."""
        steps = recording.steps()
        num_segments = 0
        ask: Ask | None = next(steps)
        while ask is not None:
            async with aclosing(
                self._engine.generate(ask.prompt, ask.params, **options)
            ) as outputs:
                [output] = [result async for result in outputs]
            try:
                ask = steps.send(output)
            except StopIteration:
                ask = None
            found = recording.transcript.segments[num_segments:]
            if found:
                num_segments += len(found)
                yield found
