"""BGE-M3: the vector of a text, weights of its tokens, and vectors of its tokens, as FlagEmbedding
makes them of transformers' hidden states."""

import json

import numpy as np
import pytest
import torch
from encoder_families import ROBERTA_LIKE, make_model
from safetensors.torch import save_file
from toolkit_lm import LLM
from toolkit_lm.errors import CheckpointError
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_devkit import make_checkpoint, randomize
from torch.nn import functional as F

GENERATOR = torch.Generator().manual_seed(5)
SPECIAL = [50, 51]
"""Ids of the tokens that a file names."""
PROMPTS = [[50, 109, 117, 109, 51], [50, 200, 51], [130, 131, 132, 133, 130]]


@pytest.fixture
def checkpoint(tmp_path):
    """A folder, transformers' model and the two heads."""
    model = make_model("XLMRobertaModel", {**ROBERTA_LIKE, "vocab_size": 270}).eval()
    randomize(model)
    make_checkpoint(tmp_path, model)
    vocab = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    words = {index: word for word, index in vocab.items()}
    special = {"cls_token": words[SPECIAL[0]], "unk_token": {"content": words[SPECIAL[1]]}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    kinds = ["Transformer", "Pooling", "Normalize"]
    (tmp_path / "modules.json").write_text(
        json.dumps(
            [
                {
                    "idx": index,
                    "name": str(index),
                    "path": f"{index}_{kind}" if index else "",
                    "type": f"sentence_transformers.models.{kind}",
                }
                for index, kind in enumerate(kinds)
            ]
        )
    )
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 48, "pooling_mode_cls_token": True})
    )
    heads = {}
    for name, outputs in (("sparse", 1), ("colbert", 20)):
        weight = torch.randn(outputs, 48, generator=GENERATOR)
        heads[name] = weight, torch.randn(outputs, generator=GENERATOR)
        tensors = dict(zip(("weight", "bias"), heads[name], strict=True))
        save_file(tensors, tmp_path / f"{name}_linear.safetensors")
    return tmp_path, model, heads


def test_three_kinds_of_results(checkpoint):
    folder, model, heads = checkpoint
    given = [{"prompt_token_ids": ids} for ids in PROMPTS]
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        found = {
            task: [
                output.outputs.data
                for output in llm.encode(given, pooling_task=task, use_tqdm=False)
            ]
            for task in ("embed", "token_classify", "token_embed")
        }
        raw, of_step = (
            llm.encode(given[:1], PoolingParams(task="token_classify", **fields), use_tqdm=False)
            for fields in ({"use_activation": False}, {"step_tag_id": 109})
        )
    for index, ids in enumerate(PROMPTS):
        with torch.inference_mode():
            states = model(torch.tensor([ids])).last_hidden_state[0]
        weights = F.linear(states, *heads["sparse"]).relu()
        weights[torch.isin(torch.tensor(ids), torch.tensor(SPECIAL))] = 0
        expected = {
            "embed": F.normalize(states[0], dim=0),
            "token_classify": weights,
            "token_embed": F.normalize(F.linear(states, *heads["colbert"]), dim=-1),
        }
        for task, values in expected.items():
            np.testing.assert_allclose(found[task][index], values, atol=1e-4)
        if not index:
            logits = F.linear(states, *heads["sparse"])[1:4]
            np.testing.assert_allclose(raw[0].outputs.data[1:4], logits, atol=1e-4)
            np.testing.assert_allclose(of_step[0].outputs.data, weights[[1, 3]], atol=1e-4)
    assert any(weights.any() for weights in found["token_classify"])


@pytest.mark.parametrize(
    ("shape", "message"),
    [((2, 48), "gives 2 numbers"), ((1, 40), "vectors of 40"), (None, "'bias'")],
)
def test_heads_that_do_not_fit(checkpoint, shape, message):
    folder = checkpoint[0]
    path = folder / "sparse_linear.safetensors"
    if shape is None:
        path.write_bytes(b"\x08")
    else:
        save_file({"weight": torch.zeros(shape), "bias": torch.zeros(shape[0])}, path)
    with pytest.raises(CheckpointError, match=message):
        LLM(str(folder), device="cpu", dtype="float32")
