"""Language models as embedders."""

from __future__ import annotations

import importlib

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import Model
from toolkit_lm_poolers import embedding_pooler

from toolkit_lm_pooling_adapters.converted import Converted, is_pooling_model, subclass


class EmbeddingModel(Converted):
    """Embeddings of the last token, unless the checkpoint or an option says otherwise."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pooler = embedding_pooler(vllm_config, default="LAST")


class GeneratingEmbeddingModel(Model):
    """A model that generates and embeds with the same weights."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pooler = embedding_pooler(vllm_config, default="LAST")


def as_embedding_model(model_class: type[Model], vllm_config: VllmConfig) -> type[Model]:
    """The embedding model's class of a language model's: `LlamaForCausalLMEmbedding` of
    `LlamaForCausalLM`.

    In an engine that generates the class keeps its head. A class that is a pooling model already
    comes back unchanged. Raises UnsupportedError for a model without a head to take away: here, or
    when the class is used, before weights are read.
    """
    if "encoder" in model_class.parts:
        return _encoder_of(model_class)
    if vllm_config.model.runner == "generate":
        return type(
            f"{model_class.__name__}Embedding",
            (GeneratingEmbeddingModel, model_class),
            {"__module__": model_class.__module__},
        )
    if is_pooling_model(model_class, vllm_config):
        return model_class
    return subclass(EmbeddingModel, model_class, "Embedding")


def _encoder_of(model_class: type[Model]) -> type[Model]:
    """The pooling model that an encoder-decoder model states to be its encoder."""
    if model_class.embedder is None:
        raise UnsupportedError(
            f"{model_class.__name__} is an encoder-decoder model, and has no encoder that embeds "
            "by itself."
        )
    module, _, name = model_class.embedder.partition(":")
    embedder: type[Model] = getattr(importlib.import_module(module), name)
    return embedder
