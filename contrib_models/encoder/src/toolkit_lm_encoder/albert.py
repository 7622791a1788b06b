"""ALBERT (Lan et al. 2020): BERT whose layers share their weights, after short embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.model import Absent, HFConfig, join
from torch import Tensor, nn

from toolkit_lm_encoder.bert import BertEncoder, BertLayer, BertShape
from toolkit_lm_encoder.encoder import Renames, with_defaults
from toolkit_lm_encoder.heads import OUT_PROJ, Embedder, SequenceClassifier, TokenClassifier


class AlbertLayers(nn.Module):
    """The steps that this pipeline rank computes: x [T, H] -> [T, H]. A step runs the layers of one
    group; steps share groups."""

    def __init__(
        self, shape: BertShape, config: HFConfig, *, vllm_config: VllmConfig, prefix: str
    ) -> None:
        super().__init__()
        num_groups = config.get("num_hidden_groups", int, 1)
        parallel = vllm_config.parallel
        rank = parallel.pipeline_parallel_rank
        ranks = parallel.pipeline_parallel_size
        if shape.num_layers < ranks:
            raise ConfigError(
                f"the {shape.num_layers} layers of {prefix} cannot be cut into {ranks} stages: "
                "lower pipeline_parallel_size."
            )
        steps = range(shape.num_layers * rank // ranks, shape.num_layers * (rank + 1) // ranks)
        self.steps = [int(step / (shape.num_layers / num_groups)) for step in steps]
        """Groups, in the order in which they run."""
        self.groups = nn.ModuleList(
            nn.Sequential(
                *(
                    BertLayer(
                        shape,
                        bias=None,
                        vllm_config=vllm_config,
                        prefix=join(prefix, f"groups.{group}.{layer}"),
                    )
                    for layer in range(config.get("inner_group_num", int, 1))
                )
            )
            if group in self.steps
            else Absent()
            for group in range(num_groups)
        )

    def forward(self, x: Tensor) -> Tensor:
        for group in self.steps:
            x = self.groups[group](x)
        return x


class AlbertEncoder(BertEncoder):
    """ALBERT without a head."""

    renames: ClassVar[Renames] = (
        (r"^albert\.", ""),
        (r"^encoder\.embedding_hidden_mapping_in\.", "embeddings.projection."),
        (r"^encoder\.albert_layer_groups\.(\d+)\.albert_layers\.", r"encoder.groups.\1."),
        (r"\.attention\.(query|key|value)\.", r".attention.self.\1."),
        (r"\.attention\.(dense|LayerNorm)\.", r".attention.output.\1."),
        (r"\.ffn\.", ".intermediate.dense."),
        (r"\.ffn_output\.", ".output.dense."),
        (r"\.full_layer_layer_norm\.", ".output.LayerNorm."),
    )
    ignored: ClassVar[Sequence[str]] = (*BertEncoder.ignored, r"^(predictions|sop_classifier)\.")

    @classmethod
    def shape(cls, config: HFConfig) -> BertShape:
        shape = super().shape(with_defaults(config, {"hidden_act": "gelu_new"}))
        return replace(shape, embedding_size=config.get("embedding_size", int, 128))

    def make_layers(self, shape: BertShape, prefix: str) -> nn.Module:
        config = HFConfig(self.vllm_config.hf_config)
        return AlbertLayers(shape, config, vllm_config=self.vllm_config, prefix=prefix)


class AlbertModel(Embedder, AlbertEncoder):
    takes_token_types = True


class AlbertForSequenceClassification(SequenceClassifier, AlbertEncoder):
    takes_token_types = True
    renames = (*AlbertEncoder.renames, OUT_PROJ, (r"^pooler\.", "classifier.dense."))


class AlbertForTokenClassification(TokenClassifier, AlbertEncoder):
    takes_token_types = True
    renames = (*AlbertEncoder.renames, OUT_PROJ)
