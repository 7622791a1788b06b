"""ColBERT (Khattab and Zaharia 2020): a small vector per token, for late interaction.

Checkpoints of pylate and sentence-transformers need no class of their own: they are encoders with a
Dense module listed in modules.json."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import Absent, HFConfig, ReplicatedLinear, join
from toolkit_lm_poolers import AllPooler, EmbeddingHead
from toolkit_lm_poolers.details import details_of
from torch import Tensor, nn

from toolkit_lm_encoder.bert import BertEncoder


# So it is called in checkpoints of the authors' own library.
class HF_ColBERT(BertEncoder):  # noqa: N801
    """BERT whose hidden states are projected: [T, dimensions]. It serves token_embed."""

    takes_token_types = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.linear: nn.Module = Absent()
        if self.is_last:
            sizes = self.hidden_size(HFConfig(vllm_config.hf_config)), dimensions(vllm_config)
            self.linear = ReplicatedLinear(
                *sizes, vllm_config=vllm_config, prefix=join(prefix, "linear")
            )
            self.pooler = AllPooler(
                {"token_embed"}, EmbeddingHead(sizes[1], nn.Identity(), normalize=True)
            )

    def run_layers(self, x: Tensor, positions: Tensor) -> Tensor:
        x = super().run_layers(x, positions)
        out: Tensor = self.linear(x) if self.is_last else x
        return out


def dimensions(vllm_config: VllmConfig) -> int:
    """Length of a token's vector: `dim` of config.json, or what the library's own artifact.metadata
    says. Raises CheckpointError."""
    if (dim := HFConfig(vllm_config.hf_config).get("dim", int)) is not None:
        return dim
    assert vllm_config.checkpoint is not None
    found = details_of(vllm_config.checkpoint.pooling_profile)
    if found is None or found.embedding_size is None:
        raise CheckpointError(
            "config.json has no 'dim', and no plugin reads artifact.metadata. Install "
            "toolkit-lm-sentence-transformers."
        )
    return found.embedding_size
