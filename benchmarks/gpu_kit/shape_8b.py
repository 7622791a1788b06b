"""The shape of a Llama of 8B parameters, and what its steps must read and compute at least."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ShapePlan:
    """A shape, and how much of it is measured."""

    device: str
    dtype: str
    vocab_size: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    rows: tuple[int, int, int]
    """Rows of the decode batches."""
    short: int
    long: int
    """Tokens of the contexts that are decoded after."""
    steps: int
    """Decode steps."""
    prompts: int
    length: int
    """Length of each prompt of the prefill."""
    budget: int
    """Tokens of a step. The prompt in chunks has four times as many."""
    copy_bytes: int
    side: int
    """Side of the matrices."""

    @property
    def product_weights(self) -> int:
        """Weights that are multiplied with each token, but for the head."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def item_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def max_model_len(self) -> int:
        return 4 * self.budget + 256

    @staticmethod
    def decode_name(rows: int, keys: int) -> str:
        """Name of the check that measures it."""
        return f"decode, {rows} row{'s' if rows > 1 else ''} after {keys} tokens"

    def decode_bytes(self, rows: int, keys: float) -> float:
        """That a step must read, where each row sees so many keys."""
        head = self.vocab_size * self.hidden
        cached = rows * keys * 2 * self.layers * self.kv_heads * self.head_size
        return self.item_bytes * (self.product_weights + head + cached)

    def prefill_flops(self, prompts: int, length: int) -> float:
        """FLOP of all prompts; the head computes one token of each."""
        scores = 2 * 2 * self.layers * self.heads * self.head_size * prompts * length**2 / 2
        return (
            2 * self.product_weights * prompts * length
            + scores
            + 2 * prompts * self.vocab_size * self.hidden
        )

    def write(self, folder: Path) -> Path:
        """Writes its config.json. Returns the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_model_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": self.dtype,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return folder


FULL = ShapePlan(
    device="cuda",
    dtype="bfloat16",
    vocab_size=128256,
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_size=128,
    rows=(1, 8, 64),
    short=16,
    long=4000,
    steps=32,
    prompts=8,
    length=4096,
    budget=4096,
    copy_bytes=2**31,
    side=8192,
)
QUICK = ShapePlan(
    device="cpu",
    dtype="float32",
    vocab_size=512,
    layers=2,
    hidden=64,
    intermediate=128,
    heads=4,
    kv_heads=2,
    head_size=16,
    rows=(1, 2, 4),
    short=4,
    long=40,
    steps=4,
    prompts=2,
    length=32,
    budget=32,
    copy_bytes=2**20,
    side=64,
)
