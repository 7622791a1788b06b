"""An engine's config with the sections of vLLM's."""

from __future__ import annotations

import importlib
from typing import Any

from toolkit_lm.config import VllmConfig


class ModelView:
    """The section `model_config`."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and output."""
        return self._config.max_model_len

    @property
    def hf_config(self) -> Any:
        """The checkpoint's config, as transformers reads it."""
        assert self._config.checkpoint is not None, "an engine has read its checkpoint"
        auto = importlib.import_module("transformers").AutoConfig
        return auto.from_pretrained(self._config.checkpoint.path)

    def get_vocab_size(self) -> int:
        """Number of tokens of the vocabulary."""
        return int(self.hf_config.get_text_config().vocab_size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config.model, name)


class ConfigView:
    """The config of an engine: model_config, cache_config, ... in addition to the names here."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self.model_config = ModelView(config)
        self.cache_config = config.cache
        self.scheduler_config = config.scheduler
        self.parallel_config = config.parallel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
