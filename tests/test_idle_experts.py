"""Experts without tokens cost nothing: in each family with routed experts, a step calls those that
have tokens, and no others."""

from __future__ import annotations

import json
from collections import defaultdict

import deepseek_families
import hybrid_families
import moe_families
import pytest
import torch
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import load_checkpoint, logits_of, make_checkpoint, randomize
from toolkit_lm_moe import experts as routed_experts
from toolkit_lm_moe.experts import RoutedExperts

FEW = {"num_experts_per_tok": 1}
"""What leaves experts idle, where the families' own checkpoints take all."""


def hybrid(architecture, variant, **changes):
    fields = {**hybrid_families.VARIANTS[architecture][variant], **FEW, **changes}
    return lambda: hybrid_families.make_model(architecture, fields)


def latent(architecture):
    make, variants = deepseek_families.FAMILIES[architecture]
    few = {"moe_topk": 2} if architecture.startswith("Longcat") else FEW
    if architecture.startswith("Kimi"):
        few = {**FEW, "num_local_experts": 4}
    return lambda: make(**{**next(iter(variants.values())), **few})


def of_moe(family):
    return lambda: moe_families.make(family, next(iter(moe_families.FAMILIES[family][1])))


WITHOUT_EXPERTS = ("MiniCPM3ForCausalLM",)
MODELS = {
    **{family: of_moe(family) for family in moe_families.FAMILIES},
    **{
        architecture: latent(architecture)
        for architecture in deepseek_families.FAMILIES
        if architecture not in WITHOUT_EXPERTS
    },
    "GraniteMoeHybridForCausalLM": hybrid("GraniteMoeHybridForCausalLM", "experts"),
    "JambaForCausalLM": hybrid("JambaForCausalLM", "experts, attention"),
    "Lfm2MoeForCausalLM": hybrid("Lfm2MoeForCausalLM", "one dense"),
    "NemotronHForCausalLM": hybrid("NemotronHForCausalLM", "all kinds"),
    "Qwen3NextForCausalLM": hybrid("Qwen3NextForCausalLM", "experts"),
    "Qwen3_5MoeForCausalLM": hybrid("Qwen3_5MoeForCausalLM", "experts"),
}


@pytest.fixture
def seen(monkeypatch):
    """By layer: the experts that tokens went to, and those called with their numbers of rows."""
    owners = []
    found = defaultdict(lambda: (defaultdict(int), defaultdict(int)))
    compute = RoutedExperts.compute
    forward = routed_experts._Expert.forward

    def computed(self, x, experts, weights):
        for number in experts.flatten().tolist():
            # Experts after those that are held have no weights, and give a token back.
            if number in self.held:
                found[self.prefix][0][number] += 1
        owners[:] = [(self.prefix, {id(part): int(name) for name, part in self.named_children()})]
        return compute(self, x, experts, weights)

    def called(self, x, tokens):
        [(prefix, numbers)] = owners
        found[prefix][1][numbers[id(self)]] += len(x)
        return forward(self, x, tokens)

    monkeypatch.setattr(RoutedExperts, "compute", computed)
    monkeypatch.setattr(routed_experts._Expert, "forward", called)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_experts_without_tokens_are_not_computed(name, seen, tmp_path):
    torch.manual_seed(0)
    theirs = MODELS[name]().eval()
    randomize(theirs)
    make_checkpoint(tmp_path, theirs)
    architecture = json.loads((tmp_path / "config.json").read_text())["architectures"][0]
    plugins = Plugins.load()
    model = load_checkpoint(plugins.models.load(architecture), tmp_path, plugins=plugins)
    layers = {layer.prefix: layer for layer in model.modules() if isinstance(layer, RoutedExperts)}
    assert layers
    for length in (1, 3):
        seen.clear()
        logits_of([model], torch.arange(20, 20 + length))
        assert set(seen) == set(layers)
        for prefix, (chosen, called) in seen.items():
            assert called == chosen, prefix
        if length == 1:
            assert any(len(called) < len(layers[p].held) for p, (_, called) in seen.items())
