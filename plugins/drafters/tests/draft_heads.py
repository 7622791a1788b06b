"""Small random targets and heads, and the heads' logits by the published formulas, in plain torch
with layers of transformers."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from toolkit_lm import LLM, SamplingParams
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
PROMPT = [3 + (5 * i) % 40 for i in range(18)]
DRAFTS = 3
TOKENS = 6


def make_target(folder: Path, config=None, **fields):
    """A random model of transformers, saved."""
    torch.manual_seed(len(fields))
    config = config or LlamaConfig(**SHAPE | fields)
    kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else None
    model = kind(config).eval()
    model.save_pretrained(folder)
    return model


def mask(count: int):
    return torch.full((1, 1, count, count), -torch.inf).triu(1)


class Block(nn.Module):
    """Layers of transformers over whole sequences x [T, H]."""

    def __init__(self, layers, rotary):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.rotary = rotary

    def forward(self, x, layer=0):
        x = x.unsqueeze(0)
        places = torch.arange(x.shape[1]).unsqueeze(0)
        out = self.layers[layer](
            x,
            attention_mask=mask(x.shape[1]),
            position_ids=places,
            position_embeddings=self.rotary(x, places),
        )
        return (out[0] if isinstance(out, tuple) else out).view(x.shape[1], -1)


def randomize(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        noise = torch.randn(weight.shape, generator=generator) * 0.2
        weight.data = 1 + noise if "norm" in name and weight.dim() == 1 else noise
    return module.eval()


class Eagle1(nn.Module):
    """EAGLE-1: fc(embedding of the next token, hidden state), a layer without input norm; the
    model's head."""

    def __init__(self, target, bias=False):
        super().__init__()
        config = target.config
        size = config.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=bias)
        config = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1})
        config._attn_implementation = "eager"
        layer = LlamaDecoderLayer(config, 0)
        layer.input_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])
        object.__setattr__(self, "block", Block([layer], LlamaRotaryEmbedding(config)))
        object.__setattr__(self, "target", target)

    def first(self, hidden, taps):
        return hidden

    def step(self, embeds, hidden):
        return self.block(self.fc(torch.cat([embeds, hidden], -1)))

    def logits(self, out):
        return self.target.lm_head(out)


class Wide(nn.Module):
    """The layer of EAGLE-3."""

    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        norm = lambda: LlamaRMSNorm(size, config.rms_norm_eps)  # noqa: E731
        self.input_layernorm = norm()
        self.hidden_norm = norm()
        self.post_attention_layernorm = norm()
        other = LlamaDecoderLayer(config, 0)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, old.out_features, bias=False))
        self.mlp = other.mlp

    def forward(self, x, **arguments):
        size = x.shape[-1] // 2
        embeds, residual = x.split(size, -1)
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(residual)], -1)
        residual = residual + self.self_attn(x, **arguments)[0]
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3(nn.Module):
    """EAGLE-3: fc over three taps, a layer over embedding and hidden state, norm, and a head for
    some tokens, that d2t maps to the model's."""

    def __init__(self, target, layers=(1, 3, 4), draft_vocab_size=None):
        super().__init__()
        config = LlamaConfig(**{**target.config.to_dict(), "num_hidden_layers": 1})
        config._attn_implementation = "eager"
        size = config.hidden_size
        self.fc = nn.Linear(len(layers) * size, size, bias=False)
        self.midlayer = Wide(config)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        count = draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(size, count, bias=False)
        chosen = torch.randperm(config.vocab_size)[:count].sort().values
        object.__setattr__(self, "chosen", chosen)
        object.__setattr__(self, "layers", layers)
        object.__setattr__(self, "block", Block([self.midlayer], LlamaRotaryEmbedding(config)))
        object.__setattr__(self, "target", target)

    def first(self, hidden, taps):
        return self.fc(torch.cat([taps[layer + 1] for layer in self.layers], -1))

    def step(self, embeds, hidden):
        return self.block(torch.cat([embeds, hidden], -1))

    def logits(self, out):
        some = self.lm_head(self.norm(out))
        return some.new_full((len(out), self.target.config.vocab_size), -1e4).index_copy(
            1, self.chosen, some
        )

    def extra(self):
        chosen = self.chosen
        known = torch.zeros(self.target.config.vocab_size, dtype=torch.bool)
        known[chosen] = True
        return {"d2t": chosen - torch.arange(len(chosen)), "t2d": known}


def save_head(head, folder: Path, **fields):
    """Writes a head as it is published."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.contiguous() for name, x in head.state_dict().items()}
    if hasattr(head, "extra"):
        tensors |= head.extra()
    save_file(tensors, folder / "model.safetensors")
    config = {**SHAPE, "model_type": "llama", "num_hidden_layers": 1, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@torch.no_grad()
def chain(head, target, tokens: list[int], drafts: int) -> list[torch.Tensor]:
    """Logits of each draft after `tokens`, whole sequences computed anew. A head of several goes
    on from the hidden states of the one before, one token later."""
    found = target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    taps = [one[0] for one in found.hidden_states]
    hidden = head.first(found.last_hidden_state[0], taps)
    inputs = list(tokens[1:])
    num_heads = getattr(head, "num_heads", 1)
    logits = []
    for ahead in range(drafts):
        index = min(ahead, num_heads - 1)
        embeds = target.model.embed_tokens(torch.tensor(inputs))
        out = head.step(embeds, hidden) if num_heads == 1 else head.step(embeds, hidden, index)
        logits.append(head.logits(out)[-1] if num_heads == 1 else head.logits(out, index)[-1])
        inputs.append(int(logits[-1].argmax()))
        if ahead + 1 < num_heads:
            inputs, hidden = inputs[1:], out
        else:
            hidden = torch.cat([hidden, out[-1:]])
    return logits


def drafted(target: str, monkeypatch, kind, drafter: str, options, **engine):
    """Runs a prompt greedily. Returns for each step the tokens so far, and the logits of its
    drafts; and the output."""
    seen = []
    finish = kind.finish
    logits = kind.logits

    def watched(self, inputs, hidden, result, step):
        histories = inputs.histories
        if any(result.token_ids):
            seen.append((histories.tokens(inputs.rows[0]).tolist(), []))
        finish(self, inputs, hidden, result, step)

    def kept(self, *arguments):
        out = logits(self, *arguments)
        seen[-1][1].append(out[0].clone())
        return out

    monkeypatch.setattr(kind, "finish", watched)
    monkeypatch.setattr(kind, "logits", kept)
    with start(target, drafter, options, **engine) as llm:
        tokens = generate(llm)
    return seen[-TOKENS:], tokens


def start(target: str, drafter: str | None, options=(), given=(), **engine):
    plain = {
        "dtype": "float32",
        "renderer": "tokens",
        "max_model_len": 64,
        "num_kv_blocks": 600,
        "block_size": 4,
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
    }
    own = [f"drafters.{option}" for option in options]
    if drafter is not None:
        plain["draft_budget"] = "all"
    return LLM(target, drafter=drafter, plugin_option=own, plugins=list(given), **plain | engine)


def generate(llm, **fields):
    fields = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True} | fields
    params = SamplingParams(detokenize=False, **fields)
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.error is None, output.error
    return [list(one.token_ids) for one in output.outputs]


def assert_same_drafts(head, target, seen) -> None:
    """The logits of all drafts of all steps are those of the formula."""
    assert seen and all(logits for _, logits in seen)
    for tokens, logits in seen:
        expected = chain(head, target, tokens, len(logits))
        np.testing.assert_allclose(
            torch.stack(logits).numpy(), torch.stack(expected).numpy(), atol=2e-4
        )
