"""Base of reward models: a decoder, a head that scores each hidden state, and the pooler that
chooses tokens."""

from __future__ import annotations

from typing import ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import Absent, IntermediateTensors, Model, join
from toolkit_lm.pooling import Pooler
from toolkit_lm_decoder.llama import LlamaParts
from toolkit_lm_poolers import token_classification_pooler
from toolkit_lm_poolers.limits import hidden_size
from torch import Tensor, nn


class RewardModel(LlamaParts, Model):
    """Scores of a prompt's tokens (task token_classify)."""

    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    # Some checkpoints still hold the head of the language model that was trained on.
    ignored = (r"rotary_emb\.inv_freq$", r"^(lm_head|output)\.")
    head_name: ClassVar[str] = "score"
    num_labels: ClassVar[int] = 1
    pooler: Pooler

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.model = self.make_decoder(join(prefix, "model"))
        head = self.make_head(hidden_size(vllm_config.hf_config))
        self.pooler = self.make_pooler(head)
        self.add_module(self.head_name, head if self.model.is_last else Absent())

    def make_head(self, size: int) -> nn.Module:
        """Hidden states [T, size] float32 -> scores [T, num_labels]."""
        raise NotImplementedError

    def make_pooler(self, head: nn.Module) -> Pooler:
        """Pooler of rewards. By default it returns the rewards of all tokens unchanged."""
        return token_classification_pooler(
            self.vllm_config, head, default="ALL", num_labels=self.num_labels, activation="identity"
        )

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        out: Tensor | IntermediateTensors = self.model(
            input_ids, positions, intermediate=intermediate
        )
        return out
