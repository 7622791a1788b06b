"""Registries of pooling adapters, and of readers of pooling profiles and of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit_lm.config import PoolingProfile
from toolkit_lm.plugin.registry import PlainRegistry


class ConverterRegistry(PlainRegistry):
    """Pooling adapters, by their convert type: "embed", "classify", ...

    A target is a function (model class, vllm_config) -> pooling model class. It raises
    UnsupportedError for a model that it cannot convert.
    """

    noun = "convert type"


class PoolingProfileRegistry(PlainRegistry):
    """Readers of the pooling settings in checkpoints' files, by name.

    A target is a function (folder: Path, hf_config: dict, tokenizer: Path) -> PoolingProfile |
    None. Its module imports no torch. `hf_config` is the folder's config.json, `tokenizer` the
    folder of the tokenizer. It returns None for a folder without files of its kind, and raises
    CheckpointError for files that it does not understand.
    """

    noun = "reader of pooling profiles"

    def read(
        self, folder: Path, hf_config: dict[str, Any], tokenizer: Path
    ) -> PoolingProfile | None:
        """Reads the pooling settings in a checkpoint's files; None: no reader knows its files.

        Raises CheckpointError for files that a reader does not understand, and what `first_result`
        raises.
        """
        return self.first_result(PoolingProfile, folder, hf_config, tokenizer)


class PoolingInputsRegistry(PlainRegistry):
    """Readers of the texts of pooling requests, by name.

    A target is a function (config, renderer, plugins) -> toolkit_lm.pooling.PoolingInputs | None.
    Its module imports no torch. `config` is resolved; `plugins` is the loaded set. None: the reader
    is not for this engine's model.
    """

    noun = "reader of pooling inputs"
