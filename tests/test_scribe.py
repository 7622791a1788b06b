"""An encoder-decoder model by a third party's distribution (tests/plugins/scribe), of an
architecture of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import budgets
import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import EncoderDecoderConformance, write_checkpoint
from torch.nn import functional as F

FOLDER = Path(__file__).parent / "plugins" / "scribe"

HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 16
SIZE = 32
VOCAB = 272
WINDOW = 7
CONFIG = {
    "architectures": ["ScribeModel"],
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "num_layers": 2,
    "num_heads": HEADS,
    "num_kv_heads": KV_HEADS,
    "window": WINDOW,
    "max_position_embeddings": 128,
    "decoder_start_token_id": 2,
    "task_token_id": 9,
    "eos_token_id": 1,
}


def make_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    inner = HEADS * HEAD_SIZE
    kv = KV_HEADS * HEAD_SIZE
    shapes = {
        "embed.weight": (VOCAB, SIZE),
        "positions.weight": (128, SIZE),
        "lm_head.weight": (VOCAB, SIZE),
    }
    for side in ("encoder", "decoder"):
        for i in range(2):
            layer = {
                "self_attn.query": (inner, SIZE),
                "self_attn.key": (kv, SIZE),
                "self_attn.value": (kv, SIZE),
            }
            layer |= {
                "self_attn.out": (SIZE, inner),
                "up": (2 * SIZE, SIZE),
                "down": (SIZE, 2 * SIZE),
            }
            layer |= {f"norms.{n}": (SIZE,) for n in range(3 if side == "decoder" else 2)}
            if side == "decoder":
                layer |= {f"cross_attn.{name}": (inner, SIZE) for name in ("q", "key", "value")} | {
                    "cross_attn.out": (SIZE, inner)
                }
            shapes |= {f"{side}.{i}.{name}.weight": shape for name, shape in layer.items()}
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + float(len(shape) == 1)
        for name, shape in shapes.items()
    }


class Reference:
    """The same model, written down again: one sequence at a time, without a cache."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def __call__(self, encoder_ids, decoder_ids) -> torch.Tensor:
        x = self.embed(encoder_ids)
        for i in range(2):
            x = self.layer(f"encoder.{i}", x, torch.ones(len(x), len(x), dtype=torch.bool), None)
        states, x = x, self.embed(decoder_ids)
        distance = torch.arange(len(x))[:, None] - torch.arange(len(x))
        for i in range(2):
            x = self.layer(
                f"decoder.{i}", x, (distance >= 0) & (distance < (WINDOW if i else len(x))), states
            )
        return x @ self.weights["lm_head.weight"].T

    def embed(self, token_ids) -> torch.Tensor:
        return (
            self.weights["embed.weight"][torch.tensor(list(token_ids))]
            + self.weights["positions.weight"][: len(token_ids)]
        )

    def layer(self, name, x, seen, states):
        x = x + self.attend(
            f"{name}.self_attn", "query", self.norm(f"{name}.norms.0", x), None, seen, KV_HEADS
        )
        if states is not None:
            everything = torch.ones(len(x), len(states), dtype=torch.bool)
            x = x + self.attend(
                f"{name}.cross_attn",
                "q",
                self.norm(f"{name}.norms.2", x),
                states,
                everything,
                HEADS,
            )
        y = self.norm(f"{name}.norms.1", x)
        return (
            x
            + F.gelu(y @ self.weights[f"{name}.up.weight"].T)
            @ self.weights[f"{name}.down.weight"].T
        )

    def attend(self, name, query, x, states, seen, kv_heads):
        q, k, v = (
            (source @ self.weights[f"{name}.{part}.weight"].T)
            .view(len(source), -1, HEAD_SIZE)
            .transpose(0, 1)
            for part, source in (
                (query, x),
                ("key", x if states is None else states),
                ("value", x if states is None else states),
            )
        )
        k, v = (one.repeat_interleave(HEADS // kv_heads, 0) for one in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1)
        return out @ self.weights[f"{name}.out.weight"].T

    def norm(self, name, x):
        return F.rms_norm(x, (SIZE,), self.weights[f"{name}.weight"], 1e-6)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """The plugin in pip's layout."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(FOLDER / "toolkit_lm_scribe", site / "toolkit_lm_scribe")
    info = site / "toolkit_lm_scribe-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toolkit-lm-scribe\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[toolkit_lm]\nscribe = toolkit_lm_scribe\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield


class TestScribe(EncoderDecoderConformance):
    max_tokens = 12
    tensor_parallel_sizes = (2,)

    def make_checkpoint(self, folder, **variant):
        weights = make_weights()
        write_checkpoint(folder, CONFIG, weights)
        return Reference(weights)


def test_it_is_small():
    sources = [path.read_text() for path in FOLDER.rglob("*.py")]
    assert sum(map(budgets.count_tokens, sources)) < 1_280


def test_its_own_rule_for_decoder_prompts(tmp_path):
    write_checkpoint(tmp_path, CONFIG, make_weights())
    with LLM(str(tmp_path), max_model_len=64) as llm:
        [output] = llm.generate("a text", SamplingParams(max_tokens=3), use_tqdm=False)
        [given] = llm.generate(
            [{"encoder_prompt": "a text", "decoder_prompt": "b"}],
            SamplingParams(max_tokens=3),
            use_tqdm=False,
        )
    assert (output.encoder_prompt, output.prompt, output.prompt_token_ids) == (
        "a text",
        None,
        [2, 9],
    )
    assert (given.prompt, given.prompt_token_ids[:2], len(given.prompt_token_ids)) == (
        "b",
        [2, 9],
        3,
    )
