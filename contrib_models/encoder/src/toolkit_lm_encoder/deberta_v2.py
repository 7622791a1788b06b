"""DeBERTa v2 and v3 (He et al. 2021): BERT with disentangled attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import (
    Absent,
    ColumnParallelLinear,
    HFConfig,
    LayerNorm,
    QKVParallelLinear,
    is_first_stage,
    join,
    make_layers,
    torch_dtype,
)
from toolkit_lm_poolers import num_labels_of
from torch import Tensor, nn

from toolkit_lm_encoder.bert import BertEncoder, BertIntermediate, BertOutput, BertShape
from toolkit_lm_encoder.disentangled import DisentangledAttention, Distances
from toolkit_lm_encoder.encoder import Renames, with_defaults
from toolkit_lm_encoder.heads import (
    DENSE,
    OUT_PROJ,
    ClassificationHead,
    Embedder,
    SequenceClassifier,
    TokenClassifier,
)
from toolkit_lm_encoder.sequence_conv import SequenceConv

DEFAULTS = {"layer_norm_eps": 1e-7, "type_vocab_size": 0}
TERMS = ("c2p", "p2c")
"""Content to position, and position to content."""


def terms_of(config: HFConfig) -> list[str]:
    """The terms of scores beside that of contents. Raises UnsupportedError for unknown ones."""
    stated = config.values.get("pos_att_type") or []
    names = [
        name.strip() for name in (stated.lower().split("|") if isinstance(stated, str) else stated)
    ]
    if wrong := [name for name in names if name not in TERMS]:
        raise UnsupportedError(
            f"config.json: 'pos_att_type' has {wrong[0]!r}. Supported: {', '.join(TERMS)}."
        )
    return names


def distances_of(config: HFConfig) -> Distances:
    most = config.get("max_relative_positions", int, -1)
    return Distances(
        buckets=max(config.get("position_buckets", int, -1), 0),
        most=most if most > 0 else config.require("max_position_embeddings", int),
    )


class DebertaV2SelfAttention(nn.Module):
    """Disentangled attention, without its last projection: x [T, H], vectors of distances
    [2 * span, H] -> [T, heads * head size]."""

    def __init__(self, shape: BertShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        terms = terms_of(config)
        self.qkv = QKVParallelLinear(
            shape.hidden_size,
            shape.head_size,
            shape.num_heads,
            shape.num_heads,
            bias=True,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv"),
        )
        relative = config.get("relative_attention", bool, False)
        self.terms = [term in terms and relative for term in TERMS]
        self.shares = config.get("share_att_key", bool, False)
        for name, wanted in zip(("pos_key_proj", "pos_query_proj"), self.terms, strict=True):
            if wanted and not self.shares:
                projection = ColumnParallelLinear(
                    shape.hidden_size,
                    shape.hidden_size,
                    bias=True,
                    vllm_config=vllm_config,
                    prefix=join(prefix, name),
                )
                self.add_module(name, projection)
        self.attn = DisentangledAttention(
            self.qkv.num_heads,
            shape.head_size,
            distances_of(config),
            1 + len(set(terms)),
            prefix=join(prefix, "attn"),
        )

    def forward(self, x: Tensor, distances: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        out: Tensor = self.attn(q, k, v, *self._of_distances(distances))
        return out

    def _of_distances(self, distances: Tensor | None) -> list[Tensor | None]:
        """Keys and queries of distances, each [2 * span, heads * head size]; None: no such term."""
        if distances is None:
            return [None, None]
        if self.shares:
            queries, keys, _ = self.qkv(distances).chunk(3, dim=-1)
            found = [keys, queries]
            return [x if term else None for x, term in zip(found, self.terms, strict=True)]
        modules = [getattr(self, name, None) for name in ("pos_key_proj", "pos_query_proj")]
        return [None if module is None else module(distances) for module in modules]


class DebertaV2Layer(nn.Module):
    """One layer: x [T, H], vectors of distances [2 * span, H] -> [T, H]."""

    def __init__(self, shape: BertShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.attention = DebertaV2SelfAttention(
            shape, vllm_config=vllm_config, prefix=join(prefix, "attention")
        )
        self.attention_output = BertOutput(
            shape.hidden_size,
            shape,
            vllm_config=vllm_config,
            prefix=join(prefix, "attention_output"),
        )
        self.intermediate = BertIntermediate(
            shape, vllm_config=vllm_config, prefix=join(prefix, "intermediate")
        )
        self.output = BertOutput(
            shape.intermediate_size, shape, vllm_config=vllm_config, prefix=join(prefix, "output")
        )

    def forward(self, x: Tensor, distances: Tensor | None) -> Tensor:
        x = self.attention_output(self.attention(x, distances), x)
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class DebertaV2Layers(nn.Module):
    """The layers that this pipeline rank owns: x [T, H] -> [T, H]. All ranks hold the vectors of
    distances. The larger sizes of v2 add a convolution to the first layer."""

    def __init__(self, shape: BertShape, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        dtype = torch_dtype(vllm_config.model.dtype)
        self.layer = make_layers(
            shape.num_layers,
            lambda prefix: DebertaV2Layer(shape, vllm_config=vllm_config, prefix=prefix),
            join(prefix, "layer"),
            vllm_config.parallel,
        )
        self.is_relative = config.get("relative_attention", bool, False)
        if self.is_relative:
            rows = 2 * distances_of(config).span
            self.rel_embeddings = nn.Embedding(rows, shape.hidden_size, dtype=dtype)
        norms = [name.strip() for name in config.get("norm_rel_ebd", str, "none").split("|")]
        self.LayerNorm: nn.Module = nn.Identity()
        if "layer_norm" in norms:
            self.LayerNorm = LayerNorm(shape.hidden_size, eps=shape.eps, dtype=dtype)

        self.conv: nn.Module | None = None
        if config.get("conv_kernel_size", int, 0) > 0:
            self.conv = (
                SequenceConv(shape, config, dtype, prefix=join(prefix, "conv"))
                if is_first_stage(vllm_config.parallel)
                else Absent()
            )

    def forward(self, x: Tensor) -> Tensor:
        distances = self.LayerNorm(self.rel_embeddings.weight) if self.is_relative else None
        embedded = x
        for index, layer in enumerate(self.layer.owned):
            x = layer(x, distances)
            if index == 0 and isinstance(self.conv, SequenceConv):
                x = self.conv(embedded, x)
        return x


class DebertaV2Encoder(BertEncoder):
    """DeBERTa v2 without a head."""

    renames: ClassVar[Renames] = (
        (r"^deberta\.", ""),
        (r"\.attention\.self\.(query|key|value)_proj\.", r".attention.\1."),
        (r"\.attention\.self\.", ".attention."),
        (r"\.attention\.output\.", ".attention_output."),
    )
    ignored: ClassVar[Sequence[str]] = (
        *BertEncoder.ignored,
        r"^(lm_predictions|mask_predictions)\.",
    )

    @classmethod
    def shape(cls, config: HFConfig) -> BertShape:
        """Raises UnsupportedError for what only some checkpoints of v2 have."""
        config = with_defaults(config, DEFAULTS)
        size = config.require("hidden_size", int)
        for key, usual in (
            ("embedding_size", size),
            ("attention_head_size", size // config.require("num_attention_heads", int)),
        ):
            if (found := config.get(key, int, usual)) != usual:
                raise UnsupportedError(f"config.json: {key!r} is {found}. Supported: {usual}.")
        values = dict(config.values)
        if not config.get("position_biased_input", bool, True):
            # Distances alone say where tokens are.
            values["max_position_embeddings"] = 0
        return super().shape(HFConfig(values))

    def make_layers(self, shape: BertShape, prefix: str) -> nn.Module:
        return DebertaV2Layers(shape, vllm_config=self.vllm_config, prefix=prefix)


class DebertaV2Model(Embedder, DebertaV2Encoder):
    takes_token_types = True


class DebertaV2ForSequenceClassification(SequenceClassifier, DebertaV2Encoder):
    takes_token_types = True
    renames = (*DebertaV2Encoder.renames, OUT_PROJ, DENSE)

    def make_classifier(self, config: HFConfig) -> ClassificationHead:
        activation = config.get("pooler_hidden_act", str, "gelu")
        labels = num_labels_of(dict(config.values))
        return ClassificationHead(self.hidden_size(config), labels, activation=activation)


class DebertaV2ForTokenClassification(TokenClassifier, DebertaV2Encoder):
    takes_token_types = True
    renames = (*DebertaV2Encoder.renames, OUT_PROJ)
