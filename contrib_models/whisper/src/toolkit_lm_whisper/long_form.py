"""Long-form transcription: a recording of any length, window by window, where the timestamps that
the model sets say how to go on.

What is to be asked of the model, and what follows from its answers; who asks is another matter
(transcriber.py).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError, ToolkitError, nearest
from toolkit_lm.outputs import CompletionOutput, RequestOutput
from toolkit_lm.params import RequestOutputKind, SamplingParams
from toolkit_lm.renderer import Renderer

from toolkit_lm_whisper.languages import code_of
from toolkit_lm_whisper.rules import WhisperRules

_STEP = 0.02
_FRAME = 0.01
"""Seconds from timestamp to timestamp, and from frame to frame."""
_SURE = 0.5
"""Text drawn at this temperature or above is not used as context for the next window."""


@dataclass
class Segment:
    """A piece of a transcript."""

    start: float
    """Seconds."""
    end: float
    text: str
    token_ids: list[int]
    """Without timestamps."""
    seek: int = 0
    """Hundredths of a second: where its window begins."""
    temperature: float = 0.0
    """Temperature at which the text of its window was drawn. The next three values are of the same
    draw."""
    avg_logprob: float | None = 0.0
    """Mean log probability of a token; None: no token was drawn from a distribution."""
    compression_ratio: float | None = 1.0
    """Bytes of its tokens by those that zlib makes of them; None: it was not asked for."""
    no_speech_prob: float | None = None
    """Probability that the window has no speech; None: it was not asked for."""


@dataclass
class Transcript:
    """Transcript of one recording."""

    language: str | None
    """Language code, such as "en"; None if the model knows only one language."""
    duration: float
    """Seconds."""
    segments: list[Segment] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When a window is drawn again, at the next of `temperatures`: it repeats itself, or the model
    is unsure. As transformers has it."""

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    most_compression: float = 1.35
    """Bytes of its tokens by those that zlib makes of them."""
    least_logprob: float = -1.0
    """Lowest mean log probability of a token."""
    most_no_speech: float = 0.6
    """Highest probability of silence. A window above it has no text, if the model is also unsure of
    its text."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to the model."""

    prompt: Any
    params: SamplingParams


Steps = Generator[Ask, RequestOutput, None]
"""Gives requests one after another; each output is sent in before the next."""


@dataclass
class _Drawn:
    """A window's tokens, and how good they are."""

    token_ids: list[int]
    """Without the end."""
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None = None


class LongForm:
    """Languages, tasks and timestamps of a Whisper model."""

    def __init__(self, config: VllmConfig, renderer: Renderer) -> None:
        """Raises ToolkitError if the model is not a Whisper with timestamps."""
        rules = (
            WhisperRules(config, renderer)
            if config.hf_config.get("model_type") == "whisper"
            else None
        )
        generation = {} if rules is None else rules.generation
        if rules is None or "no_timestamps_token_id" not in generation:
            raise ToolkitError(
                f"{config.model.model!r} is no Whisper whose generation_config.json names its "
                "timestamps."
            )
        self.rules = rules
        self.first_time: int = generation["no_timestamps_token_id"] + 1
        self.no_speech: int = generation["no_timestamps_token_id"] - 1
        self.before: int | None = generation.get("prev_sot_token_id")
        self.languages = {
            token: name.strip("<|>") for name, token in (generation.get("lang_to_id") or {}).items()
        }
        """Names, by token."""
        self.tasks: Mapping[str, int] = generation.get("task_to_id") or {}
        self.max_context = config.max_model_len // 2 - 1
        self.vocab_size: int = config.hf_config["vocab_size"]
        self.ends = frozenset(renderer.eos_token_ids)
        self.renderer = renderer

    def text(self, token_ids: Sequence[int]) -> str:
        return self.renderer.decode(
            [token for token in token_ids if token < self.first_time], skip_special_tokens=True
        )

    def tokens(self, text: str) -> list[int]:
        """Tokens of `text`, without those that mark language, task or time for the model."""
        token_ids = (
            self.renderer.render_prompt(f" {text.strip()}", add_special_tokens=False).token_ids
            if text.strip()
            else []
        )
        marks = {
            self.rules.start_token_id,
            self.no_speech,
            self.before,
            *self.languages,
            *self.tasks.values(),
            *self.ends,
        }
        return [token for token in token_ids if token < self.first_time - 1 and token not in marks]

    def language(self, name: str | None) -> int | None:
        """Token of a language given by code or name; None: it is to be detected. Raises
        RequestError."""
        found = (
            None
            if name is None
            else next(
                (token for token, language in self.languages.items() if language == code_of(name)),
                None,
            )
        )
        if name is not None and found is None:
            raise RequestError(
                f"language {name!r} is not one of the model's. "
                f"{nearest(name, self.languages.values())}",
                "language",
            )
        return found

    def task(self, name: str) -> int | None:
        """Token of a task; None if the model has only one task. Raises RequestError."""
        known = {"transcribe": None, **self.tasks}
        if name not in known:
            raise RequestError(f"task {name!r}: this model has {', '.join(known)}.", "task")
        return known[name]


class Recording:
    """One recording on its way to a transcript."""

    def __init__(
        self,
        model: LongForm,
        samples: Any,
        sampling_rate: int,
        *,
        language: str | None = None,
        task: str = "transcribe",
        prompt: str = "",
        thresholds: Thresholds | None = None,
        uses_context: bool = True,
        tells_no_speech: bool = False,
    ) -> None:
        """Takes a while: features of all samples are computed. `prompt`: what was said before.
        Raises RequestError."""
        self._model = model
        self._thresholds = thresholds or Thresholds()
        self._uses_context = uses_context
        self._tells_no_speech = tells_no_speech
        self._language = model.language(language)
        self._task = model.task(task)
        checked = model.rules.check_samples(samples, sampling_rate)
        mel = model.rules.mel
        self.transcript = Transcript(None, len(checked) / mel.sampling_rate)
        # A frame at least.
        self._features = mel.of_recording(
            checked if len(checked) >= mel.hop else np.pad(checked, (0, mel.hop - len(checked)))
        )
        self._position = 0
        """Frames that are transcribed."""
        self._context = model.tokens(prompt)
        """Tokens of the text so far, timestamps among them, for the model to go on from."""

    @property
    def seconds_done(self) -> float:
        return self.transcript.duration if self._is_done else self._position * _FRAME

    @property
    def _is_done(self) -> bool:
        return self._position >= int(self._features.shape[1])

    def steps(self) -> Steps:
        """Yields the requests to the model. `transcript` grows meanwhile. Raises ToolkitError for a
        window that fails."""
        yield from self._find_language()
        while not self._is_done:
            frames = min(
                self._model.rules.mel.num_frames, int(self._features.shape[1]) - self._position
            )
            drawn = yield from self._draw()
            if drawn is None:
                self._position += frames
            else:
                self._add_segments(drawn, frames)

    def _find_language(self) -> Steps:
        names = self._model.languages
        if names and self._language is None:
            params = SamplingParams(
                temperature=0,
                max_tokens=1,
                allowed_token_ids=list(names),
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            output = yield self._ask([self._model.rules.start_token_id], params)
            [self._language] = _choice(output).token_ids
        self.transcript.language = None if self._language is None else names[self._language]

    def _draw(self) -> Generator[Ask, RequestOutput, _Drawn | None]:
        """The next window, drawn again at the next temperature while it fails the thresholds. None:
        nothing is said in it."""
        limits = self._thresholds
        no_speech = None
        drawn = None
        for temperature in limits.temperatures:
            params = SamplingParams(
                temperature=temperature,
                max_tokens=None,
                logprobs=0,
                seed=0,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            drawn = self._drawn(
                _choice((yield self._ask(self._decoder_prompt(), params))), temperature
            )
            is_unsure = drawn.avg_logprob < limits.least_logprob
            if no_speech is None and (is_unsure or self._tells_no_speech):
                no_speech = yield from self._no_speech_prob()
            drawn.no_speech_prob = no_speech
            if is_unsure and no_speech is not None and no_speech > limits.most_no_speech:
                return None
            if not is_unsure and drawn.compression_ratio <= limits.most_compression:
                break
        return drawn

    def _no_speech_prob(self) -> Generator[Ask, RequestOutput, float]:
        """The probability of the token of silence where the transcript starts."""
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=0, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = yield self._ask(
            [*self._before(), self._model.rules.start_token_id, self._model.no_speech], params
        )
        _choice(output)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[-1] is not None
        return math.exp(output.prompt_logprobs[-1][self._model.no_speech].logprob)

    def _ask(self, decoder: list[int], params: SamplingParams) -> Ask:
        window = self._features[
            :, self._position : self._position + self._model.rules.mel.num_frames
        ]
        return Ask(
            {
                "encoder_prompt": {"features": window},
                "decoder_prompt": {"prompt_token_ids": decoder},
            },
            params,
        )

    def _decoder_prompt(self) -> list[int]:
        named = [token for token in (self._language, self._task) if token is not None]
        return [*self._before(), self._model.rules.start_token_id, *named]

    def _before(self) -> list[int]:
        if self._model.before is None or not self._context:
            return []
        return [self._model.before, *self._context[-self._model.max_context :]]

    def _drawn(self, found: CompletionOutput, temperature: float) -> _Drawn:
        tokens = list(found.token_ids)
        logprob = (found.cumulative_logprob or 0.0) / max(len(tokens), 1)
        width = int(math.log2(self._model.vocab_size) / 8) + 1
        packed = b"".join(token.to_bytes(width, "little") for token in tokens)
        ratio = len(packed) / len(zlib.compress(packed))
        return _Drawn(
            [token for token in tokens if token not in self._model.ends],
            temperature,
            logprob,
            ratio,
        )

    def _add_segments(self, drawn: _Drawn, frames: int) -> None:
        """Adds the segments of a window, and moves on: to the last timestamp of a pair, or to the
        window's end."""
        first_time = self._model.first_time
        offset = self._position * _FRAME
        whole = frames * _FRAME
        pieces, rest = split_at_pairs(drawn.token_ids, first_time)
        if not self._uses_context or drawn.temperature >= _SURE:
            self._context = []
        for piece in pieces:
            times = [(token - first_time) * _STEP for token in piece if token >= first_time]
            start, end = (
                (times[0], times[-1]) if len(times) > 1 else (times[0] if times else 0.0, whole)
            )
            text = [token for token in piece if token < first_time]
            about = (
                drawn.temperature,
                drawn.avg_logprob,
                drawn.compression_ratio,
                drawn.no_speech_prob,
            )
            self.transcript.segments.append(
                Segment(
                    offset + start,
                    offset + end,
                    self._model.text(text),
                    text,
                    self._position,
                    *about,
                )
            )
            if self._uses_context and drawn.temperature < _SURE:
                self._context += piece
        self._position += round(rest * _STEP / _FRAME) if rest else frames


def _choice(output: RequestOutput) -> CompletionOutput:
    """Raises ToolkitError where there is none to go on from."""
    [found] = output.outputs
    if output.error is not None or found.finish_reason not in ("stop", "length"):
        raise ToolkitError(
            f"a window could not be transcribed: {output.error or found.finish_reason}"
        )
    return found


def split_at_pairs(tokens: Sequence[int], first_time: int) -> tuple[list[list[int]], int | None]:
    """The segments of a window's tokens, cut where two timestamps meet; and the timestamp to go on
    from, None: the window's end.

    A window that ends in the middle of a segment is heard again from that segment's beginning.
    """
    times = [token >= first_time for token in tokens]
    cuts = [i for i in range(1, len(tokens)) if times[i - 1] and times[i]]
    ends_alone = times[-2:] == [False, True]
    if not cuts:
        return ([list(tokens)] if tokens else []), None
    edges = [0, *cuts, *([len(tokens)] if ends_alone else [])]
    pieces = [list(tokens[start:end]) for start, end in pairwise(edges)]
    return pieces, None if ends_alone else tokens[cuts[-1] - 1] - first_time
