"""Finds a checkpoint's folder, reads its JSON files, and selects the model class."""

from __future__ import annotations

import json
import logging
import re
import reprlib
import warnings
from pathlib import Path
from typing import Any

import msgspec

from toolkit_lm.config import Checkpoint, ModelConfig, VllmConfig
from toolkit_lm.config.tasks import CONVERTIBLE_SUFFIXES, default_runner
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError, nearest, page
from toolkit_lm.model.hf_config import HFConfig
from toolkit_lm.plugin import Plugins, PluginWarning
from toolkit_lm.plugin.shipped import way_to_get
from toolkit_lm.resolution.twice import check_end_tokens, settled, with_quantization

logger = logging.getLogger(__name__)
_POOLING_SUFFIX = re.compile(
    r"(For(Sequence|Token)Classification|ForTextEncoding|EmbeddingModel|Model)$"
)
_POOLING_FILES = ("modules.json", "config_sentence_transformers.json", "artifact.metadata")
"""Files of sentence-transformers, PyLate and ColBERT's authors, which only pooling models have."""
_MOST_BYTES = 2**24
"""Most bytes of a JSON file. A config.json with 100,000 labels has 5 MB."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def find_source(config: ModelConfig, plugins: Plugins) -> Path:
    """Path that MODEL refers to: a name that a plugin registers, a local folder or file, or a hub
    id. Raises CheckpointError."""
    model = config.model
    if model in plugins.checkpoints:
        return Path(plugins.checkpoints.path(model))
    source = Path(model).expanduser()
    if source.exists():
        return source
    if _HUB_ID.fullmatch(model):
        return _download(config)
    way = way_to_get(plugins.checkpoints.noun, model)
    raise CheckpointError(
        f"model {model!r} is neither a folder nor a file, nor a hub id (owner/name), nor a name "
        f"that a plugin registers. {way or nearest(model, plugins.checkpoints.keys())}"
    )


def find_tokenizer(config: VllmConfig) -> str | None:
    """The option `tokenizer`, with a hub id replaced by its folder. The renderer refuses other
    values that are not folders. Raises CheckpointError."""
    name = config.renderer.tokenizer
    if name is None or Path(name).exists() or not _HUB_ID.fullmatch(name):
        return name
    return str(
        _download(msgspec.structs.replace(config.model, model=name, revision=None), "tokenizer")
    )


def _download(config: ModelConfig, kind: str = "model") -> Path:
    from huggingface_hub import snapshot_download

    patterns = [
        "*.json",
        *["*.safetensors"] * (kind == "model"),
        "*.jinja",
        "*.model",
        "*.txt",
        "artifact.metadata",
    ]
    if config.trust_remote_code:
        patterns.append("*.py")
    try:
        return Path(
            snapshot_download(config.model, revision=config.revision, allow_patterns=patterns)
        )
    except Exception as error:
        raise CheckpointError(
            f"{kind} {config.model!r} is not a local folder, and cannot be downloaded from the "
            f"hub: {type(error).__name__}: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object. Raises CheckpointError."""
    if not path.is_file():
        raise CheckpointError(
            f"{str(path.parent)!r} has no {path.name}: it is not a checkpoint in Hugging Face "
            "layout."
        )
    if path.stat().st_size > _MOST_BYTES:
        raise CheckpointError(f"{str(path)!r} is too large: it may have {_MOST_BYTES} bytes.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(
            f"{str(path)!r} must hold a JSON object, not a {type(data).__name__}."
        )
    return data


def read_checkpoint(config: VllmConfig, plugins: Plugins) -> Checkpoint:
    """Reads the model's data from the checkpoint's folder. Raises CheckpointError, which names the
    file or the architecture."""
    source = find_source(config.model, plugins)
    folder = _unpack(source, plugins)
    hf_config = _merged(read_json(folder / "config.json"), config.model.hf_overrides)
    _check_config(hf_config, folder / "config.json")
    hf_config = _with_architectures(settled(hf_config), folder, plugins)
    hf_config = with_quantization(folder, hf_config, read_json)
    generation_source = config.model.generation_config
    generation = (
        folder if generation_source in ("checkpoint", "none") else Path(generation_source)
    ) / "generation_config.json"
    stated = read_json(generation) if generation.is_file() or generation.parent != folder else {}
    stated = _merged(stated, config.model.override_generation_config)
    check_end_tokens(hf_config, stated)
    checkpoint = Checkpoint(
        path=str(folder),
        source=str(source),
        architecture=_architectures(hf_config, folder)[0],
        hf_config=hf_config,
        generation_config=stated,
    )
    key, _ = choose_model(config.with_checkpoint(checkpoint), plugins)
    if config.model.model_impl == "auto" and plugins.models.get(key).is_fallback:
        warnings.warn(
            f"no installed plugin has the architecture {checkpoint.architecture!r} of "
            f"{str(folder)!r}: the fallback {key!r} runs it. "
            f"model_impl={key!r} silences this.",
            PluginWarning,
            stacklevel=2,
        )
    tokenizer = Path(config.renderer.tokenizer or folder)
    profile = plugins.pooling_profiles.read(folder, hf_config, tokenizer)
    if profile is None:
        _check_nothing_unread(folder, plugins)
    return msgspec.structs.replace(checkpoint, architecture=key, pooling_profile=profile)


def _unpack(file: Path, plugins: Plugins) -> Path:
    """Returns a checkpoint's folder, or the one that stands for a checkpoint of one file, and for a
    folder without config.json."""
    reader = None if (file / "config.json").is_file() else plugins.loaders.reading(file)
    if reader is None:
        if file.is_dir():
            return file
        known = [pattern for entry in plugins.loaders.entries() for pattern in entry.reads]
        way = way_to_get(plugins.loaders.noun, file.suffix.removeprefix("."))
        raise CheckpointError(
            f"model {str(file)!r} is a file that no load format reads. Give a folder in Hugging "
            "Face layout (config.json, *.safetensors, "
            f"tokenizer.json), or {', '.join(known)}. {way or plugins.loaders.hint}".rstrip()
        )
    loader = plugins.loaders.load(reader)
    owner = plugins.loaders.get(reader).owner
    with owner.boundary(f"unpacking {str(file)!r}"):
        return Path(loader.unpack(file, plugins.options(owner.name)))


def choose_load_format(config: VllmConfig, plugins: Plugins) -> str:
    """The option's load format, otherwise the first that reads the checkpoint. Raises ConfigError
    for an unknown one."""
    assert config.checkpoint is not None
    if config.load.load_format != "auto":
        return plugins.loaders.get(config.load.load_format).key
    # If nothing can be read, the error of safetensors describes best what is missing.
    return plugins.loaders.reading(Path(config.checkpoint.source)) or "safetensors"


def choose_quantization(config: VllmConfig, plugins: Plugins) -> str:
    """The option's quantization, otherwise the checkpoint's own, otherwise the load format's.
    Raises UnsupportedError for one that no plugin has."""
    stated = config.hf_config.get("quantization_config")
    wanted = config.load.quantization
    method = stated.get("quant_method") if isinstance(stated, dict) else stated
    if wanted == "auto":
        load_format = choose_load_format(config, plugins)
        known = load_format in plugins.loaders
        wanted = str(method or (plugins.loaders.get(load_format).quantization if known else "none"))
    at_load = plugins.quantization.at_load(wanted)
    if not stated and at_load in plugins.quantization:
        return at_load
    if wanted not in plugins.quantization and (stated or wanted != "none"):
        weights = f"quantized weights ({method!r})" if stated else "weights"
        if stated and at_load in plugins.quantization:
            raise UnsupportedError(
                f"quantization {wanted!r} is for weights of floats, and those of "
                f"{config.model.model!r} are quantized already ({method!r})."
            )
        key = wanted if stated else at_load
        way = way_to_get(plugins.quantization.noun, key)
        suffix = plugins.quantization.at_load("")
        able = [
            name.removesuffix(suffix)
            for name in plugins.quantization
            if (
                not name.endswith(suffix)
                if stated
                else plugins.quantization.ask(name, config, by_name=True) is None
            )
        ]
        raise UnsupportedError(
            f"no loaded plugin has a quantization {wanted!r} for the {weights} of "
            f"{config.model.model!r}. Known: {', '.join(able) or 'none'}. "
            f"{way} {plugins.quantization.hint}".rstrip()
        )
    return wanted


def _check_nothing_unread(folder: Path, plugins: Plugins) -> None:
    """Raises CheckpointError if the folder has pooling settings that no plugin reads: its vectors
    would be wrong."""
    for name in _POOLING_FILES:
        if (folder / name).is_file():
            raise CheckpointError(
                f"{str(folder / name)!r} says how the model pools, and no loaded plugin reads it. "
                f"{plugins.pooling_profiles.way_out}".rstrip()
            )


_MOST = (
    dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers"), 2**10)
    | dict.fromkeys(("encoder_layers", "decoder_layers", "num_layers", "num_decoder_layers"), 2**10)
    | dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "head_dim"), 2**12
    )
    | dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "num_heads", "d_kv"), 2**12
    )
    | dict.fromkeys(
        (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "n_embd",
            "n_inner",
            "ffn_dim",
            "d_model",
            "dim",
        ),
        2**24,
    )
    | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "decoder_vocab_size"), 2**24)
    | dict.fromkeys(("max_position_embeddings", "n_positions"), 2**48)
)
"""Keys of config.json that, if present, are counts of at least 1, with the most that each may be:
far more than any model has."""


def _merged(stated: dict[str, Any], overrides: str | dict[str, Any]) -> dict[str, Any]:
    """Fields with others put over them, to any depth. Raises ConfigError for text that is not a
    JSON object."""
    if isinstance(overrides, str):
        try:
            overrides = msgspec.json.decode(overrides, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{overrides!r} is not a JSON object of fields: {error}") from None
    merged = {**stated, **overrides}
    for name, value in overrides.items():
        if isinstance(value, dict) and isinstance(stated.get(name), dict):
            merged[name] = _merged(stated[name], value)
    return merged


def _check_config(hf_config: dict[str, Any], path: Path) -> None:
    """Checks the numbers in config.json that would otherwise fail deep inside a model class, or
    never end. Raises CheckpointError."""
    sides = [side for key in ("encoder", "decoder") if isinstance(side := hf_config.get(key), dict)]
    for key, value in [
        item
        for part in (hf_config, HFConfig(hf_config).get("text_config", dict, {}), *sides)
        for item in part.items()
    ]:
        most = _MOST.get(key)
        # A list has a count for each layer: classes that do not accept lists say so.
        if (
            most
            and value is not None
            and not isinstance(value, list)
            and not (type(value) is int and 1 <= value <= most)
        ):
            raise CheckpointError(
                f"{str(path)!r}: {key} must be an integer of at least 1, at most {most}, not "
                f"{reprlib.repr(value)}."
            )


def choose_model(config: VllmConfig, plugins: Plugins) -> tuple[str, list[tuple[str, str | None]]]:
    """Key of the model class in the registry, and each candidate with the reason for its refusal
    (None: able).

    Raises ConfigError (no such fallback), UnsupportedError (the requested fallback refuses) and
    CheckpointError (nothing runs the architecture).
    """
    assert config.checkpoint is not None
    checkpoint = config.checkpoint
    wanted = config.model.model_impl
    architectures = _architectures(checkpoint.hf_config, Path(checkpoint.path))
    registered = [name for name in architectures if name in plugins.models.architectures()]
    if wanted != "auto":
        if wanted not in plugins.models.fallbacks():
            known = nearest(wanted, ["auto", *plugins.models.fallbacks()])
            raise ConfigError(f"no model implementation {wanted!r} is registered. {known}")
        refusal = plugins.models.ask(wanted, config, by_name=True)
        if refusal is not None:
            able = f" Supported: {registered[0]} (model_impl='auto')." if registered else ""
            raise UnsupportedError(
                f"model implementation {wanted!r} cannot run {architectures[0]!r} of "
                f"{checkpoint.path!r}: {refusal}.{able}"
            )
        return wanted, [(wanted, None), *((name, None) for name in registered)]
    if not registered:
        registered = [
            sibling
            for name in architectures
            if (sibling := _to_convert(name, checkpoint.hf_config, plugins)) is not None
        ]
    if registered:
        return registered[0], [(registered[0], None)]
    candidates: list[tuple[str, str | None]] = [
        (architectures[0], "no installed plugin registers it")
    ]
    for name in plugins.models.fallbacks():
        candidates.append((name, plugins.models.ask(name, config)))
        if candidates[-1][1] is None:
            return name, candidates
    raise _nothing_runs(architectures[0], checkpoint.path, candidates[1:], plugins)


def _to_convert(architecture: str, hf_config: dict[str, Any], plugins: Plugins) -> str | None:
    """The language model that a pooling adapter can convert to `architecture`: for
    LlamaForSequenceClassification, LlamaForCausalLM. None: an encoder-decoder model, which has no
    classifier, and a config of several parts, which is not a language model's."""
    runner, convert = default_runner(architecture)
    if runner != "pooling" or (convert == "classify" and "text_config" in hf_config):
        return None
    stem = _POOLING_SUFFIX.sub("", architecture)
    return next(
        (
            f"{stem}{suffix}"
            for suffix in CONVERTIBLE_SUFFIXES
            if f"{stem}{suffix}" in plugins.models.architectures()
            and not (
                convert == "classify" and plugins.models.get(f"{stem}{suffix}").encoder_decoder
            )
        ),
        None,
    )


def _with_architectures(
    hf_config: dict[str, Any], folder: Path, plugins: Plugins
) -> dict[str, Any]:
    """Adds the known architecture of the `model_type` if config.json names none, or one of another
    `model_type`."""
    named = hf_config.get("architectures")
    model_type = hf_config.get("model_type")
    known: list[str] = []
    if not named:
        known = plugins.models.architectures_of(model_type) if isinstance(model_type, str) else []
        if len(known) > 1:
            raise CheckpointError(
                f"{str(folder / 'config.json')!r} names no model class, and model_type "
                f"{model_type!r} has several: "
                f'add "architectures" with one of {", ".join(known)}.'
            )
        return {**hf_config, "architectures": known} if known else hf_config
    name = _architectures(hf_config, folder)[0]
    others = [
        entry
        for entry in plugins.models.entries()
        if entry.model_type is not None and entry.model_type == model_type
    ]
    is_named = name in plugins.models and plugins.models.get(name).model_type not in (
        None,
        model_type,
    )
    if not is_named or len(others) != 1:
        return hf_config
    known = [others[0].key]
    logger.warning(
        "config.json says architectures [%r], and model_type %r, which is that of %s: it counts.",
        name,
        model_type,
        known[0],
    )
    return {**hf_config, "architectures": known}


def _architectures(hf_config: dict[str, Any], folder: Path) -> list[str]:
    architectures = hf_config.get("architectures")
    if (
        not isinstance(architectures, list)
        or not architectures
        or not all(isinstance(a, str) and len(a) < 200 for a in architectures)
    ):
        found = f"'architectures' is {reprlib.repr(architectures)}"
        raise CheckpointError(f"{str(folder / 'config.json')!r} names no model class: {found}.")
    return architectures


def _nothing_runs(
    name: str, path: str, fallbacks: list[tuple[str, str | None]], plugins: Plugins
) -> CheckpointError:
    absent = ", ".join(
        f"{info.name} ({info.status})" for info in plugins.infos if info.status != "ok"
    )
    hint = ""
    if absent:
        hint = (
            f" Plugins that are not in use, and might have it: {absent} "
            "(see `toolkit plugins list`)."
        )
    refused = "".join(
        f" The fallback {fallback!r} cannot run it: {refusal}." for fallback, refusal in fallbacks
    )
    # There may be many: if none is similar, the error says where they are listed.
    near = nearest(
        name,
        plugins.models.architectures(),
        otherwise="`toolkit plugins show PLUGIN` lists a plugin's architectures.",
    )
    way = (
        way_to_get(plugins.models.noun, name)
        or "Install a distribution that registers it (toolkit-lm-...), or write one:"
    )
    return CheckpointError(
        f"no installed plugin has the architecture {name!r} of {path!r}.{refused} {near}{hint} "
        f"{way} {page('hooks/toolkit_register_models.md')}"
    )
