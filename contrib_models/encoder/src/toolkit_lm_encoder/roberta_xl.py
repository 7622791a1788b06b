"""XLM-RoBERTa XL (Goyal et al. 2021): RoBERTa whose norms come before each half of a layer."""

from __future__ import annotations

from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    Absent,
    HFConfig,
    LayerNorm,
    RowParallelLinear,
    join,
    make_layers,
    torch_dtype,
)
from torch import Tensor, nn

from toolkit_lm_encoder.bert import BertIntermediate, BertSelfAttention, BertShape
from toolkit_lm_encoder.encoder import Embeddings, Renames
from toolkit_lm_encoder.heads import OUT_PROJ, Embedder, SequenceClassifier, TokenClassifier
from toolkit_lm_encoder.roberta import RobertaEncoder


class PreNormLayer(nn.Module):
    """One layer: x [T, H] -> [T, H]."""

    def __init__(self, shape: BertShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.attention_norm = layer_norm(shape, vllm_config)
        self.attention = BertSelfAttention(
            shape, bias=None, vllm_config=vllm_config, prefix=join(prefix, "attention")
        )
        self.attention_output = RowParallelLinear(
            shape.hidden_size,
            shape.hidden_size,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "attention_output"),
        )
        self.norm = layer_norm(shape, vllm_config)
        self.intermediate = BertIntermediate(
            shape, vllm_config=vllm_config, prefix=join(prefix, "intermediate")
        )
        self.output = RowParallelLinear(
            shape.intermediate_size,
            shape.hidden_size,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "output"),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_output(self.attention(self.attention_norm(x)), x)
        out: Tensor = self.output(self.intermediate(self.norm(x)), x)
        return out


class PreNormLayers(nn.Module):
    """The layers that this pipeline rank owns, and a norm after the last: x [T, H] -> [T, H]."""

    def __init__(
        self, shape: BertShape, *, is_last: bool, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        self.layer = make_layers(
            shape.num_layers,
            lambda prefix: PreNormLayer(shape, vllm_config=vllm_config, prefix=prefix),
            join(prefix, "layer"),
            vllm_config.parallel,
        )
        self.LayerNorm = layer_norm(shape, vllm_config) if is_last else Absent()
        self.is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer.owned:
            x = layer(x)
        return self.LayerNorm(x) if self.is_last else x


def layer_norm(shape: BertShape, vllm_config: VllmConfig) -> LayerNorm:
    return LayerNorm(shape.hidden_size, eps=shape.eps, dtype=torch_dtype(vllm_config.model.dtype))


class RobertaXLEncoder(RobertaEncoder):
    """XLM-RoBERTa XL without a head."""

    renames: ClassVar[Renames] = (
        *RobertaEncoder.renames,
        (r"\.attention\.self_attn_layer_norm\.", ".attention_norm."),
        (r"\.attention\.output\.dense\.", ".attention_output."),
        (r"\.attention\.self\.", ".attention."),
        (r"(\.layer\.\d+)\.LayerNorm\.", r"\1.norm."),
        (r"(\.layer\.\d+)\.output\.dense\.", r"\1.output."),
    )

    def make_embeddings(self, config: HFConfig) -> Embeddings:
        embeddings = super().make_embeddings(config)
        # The first layer norms them.
        embeddings.LayerNorm = nn.Identity()
        return embeddings

    def make_layers(self, shape: BertShape, prefix: str) -> nn.Module:
        return PreNormLayers(
            shape, is_last=self.is_last, vllm_config=self.vllm_config, prefix=prefix
        )


class RobertaXLModel(Embedder, RobertaXLEncoder):
    pass


class RobertaXLForSequenceClassification(SequenceClassifier, RobertaXLEncoder):
    pass


class RobertaXLForTokenClassification(TokenClassifier, RobertaXLEncoder):
    renames = (*RobertaXLEncoder.renames, OUT_PROJ)
