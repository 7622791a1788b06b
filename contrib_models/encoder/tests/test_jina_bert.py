"""Jina embeddings 2 against a formula in float64: transformers has no class of it."""

import json
import math

import pytest
import torch
from encoder_families import MAX_MODEL_LEN, load, random_sequences
from toolkit_lm import LLM
from toolkit_lm.errors import UnsupportedError
from toolkit_lm_devkit import hidden_states, write_checkpoint
from toolkit_lm_encoder.jina_bert import JinaBertModel, alibi_slopes
from torch.nn import functional as F

VOCAB_SIZE = 270
SIZE = 36
INNER = 40
HEADS = 6
LAYERS = 2
SEQUENCES = random_sequences()
CONFIG = {
    "architectures": ["JinaBertForMaskedLM"],
    "model_type": "bert",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": MAX_MODEL_LEN,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "emb_pooler": "mean",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder, and its weights, of which those in the folder have BERT's prefix."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embeddings.word_embeddings.weight": (VOCAB_SIZE, SIZE),
        "embeddings.token_type_embeddings.weight": (2, SIZE),
    }
    norms = ["embeddings.LayerNorm"]
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes[f"{layer}.attention.{name}.weight"] = (SIZE, SIZE)
            shapes[f"{layer}.attention.{name}.bias"] = (SIZE,)
        shapes[f"{layer}.mlp.gated_layers.weight"] = (2 * INNER, SIZE)
        shapes[f"{layer}.mlp.wo.weight"] = (SIZE, INNER)
        shapes[f"{layer}.mlp.wo.bias"] = (SIZE,)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.mlp.layernorm"]
    shapes |= {f"{norm}.{part}": (SIZE,) for norm in norms for part in ("weight", "bias")}
    weights = {
        name: torch.randn(shape, generator=generator) / (4 if len(shape) == 2 else 1)
        for name, shape in shapes.items()
    }
    folder = tmp_path_factory.mktemp("jina")
    head = {"cls.predictions.bias": torch.zeros(VOCAB_SIZE)}
    write_checkpoint(folder, CONFIG, {f"bert.{name}": x for name, x in weights.items()} | head)
    return folder, {name: x.double() for name, x in weights.items()}


def by_formula(weights, tokens):
    """Hidden states [T, H], as the authors' code computes them."""

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(x, name):
        return F.layer_norm(x, (SIZE,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    # 6 heads: the slopes of 4, and two of 8.
    slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    places = torch.arange(len(tokens))
    alibi = -torch.tensor(slopes).double()[:, None, None] * (places[:, None] - places).abs()
    x = weights["embeddings.word_embeddings.weight"][tokens]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for index in range(LAYERS):
        layer = f"encoder.layer.{index}"
        q, k, v = (
            linear(x, f"{layer}.attention.self.{name}").view(len(x), HEADS, -1).transpose(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / math.sqrt(SIZE // HEADS) + alibi
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        attention = f"{layer}.attention.output"
        x = norm(linear(attended, f"{attention}.dense") + x, f"{attention}.LayerNorm")
        gate, up = linear(x, f"{layer}.mlp.gated_layers").chunk(2, -1)
        x = norm(linear(F.gelu(gate) * up, f"{layer}.mlp.wo") + x, f"{layer}.mlp.layernorm")
    return x


def test_hidden_states(checkpoint):
    folder, weights = checkpoint
    for sequence, ours in zip(
        SEQUENCES, hidden_states([load(JinaBertModel, folder)], SEQUENCES), strict=True
    ):
        torch.testing.assert_close(ours, by_formula(weights, sequence).float(), atol=1e-4, rtol=0)


def test_embeddings_by_the_engine(checkpoint):
    """BERT's `model_type` does not make BERT of it; more tokens than config.json states do."""
    folder, weights = checkpoint
    prompts = [*SEQUENCES, torch.arange(5, 101)]
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=100) as llm:
        found = llm.embed([{"prompt_token_ids": ids.tolist()} for ids in prompts], use_tqdm=False)
    for ids, ours in zip(prompts, found, strict=True):
        expected = F.normalize(by_formula(weights, ids).mean(0), dim=0).float()
        torch.testing.assert_close(torch.tensor(ours.outputs.data), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("heads", [1, 2, 8, 12])
def test_slopes_fall(heads):
    slopes = alibi_slopes(heads)
    assert len(slopes) == len(set(slopes)) == heads
    assert all(0 < slope < 1 for slope in slopes)


@pytest.mark.parametrize(
    "change", [{"position_embedding_type": "absolute"}, {"feed_forward_type": "original"}]
)
def test_what_it_does_not_do_is_refused(checkpoint, tmp_path, change):
    [(name, value)] = change.items()
    (tmp_path / "model.safetensors").symlink_to(checkpoint[0] / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(UnsupportedError, match=f"'{name}' is '{value}'"):
        load(JinaBertModel, tmp_path)
