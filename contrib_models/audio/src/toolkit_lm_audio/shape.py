"""AudioShape: what a checkpoint's `audio_config` says of its audio tower. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import HFConfig

_DEFAULTS: dict[str, Any] = {
    "model_type": "qwen2_audio_encoder",
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "activation_function": "gelu",
    "scale_embedding": False,
    "max_source_positions": 1500,
}
"""Defaults of transformers for keys that a config leaves out."""
_MOST = {
    "num_mel_bins": 2**10,
    "encoder_layers": 2**10,
    "encoder_attention_heads": 2**10,
    "encoder_ffn_dim": 2**18,
    "d_model": 2**16,
    "max_source_positions": 2**16,
}
"""Far more than any tower has."""
TEXT_DEFAULTS: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 151936,
}
"""Defaults of transformers for `text_config`, which published configs leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioShape:
    """Shape of Qwen2-Audio's tower: Whisper's encoder, with its states pooled in pairs."""

    config: HFConfig
    """`audio_config`, with what it leaves out."""
    num_mels: int
    num_states: int
    """States of a window: half as many as its frames."""

    @classmethod
    def read(cls, hf_config: Mapping[str, Any]) -> AudioShape:
        """Reads a config.json. Raises CheckpointError, and UnsupportedError for another kind of
        tower."""
        audio_config: dict[str, Any] = HFConfig(hf_config).get("audio_config", dict) or {}
        config = HFConfig(
            {
                **_DEFAULTS,
                **{key: value for key, value in audio_config.items() if value is not None},
            }
        )
        kind = config.require("model_type", str)
        if kind != _DEFAULTS["model_type"]:
            raise UnsupportedError(
                f"config.json: there is no audio tower of model_type {kind!r}, only of "
                f"{_DEFAULTS['model_type']}."
            )
        for name, most in _MOST.items():
            if not 1 <= config.require(name, int) <= most:
                raise CheckpointError(
                    f"config.json: {name} of 'audio_config' must be from 1 to {most}, not "
                    f"{config.values[name]}."
                )
        if config.require("d_model", int) % config.require("encoder_attention_heads", int):
            raise CheckpointError(
                "config.json: d_model of 'audio_config' must be a multiple of "
                "encoder_attention_heads."
            )
        return cls(
            config=config,
            num_mels=config.require("num_mel_bins", int),
            num_states=config.require("max_source_positions", int),
        )

    @property
    def num_frames(self) -> int:
        """Frames of a window."""
        return 2 * self.num_states

    def states(self, num_frames: int) -> int:
        """Number of states for `num_frames` frames of a recording."""
        return (num_frames + 1) // 2

    def tokens(self, num_frames: int) -> int:
        """Number of tokens for `num_frames` frames of a recording."""
        return self.states(num_frames) // 2


def text_size(text: Mapping[str, Any]) -> int:
    """The hidden size of a `text_config`."""
    config = HFConfig({**TEXT_DEFAULTS, **text})
    return config.require("hidden_size", int)
