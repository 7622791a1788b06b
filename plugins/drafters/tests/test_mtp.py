"""The drafter "mtp": logits of the heads of published checkpoints, and checkpoints without."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from deepseek_families import make_glm, make_glm45, make_v3
from draft_heads import (
    DRAFTS,
    SHAPE,
    THREADS,
    Block,
    assert_same_drafts,
    drafted,
    generate,
    make_target,
    randomize,
    start,
)
from hybrid_families import EXPERTS, QWEN3_NEXT, make_model
from safetensors.torch import load_file, save_file
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import PluginWarning
from toolkit_lm_drafters.mtp import MtpDrafter
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm45
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen


class NextN(nn.Module):
    """DeepSeek-V3: eh_proj(enorm(embedding), hnorm(hidden state)), a layer, shared_head.norm."""

    def __init__(self, target, module, name, num_heads=1):
        super().__init__()
        config = copy.deepcopy(target.config)
        config._attn_implementation = "eager"
        self.first_layer = config.num_hidden_layers
        self.num_heads = num_heads
        layer = getattr(module, f"{name}DecoderLayer")
        norm = getattr(module, f"{name}RMSNorm")
        for _ in range(num_heads):
            if getattr(config, "mlp_layer_types", None):
                config.mlp_layer_types.append("sparse")
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = (
            nn.ModuleList(norm(size, eps) for _ in range(num_heads)) for _ in range(3)
        )
        self.eh_proj = nn.ModuleList(
            nn.Linear(2 * size, size, bias=False) for _ in range(num_heads)
        )
        self.layers = nn.ModuleList(layer(config, self.first_layer) for _ in range(num_heads))
        rotary = getattr(module, f"{name}RotaryEmbedding")(config)
        object.__setattr__(self, "block", Block(self.layers, rotary))
        object.__setattr__(self, "target", target)

    def first(self, hidden, taps):
        return hidden

    def step(self, embeds, hidden, head=0):
        embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
        both = torch.cat([self.enorm[head](embeds), self.hnorm[head](hidden)], -1)
        return self.block(self.eh_proj[head](both), head)

    def logits(self, out, head=0):
        return self.target.lm_head(self.norm[head](out))

    def tensors(self):
        for head in range(self.num_heads):
            prefix = f"model.layers.{self.first_layer + head}"
            for name in ("enorm", "hnorm", "eh_proj"):
                yield f"{prefix}.{name}.weight", getattr(self, name)[head].weight
            yield f"{prefix}.shared_head.norm.weight", self.norm[head].weight
            yield f"{prefix}.shared_head.head.weight", self.target.lm_head.weight
            yield f"{prefix}.embed_tokens.weight", self.target.model.embed_tokens.weight
            yield from layer_tensors(self.layers[head], prefix)


class Mtp(nn.Module):
    """Qwen3-Next: mtp.fc of both normed inputs, a layer, mtp.norm, which the next draft reads."""

    num_heads = 1

    def __init__(self, target):
        super().__init__()
        config = copy.deepcopy(target.config)
        config._attn_implementation = "eager"
        config.layer_types = [*config.layer_types, "full_attention"]
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            qwen.Qwen3NextRMSNorm(size, eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([qwen.Qwen3NextDecoderLayer(config, config.num_hidden_layers)])
        object.__setattr__(self, "block", Block(self.layers, target.model.rotary_emb))
        object.__setattr__(self, "target", target)

    def first(self, hidden, taps):
        return hidden

    def step(self, embeds, hidden):
        both = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.block(self.fc(torch.cat(both, -1))))

    def logits(self, out):
        return self.target.lm_head(out)

    def tensors(self):
        for name, tensor in self.state_dict().items():
            if not name.startswith("layers."):
                yield f"mtp.{name}", tensor
        yield from layer_tensors(self.layers[0], "mtp.layers.0")


class MiMo(nn.Module):
    """MiMo: input_proj of hidden state and embedding, in this order, both normed; a layer;
    final_layernorm, which the next draft reads."""

    num_heads = 1

    def __init__(self, target):
        super().__init__()
        config = copy.deepcopy(target.config)
        config._attn_implementation = "eager"
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.token_layernorm = qwen2.Qwen2RMSNorm(size, eps)
        self.hidden_layernorm = qwen2.Qwen2RMSNorm(size, eps)
        self.final_layernorm = qwen2.Qwen2RMSNorm(size, eps)
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        layer = qwen2.Qwen2DecoderLayer(config, 0)
        self.layers = nn.ModuleList([layer])
        object.__setattr__(self, "block", Block([layer], target.model.rotary_emb))
        object.__setattr__(self, "target", target)

    def first(self, hidden, taps):
        return hidden

    def step(self, embeds, hidden):
        embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
        both = [self.hidden_layernorm(hidden), self.token_layernorm(embeds)]
        return self.final_layernorm(self.block(self.input_proj(torch.cat(both, -1))))

    def logits(self, out):
        return self.target.lm_head(out)

    def tensors(self):
        for name, tensor in self.state_dict().items():
            own = name.removeprefix("layers.0.")
            yield f"model.mtp_layers.0.{own}", tensor


def layer_tensors(layer, prefix):
    """A layer's tensors by their published names: each expert has its own."""
    for name, tensor in layer.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for index, both in enumerate(tensor):
                for half, part in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    yield f"{prefix}.mlp.experts.{index}.{half}.weight", part
        elif name.endswith("experts.down_proj"):
            for index, part in enumerate(tensor):
                yield f"{prefix}.mlp.experts.{index}.down_proj.weight", part
        else:
            yield f"{prefix}.{name}", tensor


def save(model, head, folder, **fields):
    """The model's checkpoint, with the head's tensors in it."""
    config = json.loads(model.config.to_json_string())
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    if head is not None:
        path = folder / "model.safetensors"
        own = {name: tensor.clone().contiguous() for name, tensor in head.tensors()}
        save_file(load_file(path) | own, path, metadata={"format": "pt"})
    return str(folder)


def make_qwen():
    return make_model("Qwen3NextForCausalLM", {**QWEN3_NEXT, **EXPERTS}).eval()


def deepseek_case(num_heads=1):
    model = make_v3()
    return model, NextN(model, deepseek, "DeepseekV3", num_heads)


def glm_case():
    model = make_glm(n_group=1, topk_group=1)
    return model, NextN(model, glm, "Glm4MoeLite")


def glm45_case():
    model = make_glm45(attention_bias=True, use_qk_norm=True)
    return model, NextN(model, glm45, "Glm4Moe")


def qwen_case():
    model = make_qwen()
    return model, Mtp(model)


def mimo_case():
    fields = {name: value for name, value in SHAPE.items() if name != "initializer_range"}
    model = qwen2.Qwen2ForCausalLM(qwen2.Qwen2Config(**fields)).eval()
    return model, MiMo(model)


CASES = {
    "deepseek": deepseek_case,
    "glm": glm_case,
    "glm 4.5": glm45_case,
    "qwen": qwen_case,
    "mimo": mimo_case,
}
MIMO = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_published_formula(monkeypatch, tmp_path, case):
    torch.manual_seed(3)
    model, head = CASES[case]()
    randomize(model, 1)
    randomize(head, 2)
    own = MIMO if case == "mimo" else {}
    folder = save(model, head, tmp_path, num_nextn_predict_layers=head.num_heads, **own)
    with start(folder, None) as llm:
        tokens = generate(llm)
    options = [f"num_speculative_tokens={DRAFTS}"]
    seen, drawn = drafted(folder, monkeypatch, MtpDrafter, "mtp", options)
    assert drawn == tokens
    assert_same_drafts(head, model, seen)


def test_several_heads_go_on_from_one_another(monkeypatch, tmp_path):
    """Drafts beyond the second repeat the last head. In the first step, before drafts that were
    rejected leave their mark on the second head, all logits are those of the formula."""
    torch.manual_seed(3)
    model, head = deepseek_case(2)
    randomize(model, 1)
    randomize(head, 2)
    folder = save(model, head, tmp_path, num_nextn_predict_layers=2)
    seen, drawn = drafted(folder, monkeypatch, MtpDrafter, "mtp", ["num_speculative_tokens=3"])
    assert_same_drafts(head, model, seen[:1])
    with start(folder, None) as llm:
        assert generate(llm) == drawn


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_ranks_and_stages(tmp_path, sizes):
    """A stage without the model's embedding reads it from the checkpoint."""
    torch.manual_seed(3)
    model, head = deepseek_case()
    folder = save(randomize(model, 1), randomize(head, 2), tmp_path, num_nextn_predict_layers=1)
    ranks = dict(zip(("tensor_parallel_size", "pipeline_parallel_size"), sizes, strict=True))
    ranks |= {"executor": "threads", "given": [THREADS]}
    with start(folder, None, **ranks) as llm:
        tokens = generate(llm)
    with start(folder, "mtp", **ranks) as llm:
        assert generate(llm) == tokens


def test_a_head_that_is_not_finite_is_dropped(tmp_path):
    torch.manual_seed(3)
    model, head = deepseek_case()
    randomize(model, 1)
    randomize(head, 2)
    head.hnorm[0].weight.data.fill_(torch.nan)
    folder = save(model, head, tmp_path, num_nextn_predict_layers=1)
    with start(folder, None) as llm:
        tokens = generate(llm)
    with (
        pytest.warns(PluginWarning, match=r"drafter 'mtp'.*not finite.*is dropped"),
        start(folder, "mtp") as llm,
    ):
        assert generate(llm) == tokens


def test_a_checkpoint_without_heads_is_refused(tmp_path):
    model = make_target(tmp_path / "llama")
    with pytest.raises(ConfigError, match=r"mtp.*has no MTP weights: none of model\.layers\.8\."):
        start(str(tmp_path / "llama"), "mtp")
    assert model.config.num_hidden_layers == 8


def test_heads_with_missing_weights_are_refused(tmp_path):
    model, head = deepseek_case()
    folder = save(model, head, tmp_path, num_nextn_predict_layers=1)
    path = tmp_path / "model.safetensors"
    kept = {name: x for name, x in load_file(path).items() if "2.hnorm" not in name}
    save_file(kept, path, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"drafter 'mtp' and model .*missing: .*hidden_norm"):
        start(folder, "mtp")
