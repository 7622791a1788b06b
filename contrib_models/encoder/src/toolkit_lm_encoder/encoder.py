"""Base of all encoders: embeddings and layers, or a pipeline rank's slice of them. Also reads their
config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.model import (
    Absent,
    HFConfig,
    IntermediateTensors,
    LayerNorm,
    Model,
    ReplicatedLinear,
    VocabParallelEmbedding,
    is_first_stage,
    is_last_stage,
    join,
    torch_dtype as dtype_of,
)
from torch import Tensor, nn

Renames = Sequence[tuple[str, str]]
"""Patterns and replacements, of the names of weights."""


class Embeddings(nn.Module):
    """Tokens, and where there are tables for them their positions and types, summed and normed: ids
    [T] -> [T, H]."""

    def __init__(
        self,
        size: int,
        *,
        eps: float,
        max_positions: int = 0,
        position_offset: int = 0,
        num_types: int = 0,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        dtype = dtype_of(vllm_config.model.dtype)
        vocab_size = HFConfig(vllm_config.hf_config).require("vocab_size", int)
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size, size, vllm_config=vllm_config, prefix=join(prefix, "word_embeddings")
        )
        self.position_offset = position_offset
        self.position_embeddings = self.token_type_embeddings = None
        if max_positions:
            check_positions(max_positions - position_offset, vllm_config)
            self.position_embeddings = nn.Embedding(max_positions, size, dtype=dtype)
        if num_types:
            self.token_type_embeddings = nn.Embedding(num_types, size, dtype=dtype)
        self.LayerNorm: nn.Module = LayerNorm(size, eps=eps, dtype=dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None
    ) -> Tensor:
        x: Tensor = self.word_embeddings(input_ids)
        if (types := self.token_type_embeddings) is not None:
            x = x + (
                types.weight[0]
                if token_type_ids is None or types.num_embeddings == 1
                else types(token_type_ids)
            )
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(positions + self.position_offset)
        normed: Tensor = self.LayerNorm(x)
        return normed


class FactorizedEmbeddings(Embeddings):
    """Embeddings of `inner` numbers, projected to `size`: ids [T] -> [T, size] (Lan et al. 2020:
    ALBERT)."""

    def __init__(
        self,
        inner: int,
        size: int,
        *,
        vllm_config: VllmConfig,
        prefix: str,
        **tables: Any,
    ) -> None:
        super().__init__(inner, vllm_config=vllm_config, prefix=prefix, **tables)
        self.projection = ReplicatedLinear(
            inner, size, bias=True, vllm_config=vllm_config, prefix=join(prefix, "projection")
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, token_type_ids: Tensor | None
    ) -> Tensor:
        out: Tensor = self.projection(super().forward(input_ids, positions, token_type_ids))
        return out


class Encoder(Model):
    """Embeddings and layers. Subclasses make `embeddings` and say how the layers run; architectures
    add a pooler."""

    # Heads that other tasks use, and a buffer that older releases of transformers saved.
    ignored: ClassVar[Sequence[str]] = (r"^(pooler|cls|lm_head)\.", r"position_ids$")

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        parallel = vllm_config.parallel
        config = HFConfig(vllm_config.hf_config)
        self.is_first = is_first_stage(parallel)
        self.is_last = is_last_stage(parallel)
        for key in ("is_decoder", "add_cross_attention"):
            if config.get(key, bool, False):
                raise UnsupportedError(
                    f"config.json: {key!r} makes a decoder of it, and this model is an encoder."
                )
        self.embeddings = self.make_embeddings(config) if self.is_first else Absent()

    def make_embeddings(self, config: HFConfig) -> nn.Module:
        """The module (input_ids, positions, token_type_ids) -> [T, H]."""
        raise NotImplementedError

    def hidden_size(self, config: HFConfig) -> int:
        """H."""
        raise NotImplementedError

    def run_layers(self, x: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, H] through the layers that this rank owns."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        intermediate: IntermediateTensors | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        if intermediate is not None:
            x = intermediate["hidden_states"]
        else:
            x = self.embeddings(input_ids, positions, token_type_ids)
        x = self.run_layers(x, positions)
        return x if self.is_last else {"hidden_states": x}


def check_positions(most: int, vllm_config: VllmConfig) -> None:
    """Raises ConfigError where sequences may be longer than a table of positions."""
    if vllm_config.max_model_len > most:
        raise ConfigError(
            f"max_model_len is {vllm_config.max_model_len}, but the checkpoint has {most} "
            f"positions: give max_model_len={most} or less."
        )


def with_defaults(config: HFConfig, defaults: Mapping[str, Any]) -> HFConfig:
    """`config` in which values that are missing or null are those of `defaults`."""
    return HFConfig(
        {**defaults, **{key: value for key, value in config.values.items() if value is not None}}
    )
