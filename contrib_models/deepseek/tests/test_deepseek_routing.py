"""Routings equal those of transformers, and configs that are not computed are refused by name."""

import pytest
import torch
from deepseek_families import GROUPS, SHAPE, make_v2, make_v3
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import HFConfig
from toolkit_lm_deepseek.deepseek_v2 import DeepseekV2ForCausalLM
from toolkit_lm_deepseek.deepseek_v3 import DeepseekV3ForCausalLM
from toolkit_lm_moe.routing import Router, Routing

ROUTERS = {
    "greedy": (make_v2, {"n_routed_experts": 8}, {"normalize": False, "grouped": False}),
    "groups": (
        make_v2,
        {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        {"normalize": False},
    ),
    "sigmoid": (make_v3, {"n_routed_experts": 16}, {"normalize": True, "best": 2}),
    "unnormalized": (make_v3, {"norm_topk_prob": False}, {"normalize": False, "best": 2}),
}


def dense(experts, weights, num_experts):
    """Weights of all experts [T, E]: those of a token may come in any order."""
    return torch.zeros(len(experts), num_experts).scatter(1, experts, weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_and_weights_are_those_of_transformers(name):
    make, changes, options = ROUTERS[name]
    model = make(**changes)
    theirs = model.model.layers[1].mlp.gate
    torch.nn.init.normal_(theirs.weight)
    hf_config = model.config.to_dict()
    corrected = hasattr(theirs, "e_score_correction_bias")
    ours = Router(
        hf_config["n_routed_experts"],
        softmax=not corrected,
        corrected=corrected,
        vllm_config=VllmConfig.default(hf_config, dtype="bfloat16"),
    )
    ours.weight.copy_(theirs.weight)
    if corrected:
        # Strong enough to change choices.
        theirs.e_score_correction_bias.normal_(std=0.5)
        ours.e_score_correction_bias.copy_(theirs.e_score_correction_bias)
    x = torch.randn(200, hf_config["hidden_size"]).bfloat16()
    with torch.inference_mode():
        scores = ours(x)
        found = Routing.read(HFConfig(hf_config), **options).choose(
            scores, ours.e_score_correction_bias
        )
        _, weights, experts = theirs(x)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(
        dense(*found, scores.shape[1]), dense(experts, weights, scores.shape[1])
    )


@pytest.mark.parametrize(
    ("model_class", "changes", "error", "reason"),
    [
        (DeepseekV2ForCausalLM, {"norm_topk_prob": True}, UnsupportedError, "norm_topk_prob"),
        (DeepseekV2ForCausalLM, {"scoring_func": "sigmoid"}, UnsupportedError, "scoring_func"),
        (DeepseekV2ForCausalLM, {"topk_method": "best"}, UnsupportedError, "group_limited_greedy"),
        (DeepseekV2ForCausalLM, {"moe_layer_freq": 2}, UnsupportedError, "moe_layer_freq"),
        (DeepseekV3ForCausalLM, {"index_topk": 2048}, UnsupportedError, "index_topk"),
        (DeepseekV3ForCausalLM, {"scoring_func": "softmax"}, UnsupportedError, "scoring_func"),
        (DeepseekV3ForCausalLM, {"n_group": 3}, CheckpointError, "n_group"),
        (DeepseekV3ForCausalLM, {"n_group": 8}, CheckpointError, "n_group"),
        (DeepseekV3ForCausalLM, {**GROUPS, "topk_group": 5}, CheckpointError, "topk_group"),
        (
            DeepseekV3ForCausalLM,
            {**GROUPS, "num_experts_per_tok": 5},
            CheckpointError,
            "num_experts_per_tok",
        ),
        (DeepseekV3ForCausalLM, {"n_routed_experts": 0}, CheckpointError, "n_routed_experts"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(model_class, changes, error, reason):
    with pytest.raises(error, match=reason):
        model_class(vllm_config=VllmConfig.default({**SHAPE, **changes}))


def test_a_negative_bias_leaves_experts_within_the_chosen_groups():
    """Masked groups are not zero: scores below zero would lose to them."""
    routing = Routing(top_k=3, groups=2, top_groups=1, best=2, normalize=True)
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.3, 0.2, 0.3, 0.1, 0.2]])
    experts, weights = routing.choose(scores, torch.full((8,), -5.0))
    assert sorted(experts[0].tolist()) == [0, 1, 3]
    # The bias chooses, and does not weigh.
    torch.testing.assert_close(weights.sort().values, torch.tensor([[0.15, 0.4, 0.45]]))
