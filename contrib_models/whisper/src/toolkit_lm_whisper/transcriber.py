"""Transcriber: recordings of any length, in windows that follow the timestamps that the model sets."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError, ToolkitError, nearest
from toolkit_lm.outputs import CompletionOutput

from toolkit_lm_whisper.features import LogMel
from toolkit_lm_whisper.rules import WhisperRules

_STEP, _FRAME = 0.02, 0.01
"""Seconds from timestamp to timestamp, and from frame to frame."""


@dataclass
class Segment:
    """A piece of a transcript."""

    start: float
    """Seconds."""
    end: float
    text: str
    token_ids: list[int]


@dataclass
class Transcript:
    """Of one recording."""

    language: str | None
    """As the model names it: "en"; None where it knows one language only."""
    duration: float
    """Seconds."""
    segments: list[Segment] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """When a window is drawn again, at the next of `temperatures`: it repeats itself, or the model is unsure."""

    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    most_compression: float = 2.4
    """Bytes of its text by those that zlib makes of them."""
    least_logprob: float = -1.0
    """Of a token, on average."""


class _Work:
    """One recording on its way."""

    def __init__(self, samples: np.ndarray, mel: LogMel) -> None:
        self.features = mel.of_recording(np.pad(samples, (0, max(0, mel.hop - len(samples)))))
        self.position = 0
        """Frames that are transcribed."""
        self.language: int | None = None
        """Its token."""
        self.transcript = Transcript(None, len(samples) / mel.sampling_rate)
        self.context: list[int] = []
        """Tokens of the text so far, for the model to go on from."""

    @property
    def is_done(self) -> bool:
        return self.position >= int(self.features.shape[1])


class Transcriber:
    """Several recordings are transcribed side by side, the windows of each one after the other."""

    def __init__(self, llm: LLM, thresholds: Thresholds | None = None, *, uses_context: bool = True) -> None:
        """`uses_context`: the model reads what was said before each window. Raises ToolkitError where it is no Whisper."""
        self.llm = llm
        self.thresholds = thresholds or Thresholds()
        self.uses_context = uses_context
        self.rules = WhisperRules(llm.config, llm.engine.renderer)
        generation = self.rules.generation
        if llm.config.hf_config.get("model_type") != "whisper" or "no_timestamps_token_id" not in generation:
            raise ToolkitError(f"{llm.config.model.model!r} is no Whisper whose generation_config.json names its timestamps.")
        self._first_time = generation["no_timestamps_token_id"] + 1
        self._languages: Mapping[str, int] = generation.get("lang_to_id") or {}

    def transcribe(
        self,
        recordings: Sequence[tuple[Any, int]],
        *,
        language: str | None = None,
        task: str = "transcribe",
        progress: Callable[[int, float], None] | None = None,
    ) -> list[Transcript]:
        """`recordings`: samples [N] of one channel, and samples a second. `language`: as "en"; None: detected. `task`: or "translate", to
        English. `progress` is told the index of a recording, and how many seconds of it are done. Raises RequestError.
        """
        works = [_Work(self.rules.check_samples(*one), self.rules.mel) for one in recordings]
        self._set_languages(works, language)
        task_token = self._task(task)
        while going := [work for work in works if not work.is_done]:
            for work, found in zip(going, self._draw(going, task_token), strict=True):
                self._take(work, found)
                if progress is not None:
                    progress(works.index(work), work.transcript.duration if work.is_done else work.position * _FRAME)
        return [work.transcript for work in works]

    def _task(self, task: str) -> int | None:
        tasks = self.rules.generation.get("task_to_id") or {}
        if task not in ("transcribe", "translate") or (task == "translate" and not tasks):
            known = ["transcribe", *(["translate"] if tasks else [])]
            raise RequestError(f"task {task!r}: this model has {', '.join(known)}.", "task")
        return tasks.get(task)

    def _set_languages(self, works: Sequence[_Work], language: str | None) -> None:
        names = {token: name.strip("<|>") for name, token in self._languages.items()}
        if language is not None and language not in names.values():
            raise RequestError(f"language {language!r} is not one of the model's. {nearest(language, names.values())}", "language")
        if not names:
            return
        given = next((token for token, name in names.items() if name == language), None)
        found = [given] * len(works)
        if given is None:
            params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=list(names))
            outputs = self.llm.generate([self._prompt(work, [self.rules.start_token_id]) for work in works], params, use_tqdm=False)
            found = [output.outputs[0].token_ids[0] for output in outputs]
        for work, token in zip(works, found, strict=True):
            assert token is not None
            work.language, work.transcript.language = token, names[token]

    def _prompt(self, work: _Work, decoder: list[int]) -> Any:
        window = work.features[:, work.position : work.position + self.rules.mel.num_frames]
        return {"encoder_prompt": {"features": window}, "decoder_prompt": {"prompt_token_ids": decoder}}

    def _draw(self, works: Sequence[_Work], task: int | None) -> list[CompletionOutput]:
        """The next window of each. Those that fail the thresholds are drawn again, at the next temperature."""
        found: dict[int, CompletionOutput] = {}
        asked = [self._prompt(work, self._decoder_prompt(work, task)) for work in works]
        left = list(range(len(works)))
        for temperature in self.thresholds.temperatures:
            params = SamplingParams(temperature=temperature, max_tokens=None, logprobs=0, seed=0)
            outputs = self.llm.generate([asked[i] for i in left], params, use_tqdm=False)
            for i, output in zip(left, outputs, strict=True):
                if output.error is not None:
                    raise ToolkitError(f"a window could not be transcribed: {output.error}")
                found[i] = output.outputs[0]
            left = [i for i in left if self._fails(found[i])]
            if not left:
                break
        return [found[i] for i in range(len(works))]

    def _decoder_prompt(self, work: _Work, task: int | None) -> list[int]:
        named = [token for token in (work.language, task) if token is not None]
        prompt = [self.rules.start_token_id, *named]
        before = self.rules.generation.get("prev_sot_token_id")
        if before is None or not work.context or not self.uses_context:
            return prompt
        room = self.llm.config.max_model_len // 2 - 1
        return [before, *work.context[-room:], *prompt]

    def _fails(self, found: CompletionOutput) -> bool:
        text = self._text(found.token_ids).encode()
        if text and len(text) / len(zlib.compress(text)) > self.thresholds.most_compression:
            return True
        return (found.cumulative_logprob or 0.0) / (len(found.token_ids) + 1) < self.thresholds.least_logprob

    def _take(self, work: _Work, found: CompletionOutput) -> None:
        """Adds the segments of a window, and moves on: to the last timestamp of a pair, or to the window's end."""
        frames = min(self.rules.mel.num_frames, work.features.shape[1] - work.position)
        offset, whole = work.position * _FRAME, frames * _FRAME
        ends = self.llm.engine.renderer.eos_token_ids
        pieces, rest = split_at_pairs([token for token in found.token_ids if token not in ends], self._first_time)
        for piece in pieces:
            times = [(token - self._first_time) * _STEP for token in piece if token >= self._first_time]
            start, end = (times[0], times[-1]) if len(times) > 1 else (times[0] if times else 0.0, whole)
            text = [token for token in piece if token < self._first_time]
            work.transcript.segments.append(Segment(offset + start, offset + end, self._text(text), text))
            work.context += text
        work.position += round(rest * _STEP / _FRAME) if rest else frames

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.llm.engine.renderer.decode([token for token in token_ids if token < self._first_time], skip_special_tokens=True)


def split_at_pairs(tokens: Sequence[int], first_time: int) -> tuple[list[list[int]], int | None]:
    """The segments of a window's tokens, cut where two timestamps meet; and the timestamp to go on from, None: the window's end.

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
