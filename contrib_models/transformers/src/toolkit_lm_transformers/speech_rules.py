"""Prompt rules of models whose encoder hears. Needs no torch until a recording comes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, EncoderInput
from toolkit_lm.params import SamplingParams
from toolkit_lm.prompts import SingletonPrompt
from toolkit_lm.renderer import RenderedPair, Renderer
from toolkit_lm_encdec.rules import UsualRules

from toolkit_lm_transformers.recordings import Extractor, Shapes, blank_of

_NOT_READ = frozenset(
    {"allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "min_tokens"}
    | {"presence_penalty", "repetition_penalty", "structured_outputs", "use_beam_search"}
)
"""Parameters that would choose other tokens than those that the frames have."""
_PROMPTED = ("canary", "cohere_asr", "seamless_m4t", "seamless_m4t_v2")
"""Types whose decoder is told the language, by tokens that their processors make."""
_DEFAULTS = SamplingParams()
_INFINITE = 3e38
"""Values of float32 are smaller."""


class SpeechRules(UsualRules):
    """The encoder's prompt is {"audio": samples [N], "sampling_rate": hertz}, of one channel.

    Or {"features": [frames, width], or [samples]}, which the checkpoint's feature extractor made.
    """

    encoder_length_keys: ClassVar[tuple[str, ...]] = (
        "max_source_positions",
        "max_speech_positions",
        "encoder.max_source_positions",
        "encoder_config.max_position_embeddings",
    )
    hears: ClassVar[bool] = True
    """Routes of audio ask for it: the encoder's prompt is a recording."""
    draws: ClassVar[bool] = True
    """Whether tokens are drawn from a distribution."""

    def __init__(self, config: VllmConfig, renderer: Renderer) -> None:
        super().__init__(config, renderer)
        assert config.checkpoint is not None
        self.extractor = Extractor(Path(config.checkpoint.path))

    @property
    def sampling_rate(self) -> int:
        """Samples a second of what the model hears. Raises CheckpointError."""
        return self.extractor.sampling_rate

    @cached_property
    def _shapes(self) -> Shapes:
        # Here, because it imports torch.
        from toolkit_lm_transformers.speech import examine_speech

        return examine_speech(self.config).shapes

    def encoder_input(self, prompt: Any, max_tokens: int | None) -> EncoderInput:
        if not isinstance(prompt, Mapping) or not {"audio", "features"} & set(prompt):
            raise RequestError(
                "the encoder of this model hears: give {'audio': samples, 'sampling_rate': hertz} "
                "as encoder_prompt.",
                "prompt",
            )
        if max_tokens is not None:
            raise RequestError("a recording is not truncated: cut it.", "truncate_prompt_tokens")
        if "features" in prompt:
            param = "features"
            features = _checked_features(prompt["features"])
            length = f"{len(features)} frames"
        else:
            samples = self._samples(prompt)
            param = "audio"
            features = self.extractor(samples)
            length = f"{len(samples) / self.sampling_rate:.2f} seconds"
        features = self._shapes.whole(features)
        try:
            count, _ = self._shapes.states(features.shape)
        except Exception as error:  # whatever transformers raises for a shape that it cannot take
            raise RequestError(
                f"the encoder cannot read a recording of {length} (features "
                f"{list(features.shape)}): it may be too short. {str(error)[:200]}",
                param,
            ) from error
        most = self.config.max_encoder_len
        if most is not None and count > most:
            raise RequestError(
                f"a recording of {length} has {count} states, and max_encoder_len is {most}: cut "
                "it, or start the engine with a larger max_encoder_len.",
                param,
            )
        return EncoderInput(num_tokens=count, features=Array.of(features))

    def default_decoder_prompt(self) -> list[int]:
        if self.config.hf_config.get("model_type") in _PROMPTED:
            raise RequestError(
                "the decoder of this model is told the language: give a decoder_prompt of token "
                "ids, as the checkpoint's processor makes them.",
                "prompt",
            )
        return super().default_decoder_prompt()

    def _samples(self, prompt: Mapping[str, Any]) -> np.ndarray:
        """[N] float32, between -1 and 1 where they were integers. Raises RequestError."""
        rate = prompt.get("sampling_rate", self.sampling_rate)
        if rate != self.sampling_rate:
            raise RequestError(
                f"the audio has {rate} samples a second, and the model hears "
                f"{self.sampling_rate}: resample it.",
                "sampling_rate",
            )
        array = _array(prompt["audio"], "audio")
        if array.ndim != 1 or array.dtype.kind not in "fiu" or not array.size:
            raise RequestError(
                "audio must be an array of numbers with one axis, the samples of one channel, not "
                f"{list(array.shape)} of {array.dtype}.",
                "audio",
            )
        samples = array.astype(np.float32)
        if array.dtype.kind != "f":
            samples /= np.float32(np.iinfo(array.dtype).max)
        if not np.isfinite(samples).all():
            raise RequestError("the audio holds NaN or infinity.", "audio")
        return samples


class CtcRules(SpeechRules):
    """The decoder spells what the frames of a recording say; nothing is prompted or sampled."""

    # Positions of these encoders are relative, or those of convolutions.
    encoder_length_keys: ClassVar[tuple[str, ...]] = ()
    draws: ClassVar[bool] = False

    @property
    def start_token_id(self) -> int:
        """The blank, which no text has."""
        return blank_of(self.config)

    def forced_tokens(self, decoder_prompt: Any, max_output_tokens: int) -> dict[int, int]:
        return {}

    def bad_words(self) -> list[list[int]]:
        return []

    def _both(
        self, encoder: SingletonPrompt, decoder: SingletonPrompt | None, params: SamplingParams
    ) -> RenderedPair:
        if decoder is not None:
            raise RequestError(
                "this model labels the frames of a recording (CTC): it takes no decoder_prompt.",
                "prompt",
            )
        for name in sorted(_NOT_READ):
            if getattr(params, name) not in (getattr(_DEFAULTS, name), None, [], {}):
                raise RequestError(
                    f"this model labels the frames of a recording (CTC): {name} cannot be obeyed.",
                    name,
                )
        return super()._both(encoder, None, params)


def _checked_features(value: Any) -> np.ndarray:
    """[frames, width], or [samples], float32. Raises RequestError."""
    array = _array(value, "features")
    if array.ndim not in (1, 2) or array.dtype.kind != "f" or not array.size:
        raise RequestError(
            "features must be an array of floats [frames, width], or [samples], not "
            f"{list(array.shape)} of {array.dtype}.",
            "features",
        )
    if not float(abs(array).max()) < _INFINITE:
        raise RequestError("features must be finite.", "features")
    return np.ascontiguousarray(array, np.float32)


def _array(value: Any, param: str) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise RequestError(f"{param} must be a list of numbers: {error}", param) from None
