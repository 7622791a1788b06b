"""Checkpoints in Mistral's own layout: params.json and consolidated.safetensors. Importing it needs
no torch."""

from __future__ import annotations

import hashlib
import json
import reprlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import CheckpointLoader

from toolkit_lm_loaders.mistral_vision import VISION, processor_files, vision_config

if TYPE_CHECKING:
    from torch import Tensor

PARAMS = "params.json"
_LAYOUT = 2
"""Version of what is unpacked. It rises with each change of what is written into the folder."""
_MOST_BYTES = 2**20
"""Most bytes of params.json."""
_MAX_POSITIONS = 128_000
"""Longest sequence where params.json states none, as in vLLM."""
_RENAMED = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
}
"""Keys that params.json must have, and those of config.json."""
_OTHERS = {
    *("head_dim", "n_kv_heads", "rope_theta", "sliding_window", "tied_embeddings", "moe"),
    *("max_seq_len", "max_position_embeddings", "model_type", "causal", "max_batch_size"),
}
_MOE = {"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"}
_TOKENIZER = ("tekken.json", "tokenizer*", "special_tokens_map.json", "chat_template*", "*.jinja")
_PROCESSOR = ("preprocessor_config.json", "processor_config.json")
_WAY = "Use the same model's files in the layout of transformers (config.json)."


class MistralLoader(CheckpointLoader):
    """A folder of Mistral's own files: Mistral and Mixtral, Pixtral and Mistral 3. Tensors are
    named and laid out as in the layout of transformers.

    Raises CheckpointError for a config.json that says something else than params.json.
    """

    def __init__(self, source: str | Path) -> None:
        super().__init__(source)
        self._config = hf_config(self.source)
        config = self.source / "config.json"
        if config.is_file():
            _check_same(_read(config), self._config, config)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        from toolkit_lm_loaders.consolidated import ConsolidatedWeights

        return iter(ConsolidatedWeights(self.source, self._config))

    def names(self) -> list[str]:
        from toolkit_lm_loaders.consolidated import ConsolidatedWeights

        return ConsolidatedWeights(self.source, self._config).names()

    @classmethod
    def unpack(cls, file: Path, options: Any) -> Path:
        if not file.is_dir():
            file = file.parent
        config = hf_config(file)
        kept = sorted(
            {path for pattern in (*_TOKENIZER, *_PROCESSOR) for path in file.glob(pattern)}
        )
        stated = json.dumps([_LAYOUT, str(file.resolve()), config, [path.name for path in kept]])
        key = hashlib.sha256(stated.encode()).hexdigest()[:32]
        folder = Path(platformdirs.user_cache_dir("toolkit_lm")) / "mistral" / key
        if folder.is_dir():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        written = {"config.json": config}
        if "vision_config" in config:
            written |= processor_files(config, _read(file / PARAMS)[VISION])
        for name, content in written.items():
            if name not in {path.name for path in kept}:
                (made / name).write_text(json.dumps(content), encoding="utf-8")
        for path in kept:
            (made / path.name).symlink_to(path.resolve())
        try:
            made.rename(folder)
        except OSError:
            # Another process was faster.
            shutil.rmtree(made)
        return folder


def hf_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder's params.json. Raises CheckpointError for keys that are not
    Mistral's, Mixtral's, Pixtral's or Mistral 3's."""
    path = folder / PARAMS
    params = _read(path)
    text = _text_config({key: value for key, value in params.items() if key != VISION}, path)
    vision = params.get(VISION)
    return text if vision is None else vision_config(text, path, vision)


def _text_config(params: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The config.json of the language part."""
    unknown = {
        key: value
        for key, value in params.items()
        if key not in _RENAMED and key not in _OTHERS and value
    }
    if unknown:
        key, value = next(iter(unknown.items()))
        raise CheckpointError(
            f"{path}: {key} is {reprlib.repr(value)}, which is not read in this layout: only "
            f"Mistral, Mixtral, Pixtral and Mistral 3. {_WAY}"
        )
    if missing := [key for key in _RENAMED if key not in params]:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}.")
    config = {ours: params[key] for key, ours in _RENAMED.items()}
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": params.get("n_kv_heads") or params["n_heads"],
        "rope_theta": float(params.get("rope_theta") or 10000.0),
        "sliding_window": params.get("sliding_window"),
        "max_position_embeddings": params.get("max_position_embeddings")
        or params.get("max_seq_len")
        or _MAX_POSITIONS,
        "tie_word_embeddings": bool(params.get("tied_embeddings")),
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if params.get("head_dim"):
        config["head_dim"] = params["head_dim"]
    if moe := params.get("moe"):
        if not isinstance(moe, Mapping) or moe.keys() != _MOE.keys():
            raise CheckpointError(
                f"{path}: moe must have {' and '.join(_MOE)} alone, not {reprlib.repr(moe)}. {_WAY}"
            )
        config |= {ours: moe[key] for key, ours in _MOE.items()}
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    return config


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}.")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise CheckpointError(f"{path} is too large: it may have {_MOST_BYTES} bytes.")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return data


def _check_same(stated: Mapping[str, Any], made: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError where config.json, which counts, and params.json differ."""
    text = stated.get("text_config")
    if isinstance(text, Mapping) != ("text_config" in made):
        raise CheckpointError(
            f"{path} and {PARAMS} tell of different models: only one of them reads pictures."
        )
    if isinstance(text, Mapping):
        stated = text
        made = made["text_config"]
    rope = stated.get("rope_parameters") or {}
    compared = (*_RENAMED.values(), "num_key_value_heads", "sliding_window", "rope_theta")
    for key in compared:
        value = rope.get(key) if key == "rope_theta" and key not in stated else stated.get(key)
        if value is not None and value != made[key]:
            raise CheckpointError(
                f"{path}: {key} is {reprlib.repr(value)}, and {made[key]!r} by {PARAMS}: the two "
                "tell of different models."
            )
