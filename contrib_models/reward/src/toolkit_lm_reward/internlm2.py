"""InternLM2's reward model (Cai et al. 2024): a Llama whose queries, keys and values are packed by
KV head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HeadLinear, HFConfig
from toolkit_lm_decoder.llama import LlamaAttention, head_size_of
from torch import Tensor, nn

from toolkit_lm_reward.reward_model import RewardModel


class InternLM2Attention(LlamaAttention):
    def has_qkv_bias(self, config: HFConfig) -> bool:
        return config.get("bias", bool, False)

    def has_output_bias(self, config: HFConfig) -> bool:
        return config.get("bias", bool, False)


class InternLM2ForRewardModel(RewardModel):
    """One reward for each token; that of the last, the reward token, is the answer's."""

    attention = InternLM2Attention
    head_name = "v_head"
    renames = (
        (r"\.tok_embeddings\.", ".embed_tokens."),
        (r"\.attention\.wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attention\.wo\.", ".self_attn.o_proj."),
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        (r"\.attention_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
    )

    def make_head(self, size: int) -> nn.Module:
        return HeadLinear(size, self.num_labels, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._by_kind(weights))

    def _by_kind(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """With queries, keys and values one after the other, where the checkpoint has those of a KV
        head side by side."""
        config = HFConfig(self.vllm_config.hf_config)
        num_heads = config.require("num_attention_heads", int)
        head_size = head_size_of(config)
        num_kv_heads = config.get("num_key_value_heads", int, num_heads)
        group = num_heads // num_kv_heads
        for name, tensor in weights:
            if ".wqkv." in name:
                if tensor.shape[0] != (num_heads + 2 * num_kv_heads) * head_size:
                    raise CheckpointError(
                        f"{name} has {tensor.shape[0]} rows, not "
                        f"{(num_heads + 2 * num_kv_heads) * head_size}."
                    )
                # [KV heads, queries of one + key + value, head size, ...]
                heads = tensor.reshape(num_kv_heads, group + 2, head_size, *tensor.shape[1:])
                tensor = torch.cat(
                    [part.flatten(0, 2) for part in torch.split(heads, [group, 1, 1], dim=1)]
                )
            yield name, tensor
