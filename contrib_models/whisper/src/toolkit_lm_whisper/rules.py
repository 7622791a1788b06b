"""Prompt rules of Whisper: recordings for the encoder, and tokens that name language and task for
the decoder. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm.messages import Array, EncoderInput
from toolkit_lm.renderer import Renderer
from toolkit_lm_encdec.rules import UsualRules

from toolkit_lm_whisper.features import LogMel
from toolkit_lm_whisper.languages import code_of


class WhisperRules(UsualRules):
    """The encoder's prompt is {"audio": samples [N], "sampling_rate": hertz}, of one channel and 30
    seconds at most.

    Or {"features": [num_mels, frames]}: a window of those of a longer recording.
    """

    encoder_length_keys = ("max_source_positions",)

    def __init__(self, config: VllmConfig, renderer: Renderer) -> None:
        super().__init__(config, renderer)
        assert config.checkpoint is not None
        self.mel = LogMel.read(
            Path(config.checkpoint.path), config.hf_config.get("num_mel_bins", 80)
        )

    def encoder_input(self, prompt: Any, max_tokens: int | None) -> EncoderInput:
        if not isinstance(prompt, Mapping) or not {"audio", "features"} & set(prompt):
            raise RequestError(
                "Whisper's encoder hears: give {'audio': samples, 'sampling_rate': hertz}. Text "
                "is for the decoder_prompt.",
                "prompt",
            )
        features = (
            self._window(prompt["features"])
            if "features" in prompt
            else self._audio_features(prompt)
        )
        return EncoderInput(
            num_tokens=self.config.max_encoder_len,
            features=Array.of(np.ascontiguousarray(features)),
        )

    def _audio_features(self, prompt: Mapping[str, Any]) -> np.ndarray:
        samples = self.check_samples(
            prompt["audio"], prompt.get("sampling_rate", self.mel.sampling_rate)
        )
        if len(samples) > self.mel.num_samples:
            raise RequestError(
                f"the audio has {len(samples) / self.mel.sampling_rate:.1f} seconds, and the "
                f"model hears {self.mel.seconds} at a time: "
                "cut it, or use toolkit_lm_whisper.transcriber.Transcriber.",
                "audio",
            )
        return self.mel(samples)

    def _window(self, options: Any) -> np.ndarray:
        """Features [num_mels, frames], filled up with zeros. Raises RequestError."""
        shape = (self.mel.num_mels, self.mel.num_frames)
        if (
            not isinstance(options, np.ndarray)
            or options.ndim != 2
            or options.dtype.kind != "f"
            or not 0 < options.shape[1] <= shape[1]
        ):
            raise RequestError(
                f"features must be an array of floats [{shape[0]}, 1 to {shape[1]}].", "features"
            )
        if options.shape[0] != shape[0] or not np.isfinite(options).all():
            raise RequestError(
                f"features must be {shape[0]} finite numbers for each frame.", "features"
            )
        window = np.zeros(shape, np.float32)
        window[:, : options.shape[1]] = options
        return window

    def check_samples(self, audio: Any, sampling_rate: Any) -> np.ndarray:
        """[N] float32, between -1 and 1 where they were integers. Raises RequestError, naming the
        parameter."""
        if sampling_rate != self.mel.sampling_rate:
            raise RequestError(
                f"the audio has {sampling_rate} samples a second, and the model hears "
                f"{self.mel.sampling_rate}: resample it.",
                "sampling_rate",
            )
        try:
            array = np.asarray(audio)
        except ValueError as error:
            raise RequestError(f"audio must be a list of numbers: {error}", "audio") from None
        if array.ndim != 1 or array.dtype.kind not in "fiu":
            shape = f"{array.ndim} axes of {array.dtype}"
            raise RequestError(
                "audio must be an array of numbers with one axis, the samples of one channel, "
                f"not {shape}.",
                "audio",
            )
        if not array.size:
            raise RequestError("the audio is empty: it needs at least one sample.", "audio")
        samples: np.ndarray = array.astype(np.float32, copy=False)
        if array.dtype.kind != "f":
            samples = samples / np.float32(np.iinfo(array.dtype).max)
        if not np.isfinite(samples).all():
            raise RequestError("the audio holds NaN or infinity.", "audio")
        return samples

    def default_decoder_prompt(self) -> list[int]:
        """The start of a transcript: of the language and task that the checkpoint names, else
        English, transcribed; no timestamps."""
        named = self._forced() or self._named()
        no_timestamps = [token for token in self._no_timestamps() if token not in named]
        return [self.start_token_id, *named, *no_timestamps]

    def _named(self) -> list[int]:
        """The tokens of language and task."""
        languages = self.generation.get("lang_to_id") or {}
        tasks = self.generation.get("task_to_id") or {}
        if not languages:
            return []
        stated = self.generation.get("language")
        language = languages.get(f"<|{code_of(str(stated or 'en'))}|>")
        if language is None and stated:
            raise CheckpointError(
                f"generation_config.json: language {stated!r} is not one of its lang_to_id."
            )
        named = [
            next(iter(languages.values())) if language is None else language,
            tasks.get(self.generation.get("task") or "transcribe"),
        ]
        return [token for token in named if token is not None]

    def _forced(self) -> list[int]:
        """Forced decoder tokens of older checkpoints (`forced_decoder_ids`), if these name neither
        language nor task."""
        forced = self.generation.get("forced_decoder_ids") or self.config.hf_config.get(
            "forced_decoder_ids"
        )
        if not forced or self.generation.get("language") or self.generation.get("task"):
            return []
        try:
            places, tokens = zip(*forced, strict=True)
        except (TypeError, ValueError):
            places = ()
            tokens = ()
        if (
            not places
            or any(place != i for i, place in enumerate(places, 1))
            or {*map(type, tokens)} - {int, type(None)}
        ):
            raise CheckpointError(
                f"forced_decoder_ids must be [[1, TOKEN], [2, TOKEN], ...], not {forced!r}."
            )
        # None stands for the language, which transformers detects.
        parts = [self._named()[:1] if token is None else [token] for token in tokens]
        return [token for part in parts for token in part]

    def decoder_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """Text from before the window stands before the start of the transcript."""
        before = self.generation.get("prev_sot_token_id")
        has_context = (
            before is not None
            and list(token_ids[:1]) == [before]
            and self.start_token_id in token_ids
        )
        return list(token_ids) if has_context else super().decoder_prompt(token_ids)

    def _no_timestamps(self) -> list[int]:
        token = self.generation.get("no_timestamps_token_id")
        return [] if token is None else [token]

    def logits_processors(
        self, decoder_prompt: Sequence[int], max_output_tokens: int
    ) -> dict[str, dict[str, Any]]:
        """Tokens that are never drawn, and those that are not drawn first, as
        generation_config.json names them; the rules of timestamps.

        These count unless the decoder prompt says that there are none, or asks which language is
        spoken: it then names none.
        """
        always, begin = (
            self.generation.get(key) or [] for key in ("suppress_tokens", "begin_suppress_tokens")
        )
        found: dict[str, dict[str, Any]] = (
            {"whisper_suppress": {"always": always, "begin": begin}} if always or begin else {}
        )
        without = self.generation.get("no_timestamps_token_id")
        asks_language = (
            self.generation.get("lang_to_id") and decoder_prompt[-1] == self.start_token_id
        )
        if without is not None and without not in decoder_prompt and not asks_language:
            end = self.renderer.eos_token_ids[0]
            most_first = self.generation.get("max_initial_timestamp_index")
            found["whisper_timestamps"] = {
                "begin": without + 1,
                "end": end,
                "most_first": most_first,
            }
        return found
