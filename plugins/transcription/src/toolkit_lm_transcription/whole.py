"""Transcripts of models that hear a recording whole, and set no timestamps: those that label frames
(CTC), and encoder-decoder models other than Whisper."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import numpy as np
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm.params import RequestOutputKind, SamplingParams
from toolkit_lm_whisper.long_form import Segment, Thresholds, Transcript

if TYPE_CHECKING:
    from toolkit_lm import LLM
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.outputs import RequestOutput
    from toolkit_lm.plugin import Plugins
    from toolkit_lm.renderer import Renderer
    from toolkit_lm_serving.engine import ServingEngine


class WholeModel:
    """A model that hears recordings whole, by its rules for prompts. Their class says `hears`:
    {"audio": samples, "sampling_rate": hertz} is a prompt of its encoder. It says `draws` if its
    text is drawn."""

    def __init__(self, config: VllmConfig, renderer: Renderer, plugins: Plugins) -> None:
        """Raises ToolkitError for a model that does not hear."""
        if (rules := rules_that_hear(config, plugins)) is None:
            raise ToolkitError(f"{config.model.model!r} hears no recordings.")
        self._rules = rules(config, renderer)

    @property
    def sampling_rate(self) -> int:
        """Samples a second of what the model hears. Raises CheckpointError."""
        return int(self._rules.sampling_rate)

    def ask(
        self,
        samples: np.ndarray,
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str = "",
        thresholds: Thresholds | None = None,
    ) -> tuple[Any, SamplingParams]:
        """The request for a recording. Raises RequestError for what the model cannot obey."""
        if language is not None:
            raise RequestError(
                "this model takes no language: it writes what it hears. Leave it out.", "language"
            )
        if task != "transcribe":
            raise RequestError(f"this model transcribes; it has no task {task!r}.", "task")
        if prompt.strip():
            raise RequestError("this model takes no prompt beside the recording.", "prompt")
        if thresholds is not None and not self._rules.draws:
            raise RequestError(
                "this model draws no tokens: there is no temperature. Leave it out.", "temperature"
            )
        params = SamplingParams(
            temperature=0.0 if thresholds is None else thresholds.temperatures[0],
            max_tokens=None,
            logprobs=0 if self._rules.draws else None,
            # transformers leaves the blank out alone, of the labels of frames.
            skip_special_tokens=bool(self._rules.draws),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return {"encoder_prompt": {"audio": samples, "sampling_rate": self.sampling_rate}}, params


class WholeRecording:
    """One recording on its way to a transcript."""

    def __init__(
        self, model: WholeModel, samples: np.ndarray, sampling_rate: int, **options: Any
    ) -> None:
        """`options`: those of WholeModel.ask. Raises RequestError."""
        self.prompt, self.params = model.ask(samples, **options)
        self.transcript = Transcript(None, len(samples) / sampling_rate)

    def add(self, output: RequestOutput) -> Segment:
        """The one segment. Raises ToolkitError for a text that is not whole."""
        [found] = output.outputs
        if output.error is not None or found.finish_reason not in ("stop", "length"):
            raise ToolkitError(
                f"the recording could not be transcribed: {output.error or found.finish_reason}"
            )
        if found.finish_reason == "length":
            raise RequestError(
                f"the text has more than {len(found.token_ids)} tokens: cut the recording, or "
                "start the engine with a larger max_model_len.",
                "file",
            )
        tokens = list(found.token_ids)
        mean = None
        if found.cumulative_logprob is not None:
            mean = found.cumulative_logprob / max(len(tokens), 1)
        segment = Segment(
            0.0,
            self.transcript.duration,
            found.text,
            tokens,
            temperature=self.params.temperature,
            avg_logprob=mean,
            compression_ratio=None,
        )
        self.transcript.segments.append(segment)
        return segment


class AsyncWholeTranscriber:
    """The methods of AsyncTranscriber: one recording at a call."""

    def __init__(self, engine: ServingEngine) -> None:
        """Raises ToolkitError for a model that does not hear."""
        self._engine = engine
        self._model = WholeModel(engine.config, engine.renderer, engine.plugins)

    @property
    def sampling_rate(self) -> int:
        """Samples a second of what the model hears."""
        return self._model.sampling_rate

    async def begin(
        self, samples: np.ndarray, sampling_rate: int, *, tells_no_speech: bool, **options: Any
    ) -> WholeRecording:
        """`options`: those of WholeModel.ask. `tells_no_speech`: this model tells none."""
        return await asyncio.to_thread(
            WholeRecording, self._model, samples, sampling_rate, **options
        )

    async def segments(
        self, recording: WholeRecording, **options: Any
    ) -> AsyncGenerator[list[Segment], None]:
        """The one segment. `options`: those of AsyncLLM.generate."""
        async with aclosing(
            self._engine.generate(recording.prompt, recording.params, **options)
        ) as outputs:
            [output] = [result async for result in outputs]
        yield [recording.add(output)]


class WholeTranscriber:
    """The same for an LLM: several recordings in one batch."""

    def __init__(self, llm: LLM) -> None:
        """Raises ToolkitError for a model that does not hear."""
        self._llm = llm
        self._model = WholeModel(llm.config, llm.engine.renderer, llm.engine.plugins)

    @property
    def sampling_rate(self) -> int:
        """Samples a second of what the model hears."""
        return self._model.sampling_rate

    def transcribe(
        self,
        recordings: Sequence[tuple[np.ndarray, int]],
        *,
        progress: Callable[[int, float], None],
        **options: Any,
    ) -> list[Transcript]:
        """Transcribes recordings: pairs of samples [N] of one channel, and samples per second.
        `options`: those of WholeModel.ask. Raises RequestError."""
        works = [WholeRecording(self._model, *recording, **options) for recording in recordings]
        outputs = self._llm.generate(
            [work.prompt for work in works], [work.params for work in works], use_tqdm=False
        )
        for index, (work, output) in enumerate(zip(works, outputs, strict=True)):
            work.add(output)
            progress(index, work.transcript.duration)
        return [work.transcript for work in works]


def rules_that_hear(config: VllmConfig, plugins: Plugins) -> Any:
    """The class of the rules of a model that hears recordings whole; None: it does not."""
    models = plugins.models
    architecture = config.checkpoint.architecture if config.checkpoint is not None else ""
    rules = models.load_rules(architecture) if architecture in models else None
    return rules if getattr(rules, "hears", False) else None
