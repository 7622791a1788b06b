"""Pooling: adapters, and readers of profiles and of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit_lm.config import PoolingProfile
from toolkit_lm.plugin.registry import PlainRegistry


class ConverterRegistry(PlainRegistry):
    """Pooling adapters, by the convert type that they are for: "embed", "classify", ...

    A target is a function (model class, vllm_config) -> pooling model class. It raises
    UnsupportedError for what it cannot convert.
    """

    noun = "convert type"


class PoolingProfileRegistry(PlainRegistry):
    """Readers of what checkpoints' files say of pooling, by name.

    A target is a function (folder: Path, hf_config: dict, tokenizer: Path) -> PoolingProfile |
    None. Its module imports no torch. `hf_config` is the folder's config.json, `tokenizer` the
    folder of the tokenizer. It returns None for a folder without files of its kind, and raises
    CheckpointError for files that it does not understand.
    """

    noun = "reader of pooling profiles"

    def read(
        self, folder: Path, hf_config: dict[str, Any], tokenizer: Path
    ) -> PoolingProfile | None:
        """What the files of a checkpoint say; None: no reader knows its files.

        Raises CheckpointError for files that a reader does not understand, and as `first_result`
        does.
        """
        return self.first_result(PoolingProfile, folder, hf_config, tokenizer)


class PoolingInputsRegistry(PlainRegistry):
    """What reads the texts of pooling requests, by name.

    A target is a function (config, renderer, plugins) -> toolkit_lm.pooling.PoolingInputs | None.
    Its module imports no torch. `config` is resolved; `plugins` is the loaded set. None: it does
    not read those of this engine.
    """

    noun = "reader of pooling inputs"
