"""Config of a drafter's own checkpoint, and its comparison with the target's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve_configured

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_TOKENIZER = "tokenizer.json"


def on_last_stage(config: VllmConfig) -> VllmConfig:
    """The config of layers that the last pipeline stage has as a whole."""
    parallel = replace(
        config.parallel,
        pipeline_parallel_size=1,
        rank=config.parallel.tensor_parallel_rank,
        enable_expert_parallel=False,
    )
    return replace(config, parallel=parallel)


def draft_config(
    target: VllmConfig,
    plugins: Plugins,
    *,
    model: str,
    dtype: Dtype,
    quantization: str | None,
) -> VllmConfig:
    """The target's config with the checkpoint and the load options of the draft model. Raises
    ConfigError, which names both, for a draft that cannot draft for the target."""
    names = f"draft model {model!r} and model {target.model.model!r}"
    try:
        found = resolve_configured(
            target.replace(
                model=model,
                revision=None,
                dtype=dtype,
                quantization=quantization or "auto",
                load_format="auto",
                model_impl="auto",
                kv_cache_dtype="auto",
                kv_cache_dtype_skip_layers=[],
                tokenizer=target.renderer.tokenizer or _folder(target),
                drafter=None,
            ),
            plugins,
        )
    except (ConfigError, CheckpointError, UnsupportedError) as error:
        raise ConfigError(f"{names}: {error}") from error
    if found.model.runner != "generate":
        raise ConfigError(f"{names}: the draft model pools, and drafts are generated.")
    if reason := _differing(target, found):
        raise ConfigError(f"{names} have different vocabularies: {reason}.")
    return on_last_stage(
        replace(
            target,
            checkpoint=found.checkpoint,
            load=found.load,
            cache=found.cache,
            model=replace(target.model, dtype=found.model.dtype),
        )
    )


def _folder(config: VllmConfig) -> str:
    assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    return config.checkpoint.path


def _differing(target: VllmConfig, draft: VllmConfig) -> str | None:
    """Why the draft's token ids are not the target's; None: they are."""
    sizes = draft.vocab_size, target.vocab_size
    own, others = (_vocabulary(_folder(config)) for config in (draft, target))
    if own is None or others is None:
        if None in sizes or sizes[0] > sizes[1]:  # type: ignore[operator]
            return (
                f"{sizes[0]} and {sizes[1]} tokens, and without {_TOKENIZER} of both it cannot be "
                "seen that the first are the same"
            )
        return None
    # Ids that only one side has are never drafted, or never taken.
    for token_id, token in sorted(own.items()):
        if token_id in others and others[token_id] != token:
            return f"token {token_id} is {token!r} of the one, {others[token_id]!r} of the other"
    return None


def _vocabulary(folder: str) -> dict[int, str] | None:
    """Tokens by id, from tokenizer.json; None: there is none, or it has no such table."""
    path = Path(folder) / _TOKENIZER
    if not path.is_file():
        return None
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        added = {token["id"]: token["content"] for token in data.get("added_tokens") or ()}
        table = data["model"]["vocab"]
        if isinstance(table, dict):
            return {index: token for token, index in table.items()} | added
        return {index: token for index, (token, _) in enumerate(table)} | added
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
