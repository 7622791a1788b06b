"""Train what drafts for `tiny`: a smaller model (tiny-draft), and an EAGLE-3 head (tiny-eagle). Both
learn tiny's own probabilities on the text that it was trained on.

Usage: ``python train/train_drafts.py draft --out DIR --minutes 9``, or ``eagle``
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from train import IGNORED, batches, learning_rate
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, rotate_half

CHECKPOINT = Path(__file__).parents[1] / "src/toolkit_lm_tiny/checkpoint"
TAPS = (1, 3, 5)
"""Layers of tiny whose outputs the head reads."""
PASSES = 3
"""Drafts that the head learns to make one after the other, each from its own last result."""
SEED = 7

DRAFT = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
"""Shape of tiny-draft, where it is not tiny's."""


class Eagle3(nn.Module):
    """The head, computed over whole sequences and several passes at once."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size = config.hidden_size
        eps = config.rms_norm_eps
        self.head_size = config.head_dim
        self.fc = nn.Linear(len(TAPS) * size, size, bias=False)
        self.input_layernorm = LlamaRMSNorm(size, eps)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps)
        self.norm = LlamaRMSNorm(size, eps)
        query = config.num_attention_heads * self.head_size
        key = config.num_key_value_heads * self.head_size
        self.q_proj = nn.Linear(2 * size, query, bias=False)
        self.k_proj = nn.Linear(2 * size, key, bias=False)
        self.v_proj = nn.Linear(2 * size, key, bias=False)
        self.o_proj = nn.Linear(query, size, bias=False)
        self.gate_proj = nn.Linear(size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, size, bias=False)

    def step(
        self,
        embeds: Tensor,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        before: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """One pass [B, T, H] -> [B, T, H]. Entry i of pass n sees entries up to i - n of pass 0, and
        one of each later pass: its own chain of drafts. Adds its keys and values to `before`."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], -1)

        def heads(linear: nn.Linear) -> Tensor:
            return linear(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)

        cos, sin = rotation
        query, key, value = (heads(one) for one in (self.q_proj, self.k_proj, self.v_proj))
        query, key = (one * cos + rotate_half(one) * sin for one in (query, key))
        repeats = query.shape[1] // key.shape[1]
        before.append((key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)))
        passes = len(before) - 1
        length = query.shape[2]
        seen = torch.ones(length, length, dtype=torch.bool).tril(-passes)
        scores = [(query @ before[0][0].transpose(-1, -2)).masked_fill(~seen, -1e9)]
        later = [(passes - index, one) for index, one in enumerate(before)][1:]
        scores += [(query * key.roll(by, 2)).sum(-1, keepdim=True) for by, (key, _) in later]
        weights = (torch.cat(scores, -1).float() / math.sqrt(self.head_size)).softmax(-1)
        out = weights[..., :length].to(value.dtype) @ before[0][1]
        for index, (by, (_, value)) in enumerate(later):
            out = out + weights[..., length + index, None].to(value.dtype) * value.roll(by, 2)
        hidden = hidden + self.o_proj(out.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))

    def save(self, folder: Path, config: LlamaConfig) -> None:
        """Writes it as EAGLE-3's authors do. Embedding and head are tiny's."""
        names = {"fc": "fc", "norm": "norm"}
        names |= {name: f"midlayer.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}
        names |= {"o_proj": "midlayer.self_attn.o_proj"}
        names |= {name: f"midlayer.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
        tensors = {
            f"{names.get(name, f'midlayer.{name}')}.weight": module.weight.detach().bfloat16()
            for name, module in self.named_children()
        }
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        keys = (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
            "max_position_embeddings", "rms_norm_eps", "rope_parameters", "vocab_size", "hidden_act",
        )  # fmt: skip
        values = {key: getattr(config, key) for key in keys}
        fixed = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": config.vocab_size,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
        (folder / "config.json").write_text(json.dumps(values | fixed, indent=2) + "\n")


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """KL divergence from tiny's probabilities to the draft's, the mean over tokens."""
    log = F.log_softmax(logits.float(), -1)
    return F.kl_div(log, F.log_softmax(wanted.float(), -1), log_target=True, reduction="batchmean")


def agreement(logits: Tensor, wanted: Tensor) -> float:
    """Share of tokens where both find the same one the likeliest."""
    return (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item()


Loss = Callable[[Tensor, Tensor], tuple[Tensor, list[float]]]


def draft_loss(draft: LlamaForCausalLM, tiny: LlamaForCausalLM) -> Loss:
    def loss(ids: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
        learned = labels != IGNORED
        with torch.no_grad():
            wanted = tiny.lm_head(tiny.model(input_ids=ids, use_cache=False)[0][learned])
        logits = draft.lm_head(draft.model(input_ids=ids, use_cache=False)[0][learned])
        return divergence(logits, wanted), [agreement(logits, wanted)]

    return loss


def eagle_loss(head: Eagle3, tiny: LlamaForCausalLM) -> Loss:
    def loss(ids: Tensor, labels: Tensor) -> tuple[Tensor, list[float]]:
        with torch.no_grad():
            found = tiny.model(input_ids=ids, use_cache=False, output_hidden_states=True)
            taps = torch.cat([found.hidden_states[layer + 1] for layer in TAPS[:-1]], -1)
            # The last entry of hidden_states is normed: the last layer's output is caught.
            taps = torch.cat([taps, caught[0]], -1)
            wanted = found.last_hidden_state
            embeds = tiny.model.embed_tokens(ids)
        # Entry i reads token i + 1, and is compared with tiny at i + 1.
        places = torch.arange(ids.shape[1] - 1).unsqueeze(0)
        rotation = tiny.model.rotary_emb(taps, places)
        rotation = tuple(one.unsqueeze(1) for one in rotation)
        hidden = head.fc(taps[:, :-1])
        before: list[tuple[Tensor, Tensor]] = []
        total = torch.zeros(())
        shares = []
        for index in range(PASSES):
            hidden = head.step(embeds[:, 1:], hidden, rotation, before)
            learned = labels[:, 1:] != IGNORED
            learned[:, :index] = False
            logits = tiny.lm_head(head.norm(hidden)[learned])
            with torch.no_grad():
                target = tiny.lm_head(wanted[:, 1:][learned])
            total = total + 0.8**index * divergence(logits, target)
            shares.append(agreement(logits, target))
            hidden = hidden.roll(1, 1)
        return total, shares

    caught: list[Tensor] = [torch.zeros(())]

    def catch(module: nn.Module, arguments: object, out: Tensor | tuple[Tensor, ...]) -> None:
        caught[0] = out[0] if isinstance(out, tuple) else out

    tiny.model.layers[TAPS[-1]].register_forward_hook(catch)
    return loss


def train(module: nn.Module, loss_of: Loss, tokenizer: object, minutes: float, rate: float) -> None:
    """Train until the minutes run out."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    source = batches(tokenizer, SEED)  # type: ignore[arg-type]
    start = time.monotonic()
    step = 0
    while (progress := (time.monotonic() - start) / (60 * minutes)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = rate * learning_rate(progress)
        with torch.autocast("cpu", torch.bfloat16):
            loss, shares = loss_of(*next(source))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            agreed = ", ".join(f"{share:.3f}" for share in shares)
            print(
                f"step {step}  {progress:.0%}  loss {loss.item():.4f}  agreed {agreed}", flush=True
            )


def main() -> None:
    """Train one of the two, and save it in bfloat16."""
    parser = argparse.ArgumentParser(description="Train what drafts for tiny.")
    parser.add_argument("kind", choices=("draft", "eagle"))
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rate")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    tiny = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    tiny.requires_grad_(False)
    if options.kind == "draft":
        draft = LlamaForCausalLM(LlamaConfig(**{**tiny.config.to_dict(), **DRAFT}))
        train(draft, draft_loss(draft, tiny), tokenizer, options.minutes, options.rate)
        draft.to(torch.bfloat16).save_pretrained(options.out)
    else:
        head = Eagle3(tiny.config)
        train(head, eagle_loss(head, tiny), tokenizer, options.minutes, options.rate)
        head.save(options.out, tiny.config)


if __name__ == "__main__":
    main()
