"""Recipes of tiny random checkpoints that hear: sizes of their encoders, and the arrays that their
processors make of a recording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import image_text
import tiny_models
import torch

MELS = 16
FRAMES = 200
SAMPLES = 1280
SIZES: dict[str, Any] = {
    **dict.fromkeys(("conv_dim", "tdnn_dim"), (16, 16)),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
    **dict.fromkeys(("num_mel_bins", "input_feat_per_channel", "input_dim"), MELS),
    **dict.fromkeys(("subsampling_conv_channels", "conv_channels", "num_codevectors_per_group"), 8),
    **dict.fromkeys(("encoder_num_hidden_layers", "decoder_num_hidden_layers"), 2),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_key_value_heads", "decoder_num_key_value_heads"), 4),
    **dict.fromkeys(("speech_encoder_layers", "speech_encoder_attention_heads"), 2),
    "speech_encoder_intermediate_size": 48,
    "feature_projection_input_dim": MELS,
    "max_source_positions": FRAMES // 2,
    "max_speech_positions": FRAMES,
    "max_target_positions": 256,
    "classifier_proj_size": 16,
    "d_ff": 48,
    "d_kv": 8,
}
"""Sizes of encoders of sound, by the names of all families."""
_STACKED = {"intermediate_size": 128, "encoder_ffn_dim": 128}
"""Four states in a row."""
_TOKEN = {"audio_token_id": 112}
_CODEC = {"num_filters": 4, "downsampling_ratios": [4, 5], "depths": [1, 1, 1], "hidden_size": 8}
DEEP: dict[str, dict[str, Any]] = {
    "dia_decoder": {
        **dict.fromkeys(("cross_num_attention_heads", "cross_num_key_value_heads"), 4),
        "cross_head_dim": 8,
        "cross_hidden_size": 32,
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "fun_asr_nano_encoder": {
        "num_mel_bins": MELS,
        "num_stacked_frames": 4,
        "num_timestamp_prediction_layers": 1,
    },
    "glmasr_encoder": _STACKED,
    "granite_speech5_encoder": {"num_key_value_heads": 4},
    **{name: {"downsample_rate": 4} for name in ("granite_speech", "granite_speech_plus")},
    "mimi": {"upsample_groups": 32, "codebook_size": 64, "codebook_dim": 32, "num_filters": 4},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "moss_transcribe_diarize": {
        "audio_config": {
            **tiny_models.WHISPER,
            "num_mel_bins": MELS,
            "max_source_positions": FRAMES // 2,
        }
    },
    "speech-encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "vibevoice_acoustic_tokenizer": _CODEC,
    "vibevoice_acoustic_tokenizer_encoder": _CODEC,
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 1280},
    "voxtral": _TOKEN,
    "voxtral_encoder": _STACKED,
    "voxtral_realtime": _TOKEN,
    "voxtral_realtime_encoder": _STACKED,
    "whisper": {
        "begin_suppress_tokens": None,
        "decoder_start_token_id": 3,
        "suppress_tokens": None,
    },
}
"""Other fields by model_type, of a whole config or of a part."""


LANGUAGE_MODELS = (
    *("audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "musicflamingo"),
    *("moss_transcribe_diarize", "nemo_speechlm", "qwen2_audio", "qwen3_asr", "vibevoice_asr"),
    *("voxtral", "voxtral_realtime"),
)
"""Types that transformers lists among encoder-decoder models, and whose recordings stand in the
prompt of a decoder alone."""


def tiny_config(model_type: str) -> Any:
    """A config of a few thousand parameters. Raises what its class raises where it cannot be."""
    return image_text.tiny_config(model_type, SIZES, DEEP)


def sounds(seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Arrays of one recording, as processors of different families make them."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    stacked = drawn(1, FRAMES, 4 * MELS)
    whole = torch.ones(1, FRAMES, dtype=torch.long)
    for features in (drawn(1, MELS, FRAMES), drawn(1, FRAMES, MELS), drawn(1, FRAMES, 32), stacked):
        given = {"input_features": features}
        yield {**given, "input_features_mask": whole}
        yield {**given, "input_features_mask": whole.bool()}
        yield {**given, "feature_attention_mask": whole}
        yield given
    yield {
        "input_features": stacked[:, : FRAMES // 4],
        "input_features_mask": whole[:, : FRAMES // 4],
    }
    heard = torch.ones(1, SAMPLES, dtype=torch.long)
    yield {"input_values": drawn(1, SAMPLES), "attention_mask": heard}
    yield {"input_values": drawn(1, SAMPLES)}
    yield {"input_values": drawn(1, 1, SAMPLES)}


def sound(model: Any, seed: int = 0, count: int | None = None) -> dict[str, torch.Tensor]:
    """Arrays of a recording that a model takes; for a language model also the tokens that stand for
    it, `input_ids`. `count`: the number of these tokens, where it is known.

    Raises ValueError where it takes none of those known here.
    """
    reasons = []
    for arrays, others in zip(sounds(seed), sounds(seed + 100), strict=True):
        if not arrays.keys() <= image_text.accepted(model):
            continue
        try:
            tokens = torch.tensor([3, 4])
            given = dict(arrays)
            if not model.config.is_encoder_decoder and (token := audio_token(model)) is not None:
                tokens = torch.full((count or features(model, arrays),), token)
                given["input_ids"] = tokens
            found, other = (logits(model, tokens, [each]) for each in (arrays, others))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if found.shape == other.shape and (found - other).abs().max() > 1e-6:
            return given
        reasons.append("it changes no logits")
    raise ValueError(f"its recipe has no sound for it: {reasons}")


@torch.inference_mode()
def logits(
    model: Any, tokens: torch.Tensor, given: Sequence[Mapping[str, torch.Tensor]]
) -> torch.Tensor:
    """[T, V] by transformers alone: of tokens [T] that have these recordings, of a decoder's
    tokens, or of frames."""
    arrays: dict[str, Any] = {
        name: torch.cat([each[name] for each in given])
        for name in sorted({name for each in given for name in each} - {"input_ids"})
    }
    if model.config.is_encoder_decoder:
        arrays = {"decoder_input_ids": tokens[None], "use_cache": False, **arrays}
    elif audio_token(model) is not None:
        arrays = {"input_ids": tokens[None], "use_cache": False, **arrays}
    if "sample" in image_text.accepted(model):
        # Otherwise it adds noise to what it hears.
        arrays["sample"] = False
    found: torch.Tensor = model(**arrays).logits
    return found[0].float()


def audio_token(model: Any) -> int | None:
    """The token whose embeddings a recording replaces. None: there is none."""
    for name in ("audio_token_id", "audio_token_index", "audio_pad_token_id"):
        if type(found := getattr(model.config, name, None)) is int:
            return int(found)
    return None


def features(model: Any, arrays: Mapping[str, torch.Tensor]) -> int:
    """Number of tokens that stand for a recording: the one that a model takes. Raises
    ValueError."""
    token = audio_token(model)
    assert token is not None
    error: Exception | None = None
    for count in range(FRAMES // 2, 0, -1):
        try:
            logits(model, torch.full((count,), token), [arrays])
        except Exception as raised:
            error = raised
        else:
            return count
    raise ValueError(f"it takes no number of tokens for it: {error}")


@torch.inference_mode()
def vary(model: Any) -> None:
    """Makes a model that labels frames give them many labels: the head's bias makes up for what all
    frames of noise have in common."""
    head = next(getattr(model, name) for name in ("lm_head", "ctc_head") if hasattr(model, name))
    (arrays,) = [sound(model, 5)]
    found = logits(model, torch.tensor([3, 4]), [arrays])
    head.bias -= found.mean(dim=0)
