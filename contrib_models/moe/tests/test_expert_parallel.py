"""Expert parallelism: ranks hold some experts whole, and give together what one rank gives that
holds all."""

from __future__ import annotations

import json
import re

import pytest
import torch
from moe_families import CASES, FAMILIES, SPLIT, make, make_mixtral, make_qwen3_moe
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, UnsupportedError
from toolkit_lm.model import Absent, LinearBase, construct
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import load_checkpoint, logits_of, save_random
from toolkit_lm_devkit.thread_ranks import run_ranks
from toolkit_lm_moe.experts import PROJECTIONS, RoutedExperts, divide_experts, route_top_k
from toolkit_lm_weights.safetensors import CheckpointWeights

EP = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
INPUT_IDS = torch.arange(3, 63)
NUM_EXPERTS = 7
HIDDEN = 16
INNER = 24


def layers(
    ranks: int, *, num_experts: int = NUM_EXPERTS, grouped: bool = False, inner: int = INNER
) -> list[RoutedExperts]:
    """A layer without experts' parallelism, then as each rank holds it, with equal weights."""
    generator = torch.Generator().manual_seed(num_experts)
    gate_up, down = (
        torch.randn(num_experts, *shape, generator=generator) / 4
        for shape in ((2 * inner, HIDDEN), (HIDDEN, inner))
    )
    made = []
    for rank in (None, *range(ranks)):
        options = (
            {} if rank is None else {"tensor_parallel_size": ranks, "enable_expert_parallel": True}
        )
        config = VllmConfig.default(**options).with_rank(rank or 0)
        layer = RoutedExperts(num_experts, HIDDEN, inner, vllm_config=config, prefix="mlp.experts")
        layer.stacked = layer.stack() if grouped else None
        for name, param in layer.named_parameters():
            expert, projection, _ = name.split(".")
            param.weight_loader(
                param, (gate_up if projection == PROJECTIONS[0] else down)[int(expert)]
            )
        made.append(layer)
    return made


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "one by one"])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_what_ranks_hold_adds_up(ranks, grouped):
    """Seven experts, uneven over two and three ranks. Tokens of one expert alone leave all ranks
    but one without work."""
    whole, *parts = layers(ranks, grouped=grouped)
    assert [expert for part in parts for expert in part.held] == list(range(NUM_EXPERTS))
    x = torch.randn(37, HIDDEN)
    routings = [
        route_top_k(torch.randn(37, NUM_EXPERTS), top_k, normalize=True)
        for top_k in (1, 2, NUM_EXPERTS)
    ]
    routings.append((torch.full((37, 1), 5), torch.rand(37, 1)))
    for experts, weights in routings:
        expected = whole.compute(x, experts, weights)
        shares = [part.compute(x, experts, weights) for part in parts]
        torch.testing.assert_close(torch.stack(shares).sum(0), expected, atol=1e-5, rtol=0)
        for part, share in zip(parts, shares, strict=True):
            is_elsewhere = (experts < part.held.start) | (experts >= part.held.stop)
            assert not share[is_elsewhere.all(1)].any(), (
                "a rank computes tokens whose experts it does not hold"
            )


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "one by one"])
def test_no_token_is_no_work(grouped):
    _, first, second = layers(2, grouped=grouped)
    empty = torch.empty(0, HIDDEN), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)
    assert first.compute(*empty).shape == second.compute(*empty).shape == (0, HIDDEN)


def test_what_is_not_computed_is_not_added(monkeypatch):
    """The grouped product leaves the rows of experts that are held elsewhere as memory was."""
    _, first, second = layers(2, grouped=True)
    grouped = RoutedExperts._grouped

    def spoiled(self, rows, chosen, *stacked):
        out = grouped(self, rows, chosen, *stacked)
        out[chosen >= len(self.held)] = torch.nan
        return out

    monkeypatch.setattr(RoutedExperts, "_grouped", spoiled)
    experts, weights = route_top_k(torch.randn(37, NUM_EXPERTS), 3, normalize=True)
    for layer in (first, second):
        assert layer.compute(torch.randn(37, HIDDEN), experts, weights).isfinite().all()


def test_inner_dimensions_need_not_be_divided():
    """Nor do they have to be divisible."""
    _, *parts = layers(2, inner=7)
    assert [part.get_parameter(f"{part.held.start}.down_proj.weight").shape for part in parts] == [
        (HIDDEN, 7)
    ] * 2


@pytest.mark.parametrize(
    ("family", "variant"),
    [(family, variant) for family, variant in CASES if family != "gemma4" or "expert" in variant],
)
def test_two_ranks_give_the_logits_of_one(family, variant, tmp_path):
    model_class = FAMILIES[family][0]
    save_random(tmp_path, make(family, variant))
    expected = logits_of([load_checkpoint(model_class, tmp_path)], INPUT_IDS)
    assert expected.std() > 0.1
    for ours in run_ranks(
        lambda rank: logits_of([load_checkpoint(model_class, tmp_path, rank=rank, **EP)], INPUT_IDS)
    ):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_stages_of_ranks_give_the_logits_of_one(tmp_path):
    """Layers with experts are in the second stage alone: the first is not refused for having
    none."""
    save_random(tmp_path, make_qwen3_moe(mlp_only_layers=[0]))
    model_class = FAMILIES["qwen3_moe"][0]
    expected = logits_of([load_checkpoint(model_class, tmp_path)], INPUT_IDS)

    def compute(rank):
        stages = [
            load_checkpoint(
                model_class, tmp_path, rank=2 * stage + rank, pipeline_parallel_size=2, **EP
            )
            for stage in (0, 1)
        ]
        return logits_of(stages, INPUT_IDS)

    for ours in run_ranks(compute):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def weights(folder):
    return list(CheckpointWeights(folder))


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def expert_bytes(model) -> int:
    return sum(
        param.nbytes
        for module in model.modules()
        if isinstance(module, LinearBase) and module.spec.kind == "experts"
        for param in module.parameters()
    )


@pytest.mark.parametrize("family", SPLIT)
def test_a_rank_holds_half_of_the_experts_and_reads_no_other(family, tmp_path):
    save_random(tmp_path, make(family, "4 of 8"))
    model_class = FAMILIES[family][0]
    hf_config = config_of(tmp_path)
    whole, *halves = (
        model_class(vllm_config=VllmConfig.default(hf_config, **options).with_rank(rank))
        for rank, options in ((0, {}), (0, EP), (1, EP))
    )
    assert [expert_bytes(half) for half in halves] == [expert_bytes(whole) // 2] * 2 != [0, 0]
    others = [
        sum(param.nbytes for param in model.parameters()) - expert_bytes(model)
        for model in (whole, *halves)
    ]
    assert others[1] == others[2] < 0.7 * others[0], (
        "what is no expert is divided as without expert parallelism"
    )
    for rank, half in enumerate(halves):
        [first, *_] = [module for module in half.modules() if isinstance(module, RoutedExperts)]
        assert list(first.held) == list(range(4 * rank, 4 * rank + 4))
        assert [isinstance(child, Absent) for _, child in first.named_children()] == [
            i not in first.held for i in range(8)
        ]

    # Weights of experts that another rank holds may be anything: nobody looks at them.
    upper = re.compile(r"experts\.[4-7]\.")
    passed = [
        (name, torch.empty(0) if upper.search(name) else tensor)
        for name, tensor in weights(tmp_path)
    ]
    assert sum(tensor.numel() == 0 for _, tensor in passed) == 2 * 4 * 3
    assert not any(upper.search(name) for name in halves[0].load_weights(passed))


def test_a_missing_expert_is_named_by_the_rank_that_holds_it(tmp_path):
    save_random(tmp_path, make("mixtral", "2 of 4"))
    model_class = FAMILIES["mixtral"][0]
    kept = [
        (name, tensor)
        for name, tensor in weights(tmp_path)
        if "layers.1.block_sparse_moe.experts.2.w2" not in name
    ]
    config = VllmConfig.default(config_of(tmp_path), **EP)
    assert model_class(vllm_config=config.with_rank(0)).load_weights(kept)
    with pytest.raises(
        CheckpointError, match=r"1 missing: model\.layers\.1\.mlp\.experts\.2\.w2\.weight"
    ):
        model_class(vllm_config=config.with_rank(1)).load_weights(kept)


def test_an_expert_too_many_is_named(tmp_path):
    save_random(tmp_path, make("mixtral", "2 of 4"))
    config = VllmConfig.default(config_of(tmp_path), **EP)
    more = ("model.layers.1.block_sparse_moe.experts.4.w2.weight", torch.zeros(1))
    with pytest.raises(
        CheckpointError, match=r"1 unexpected: model\.layers\.1\.mlp\.experts\.4\.w2\.weight"
    ):
        FAMILIES["mixtral"][0](vllm_config=config).load_weights([*weights(tmp_path), more])


@pytest.mark.parametrize(
    ("num_experts", "ranks", "sizes"),
    [(8, 2, [4, 4]), (7, 2, [3, 4]), (5, 4, [1, 1, 1, 2]), (4, 4, [1] * 4)],
)
def test_experts_are_divided_as_evenly_as_they_can_be(num_experts, ranks, sizes):
    config = VllmConfig.default(tensor_parallel_size=ranks, enable_expert_parallel=True)
    held = [
        divide_experts(num_experts, config.with_rank(rank).parallel, "mlp.experts")
        for rank in range(ranks)
    ]
    assert [len(one) for one in held] == sizes
    assert [expert for one in held for expert in one] == list(range(num_experts))


def test_fewer_experts_than_ranks_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"enable_expert_parallel: the 3 experts of mlp\.experts cannot be divided over "
        r"tensor_parallel_s",
    ):
        layers(4, num_experts=3)


@pytest.mark.parametrize(
    ("make_model", "changes"),
    [
        (make_qwen3_moe, {"mlp_only_layers": [0, 1]}),
        (make_mixtral, {"architectures": ["MistralForCausalLM"]}),
    ],
    ids=["no layer has any", "a family without"],
)
def test_a_model_without_experts_is_refused(make_model, changes, tmp_path):
    """It would compute the same, without the option's effect."""
    hf_config = {**make_model().config.to_dict(), **changes}
    plugins = Plugins.load()
    hf_config["architectures"] = hf_config.get("architectures") or ["Qwen3MoeForCausalLM"]
    [name] = hf_config["architectures"]
    config = VllmConfig.default(hf_config, **EP)
    with pytest.raises(
        UnsupportedError,
        match=f"enable_expert_parallel: {name} has no experts that it can divide over ranks",
    ):
        construct(plugins.models.load(name), config, torch.device("meta"), plugins)
