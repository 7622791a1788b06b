"""DeepSeek-V2 and V2-Lite: softmax routing, of which the larger model's is limited to groups."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import HFConfig
from toolkit_lm_moe.routing import Router, Routing, num_experts_of

from toolkit_lm_deepseek.experts import DeepseekForCausalLM, DeepseekMoE, expect

_METHODS = {"greedy": False, "group_limited_greedy": True}
"""`topk_method`, and whether it goes by groups."""


class DeepseekV2MoE(DeepseekMoE):
    def routing_of(self, config: HFConfig) -> Routing:
        expect(config, "scoring_func", "softmax")
        # transformers ignores it, and DeepSeek's own code then ignores `routed_scaling_factor`.
        expect(config, "norm_topk_prob", False)
        method = config.get("topk_method", str, "greedy")
        if method not in _METHODS:
            raise UnsupportedError(
                f"config.json: 'topk_method' is {method!r}, and must be one of "
                f"{', '.join(_METHODS)}."
            )
        return Routing.read(config, normalize=False, grouped=_METHODS[method])

    def router(self, vllm_config: VllmConfig) -> Router:
        config = HFConfig(vllm_config.hf_config)
        return Router(
            num_experts_of(config), softmax=True, corrected=False, vllm_config=vllm_config
        )


class DeepseekV2ForCausalLM(DeepseekForCausalLM):
    moe = DeepseekV2MoE
