"""Recipes of tiny random checkpoints that read pictures: sizes of their towers, tokens of pictures,
and the arrays that their processors make of one."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tiny_models
import torch
import transformers
from given_pictures import FIRST_SPECIAL

SIZES: dict[str, Any] = {
    **tiny_models.SIZES,
    **dict.fromkeys(("depth", "vision_layers", "perceiver_depth"), 2),
    **dict.fromkeys(("out_hidden_size", "projection_dim", "output_dim", "mm_hidden_size"), 32),
    **dict.fromkeys(("text_hidden_size", "qformer_hidden_size", "encoder_hidden_size"), 32),
    **dict.fromkeys(("projector_hidden_size", "connector_hidden_size", "mlp_dim"), 32),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 512),
    "image_size": 32,
    "patch_size": 8,
    "output_channels": 32,
    "downsample_channels": [32, 32],
}
MROPE = {"rope_parameters": {**tiny_models.ROPE, "mrope_section": [2, 1, 1]}}
WHOLE_MROPE = {"rope_parameters": {**MROPE["rope_parameters"], "partial_rotary_factor": 1.0}}
DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
PINS = {"image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]]}
WINDOWS = {"window_size": 32, "fullatt_block_indexes": [1]}
INSERTED = {"insert_layer_id": 1}
SMALL_VQ = {"base_channels": 32, "channel_multiplier": [1] * 4, "num_res_blocks": 1}
LETTERS = str.maketrans("0123456789", "ABCDEFGHIJ")
"""Digits as Chameleon writes them in the names of its tokens."""
DEEP: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon": {
        "vocabulary_map": {
            "<image>": 112,
            **{f"IMGIMG{str(i).translate(LETTERS)}Z": 113 + i for i in range(32)},
        },
        "vq_config": {**SMALL_VQ, "num_embeddings": 32, "embed_dim": 32, "latent_channels": 32},
    },
    "cosmos3_edge": {"projector_hidden_size": 32},
    "cosmos3_edge_text": MROPE,
    "cosmos3_edge_vision": {"num_patches": 16},
    "diffusion_gemma_text": {"top_k_experts": 2},
    "emu3": {
        "vocabulary_map": {
            "<image>": 112,
            "<|extra_200|>": 113,
            **{f"<|visual token {i:06}|>": 114 + i for i in range(32)},
        },
        "vq_config": {**SMALL_VQ, "codebook_size": 32},
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": {**tiny_models.ROPE, "mrope_section": [1, 1, 2]},
    },
    "deepseek_ocr2_text": {
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_key_value_heads": 4,
    },
    "exaone4_5_vision": {**WINDOWS, "num_key_value_heads": 2},
    # Tokens that a checkpoint forces are not the model's.
    "florence2": {"text_config": {"forced_eos_token_id": None}},
    # A window of 3 does not fill the 4 x 4 states of a picture.
    "florence_vision": {
        "depths": [1, 1],
        "patch_size": [7, 3],
        "patch_stride": [4, 2],
        "patch_padding": [3, 1],
        "patch_prenorm": [False, True],
        "embed_dim": [16, 32],
        "num_heads": [2, 4],
        "num_groups": [4, 2],
        "window_size": 3,
    },
    "glm46v_text": MROPE,
    "glm4v_text": MROPE,
    "glm4v_moe_text": {
        "rope_parameters": {
            **tiny_models.ROPE,
            "partial_rotary_factor": 1.0,
            "mrope_section": [2, 1, 1],
        }
    },
    "glm_ocr_text": MROPE,
    "glm5_next_text": {
        **tiny_models.MLA,
        "qk_rope_head_dim": 0,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "granite4_vision": {
        **PINS,
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [2, 3],
        "vision_config": {"hidden_size": 64},
    },
    "gemma4_vision": {"pooling_kernel_size": 2},
    "granite_docling_vision": {"deepstack_visual_indexes": [0, 1], "scale_factor": 2},
    "hunyuan_vl_text": {
        "rope_parameters": {**tiny_models.ROPE, "mrope_section": [1, 1, 1, 1]},
        "head_dim": 8,
    },
    "inkling2_vision": {"projection_hidden_dim": 32},
    # One layer for each factor of a patch's sides and frames, so that no layers are to be matched.
    "inkling_vision": {"num_hidden_layers": 4, "patch_size": 4},
    "janus_vqgan": {
        "base_channels": 32,
        "latent_channels": 32,
        "num_embeddings": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
    },
    "kimi_k25": {"projection_hidden_size": 32},
    "llama4_vision_model": {
        "vision_output_dim": 32,
        "intermediate_size": 128,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "llava_next": PINS,
    "llava_next_video": PINS,
    "llava_onevision": PINS,
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), INSERTED),
    **dict.fromkeys(("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision"), INSERTED),
    "mistral4": tiny_models.MLA,
    "mistral_large4_text": tiny_models.MLA,
    "molmo2_adapter": {"vision_feature_layer": [-1, -2], "num_key_value_heads": 4},
    "molmo2_vision": {"image_size": [32, 32], "num_position_embeddings": 16},
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "muse_spark_audio": {"hidden_sizes": (16, 16, 16, 16), "out_hidden_size": 32},
    # Attention as sharp as that of a checkpoint makes much of the last bit of random weights.
    "muse_spark_text": {"qk_scale_factor": 1.0},
    "nemotron_h_omni": {"vision_hidden_size": 32},
    "paddleocr_vl_text": MROPE,
    "qwen2_5_omni_text": MROPE,
    "qwen2_5_omni_vision_encoder": WINDOWS,
    "qwen2_5_vl_text": MROPE,
    "qwen2_5_vl_vision": WINDOWS,
    "qwen2_vl_text": MROPE,
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text"), MROPE),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), WHOLE_MROPE),
    **dict.fromkeys(("qwen3_vl_vision", "qwen3_vl_moe_vision"), DEEPSTACK),
    "t5gemma2_encoder": {"mm_tokens_per_image": 4},
    "radio": {"video_temporal_patch_size": 2, "patch_dim": 192},
    "vipllava": {"vision_feature_layers": [-1, 1]},
}
"""Other fields by model_type, of a whole config or of a part."""


def tiny_config(
    model_type: str,
    sizes: Mapping[str, Any] | None = None,
    deep: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """A config of a few thousand parameters. `sizes` and `deep`: others beside those above.

    Raises what its class raises where it cannot be.
    """
    config_class = transformers.CONFIG_MAPPING[model_type]
    ids = iter(range(FIRST_SPECIAL, tiny_models.VOCAB_SIZE))
    return config_class(
        **_fields(config_class, ids, {**SIZES, **(sizes or {})}, {**DEEP, **(deep or {})})
    )


def _fields(
    config_class: Any,
    ids: Iterator[int],
    sizes: Mapping[str, Any],
    deep: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    known = {
        *getattr(config_class, "__dataclass_fields__", ()),
        *(config_class.attribute_map or {}),
    }
    own = {name: size for name, size in sizes.items() if name in known}
    default: Any = None
    with contextlib.suppress(Exception):
        default = config_class()
    for name, part in config_class.sub_configs.items():
        part = getattr(part, "config_class", part)
        if part is transformers.AutoConfig:
            found = getattr(default, name, None)
            if not hasattr(found, "model_type"):
                continue
            part = type(found)
        own[name] = {"model_type": part.model_type, **_fields(part, ids, sizes, deep)}
    for name in sorted(known):
        if _is_token(name) and name not in own:
            with contextlib.suppress(Exception):
                value = getattr(default, name)
                is_media = any(word in name for word in _MEDIA)
                if is_media or (type(value) is int and value >= tiny_models.VOCAB_SIZE):
                    own[name] = next(ids)
    changes = {
        **tiny_models.OTHERS.get(config_class.model_type, {}),
        **deep.get(config_class.model_type, {}),
    }
    return merged(own, changes)


def merged(own: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(own)
    for name, value in changes.items():
        if (
            isinstance(value, Mapping)
            and isinstance(found.get(name), Mapping)
            and value.get("model_type", found[name].get("model_type"))
            == found[name].get("model_type")
        ):
            found[name] = merged(found[name], value)
        else:
            found[name] = value
    return found


_MEDIA = ("image", "img", "video", "vision", "media", "boi", "eoi", "patch")


def _is_token(name: str) -> bool:
    return name.endswith(("_token_id", "_token_index", "_id", "_index")) and "layer" not in name


def pictures(model: Any, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Arrays of one picture, as processors of different families make them."""
    config = model.config
    vision = getattr(config, "vision_config", config)
    generator = torch.Generator().manual_seed(seed)
    size = _number(vision, "image_size", 32)
    patch = _number(vision, "patch_size", 8)
    channels = _number(vision, "num_channels", _number(vision, "in_channels", 3))
    frames = _number(vision, "temporal_patch_size", _number(vision, "patch_temporal", 1))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    square = drawn(1, channels, size, size)
    sizes = torch.tensor([[size, size]])
    grid = torch.tensor([[1, 4, 4]])
    flat = drawn(16, channels * frames * patch * patch)
    yield {"pixel_values": square}
    yield {"pixel_values": square, "image_sizes": sizes}
    yield {"pixel_values": square[:, None]}
    yield {"pixel_values": drawn(1, 2, channels, size, size), "image_sizes": sizes}
    yield {"pixel_values": flat, "image_grid_thw": grid}
    yield {
        "pixel_values": flat.view(16, channels, frames * patch, patch)[:, :, :patch],
        "image_grid_thw": grid,
    }
    yield {"pixel_values": flat, "image_grid_hws": grid[:, 1:]}
    yield {
        "pixel_values": flat.view(16, channels, frames * patch, patch)[:, :, :patch],
        "image_grid_hws": grid[:, 1:],
    }
    yield {
        "pixel_values": drawn(1, 16, channels * patch * patch),
        "spatial_shapes": grid[:, 1:],
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }
    yield {
        "pixel_values": flat,
        "image_grid_thw": grid,
        "image_merge_sizes": torch.tensor([2]),
    }
    yield {
        "pixel_values": square[:, None],
        "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
    }
    yield {
        "pixel_values": drawn(1, channels, patch, 16 * patch),
        "target_sizes": grid[:, 1:],
    }
    # Columns and rows, row after row.
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(-1)[None]
    yield {
        "pixel_values": drawn(1, 16, channels * patch * patch),
        "image_position_ids": places,
    }
    yield {"image_patches": drawn(1, 16, channels * patch * patch)}
    yield {"pixel_values": square, "high_res_pixel_values": square}
    yield {"pixel_values": flat, "image_grid_hw": grid[:, 1:]}
    yield {"pixel_values": square, "image_grid_thw": grid}
    yield {"pixel_values": drawn(4, 2 * patch, 2 * patch, channels), "image_grid_thw": grid}
    yield {"pixel_values": square, "target_sizes": grid[:, 1:]}
    yield {
        "pixel_values": drawn(16, 2 * patch, 2 * patch, channels),
        "image_grid_thw": grid,
    }
    yield {"pixel_values": drawn(4, frames, patch, patch, channels)}
    squares = torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4)
    yield {
        "pixel_values": drawn(1, 16, channels * patch * patch),
        "image_token_pooling": squares,
        "image_grids": torch.tensor([[2, 2, 0, 0]]),
    }


def _number(config: Any, name: str, default: int) -> int:
    found = getattr(config, name, None)
    found = found[0] if isinstance(found, list | tuple) and found else found
    return found if isinstance(found, int) else default


def picture(model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Arrays of a picture that a model takes, and the tokens that stand for it, `input_ids`. Raises
    ValueError where it takes none of those known here."""
    token = image_token(model.config.to_dict())
    reasons = []
    for arrays, others in zip(pictures(model, seed), pictures(model, seed + 100), strict=True):
        if not arrays.keys() <= accepted(model):
            continue
        try:
            tokens = torch.full((features(model, arrays),), token)
            found, other = (logits(model, tokens, [given]) for given in (arrays, others))
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        if (found - other).abs().max() > 1e-3:
            return {**arrays, "input_ids": tokens}
        reasons.append("it changes no logits")
    raise ValueError(f"its recipe has no picture for it: {reasons[-1] if reasons else ''}")


def accepted(model: Any) -> frozenset[str]:
    """Names of the arguments that a model's forward takes, by itself or for its base model."""
    return frozenset(
        {
            *inspect.signature(model.forward).parameters,
            *inspect.signature(model.base_model.forward).parameters,
        }
    )


@torch.inference_mode()
def logits(
    model: Any,
    tokens: torch.Tensor,
    given: Sequence[Mapping[str, torch.Tensor]],
    num_drawn: int = 0,
    **others: torch.Tensor,
) -> torch.Tensor:
    """[T, V] of tokens [T] that have these pictures, by transformers alone. `num_drawn`: tokens
    after the prompt. `others`: further arguments, such as the decoder's tokens, which have an
    encoder-decoder model's logits."""
    arguments: dict[str, torch.Tensor] = {}
    if getattr(model.config, "is_encoder_decoder", False):
        others = {"decoder_input_ids": torch.tensor([[3]]), **others}
    if model.config.model_type == "paligemma":
        # Without it, how text alone is read depends on the attention's implementation.
        arguments["token_type_ids"] = torch.ones_like(tokens[None])
    if given:
        token = image_token(model.config.to_dict())
        kind = (tokens[None] == token).long()
        if model.config.model_type == "paligemma":
            # Tokens of the prompt, all of which see each other, and those after it.
            kind = (torch.arange(len(tokens)) >= len(tokens) - num_drawn)[None].long()
        arguments = {
            name: kind
            for name in ("mm_token_type_ids", "token_type_ids")
            if name in accepted(model)
        }
        for name in sorted({*given[0]} - {"input_ids"}):
            is_packed = name == "pixel_values" and "target_sizes" in given[0]
            arrays = [each[name] for each in given]
            if name == "image_token_pooling":
                # Numbers of patches, which go on from picture to picture.
                arrays = [array + 16 * index for index, array in enumerate(arrays)]
            arguments[name] = torch.cat(arrays, dim=-1 if is_packed else 0)
    found: torch.Tensor = model(
        input_ids=tokens[None], use_cache=False, **arguments, **others
    ).logits
    return found[0].float()


def image_token(config: Mapping[str, Any]) -> int:
    """The token whose embeddings a picture replaces."""
    for name in ("image_token_id", "image_token_index", "image_patch_id"):
        if type(config.get(name)) is int:
            return int(config[name])
    raise ValueError("its config names no token of pictures")


def features(model: Any, picture: Mapping[str, torch.Tensor]) -> int:
    """Number of embeddings that a model makes of a picture. Raises what its code raises."""
    if "image_patches" in picture:
        return int(picture["image_patches"].shape[1])
    with torch.inference_mode():
        function = getattr(model, "get_image_features", None)
        found = (function or model.base_model.get_image_features)(**picture)
    pooled = getattr(found, "pooler_output", found)
    found = found.last_hidden_state if pooled is None else pooled
    if found is None:
        return _fitting(model, picture)
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(part.shape[:-1].numel() for part in parts)


def _fitting(model: Any, picture: Mapping[str, torch.Tensor]) -> int:
    """Number of tokens that a model takes for a picture. Raises ValueError."""
    token = image_token(model.config.to_dict())
    error: Exception | None = None
    for count in range(1, 65):
        try:
            logits(model, torch.full((count,), token), [picture])
        except (RuntimeError, ValueError) as raised:
            error = raised
        else:
            return count
    raise ValueError(f"it takes no number of tokens for it: {error}")
