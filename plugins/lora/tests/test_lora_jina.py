"""Jina embeddings 3 over HTTP: the task of a request names its adapter and its prompt."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lora_served import served
from peft import LoraConfig, PeftModel, get_peft_model
from toolkit_lm import LLM
from toolkit_lm.errors import CheckpointError
from toolkit_lm_devkit import make_checkpoint
from transformers import JinaEmbeddingsV3Config, JinaEmbeddingsV3Model, PreTrainedTokenizerFast

pytestmark = pytest.mark.anyio
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "type_vocab_size": 1,
}
PROMPTS = {"retrieval.query": "Represent the query: ", "text-matching": ""}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"]


def write_jina(folder):
    """Returns the model of each task, None for that of none."""
    torch.manual_seed(0)
    model = JinaEmbeddingsV3Model(JinaEmbeddingsV3Config(**SIZES)).eval()
    make_checkpoint(folder, model)
    settings = {"prompts": PROMPTS, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    config = json.loads((folder / "config.json").read_text())
    dimensions = {"matryoshka_dimensions": [8, 16, 32]}
    (folder / "config.json").write_text(json.dumps({**config, **dimensions}))
    models = {None: model}
    load = lambda: JinaEmbeddingsV3Model.from_pretrained(folder).eval()  # noqa: E731
    for task in ("retrieval_query", "text_matching"):
        models[task] = save(load, folder / task, TARGETS, seed=len(models))
    return models


def save(load, path, targets, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = torch.Generator().manual_seed(seed)
        made = get_peft_model(load(), LoraConfig(r=4, target_modules=targets))
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        made.save_pretrained(path)
        return PeftModel.from_pretrained(load(), path).eval()


async def test_tasks_name_adapters_and_prompts(tmp_path):
    models = write_jina(tmp_path)
    read = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))

    @torch.no_grad()
    def expected(task, text, dimensions=32):
        ids = torch.tensor([read(text)["input_ids"]])
        vector = models[task](ids).last_hidden_state[0].mean(0)[:dimensions]
        return (vector / vector.norm()).numpy()

    text = "a cat"
    query = PROMPTS["retrieval.query"] + text
    asked = [
        ({}, expected(None, text)),
        ({"task": "embed"}, expected(None, text)),
        ({"task": "retrieval.query"}, expected("retrieval_query", query)),
        ({"task": "text-matching"}, expected("text_matching", text)),
        ({"task": "retrieval.query", "dimensions": 8}, expected("retrieval_query", query, 8)),
        ({"task": "retrieval.query", "model": "text_matching"}, expected("text_matching", query)),
        (
            {"model": "text_matching", "prompt_name": "retrieval.query"},
            expected("text_matching", query),
        ),
    ]
    own = {"folder": str(tmp_path)}
    checkpoint = SimpleNamespace(checkpoint=tmp_path)
    async with served(checkpoint, own, engine={"runner": "pooling"}) as (client, _):
        for fields, vector in asked:
            body = {"model": "base", "input": text, **fields}
            reply = await client.post("/v1/embeddings", json=body)
            assert reply.status_code == 200, reply.text
            found = np.array(reply.json()["data"][0]["embedding"])
            assert np.abs(found - vector).max() < 1e-5, fields
        for fields, message in (
            ({"task": "separation"}, "no prompt and no adapter for the task 'separation'"),
            ({"task": "text-matching", "dimensions": 9}, "dimensions"),
        ):
            body = {"model": "base", "input": text, **fields}
            reply = await client.post("/v1/embeddings", json=body)
            assert reply.status_code == 400 and message in reply.json()["error"]["message"]


@pytest.mark.parametrize("version", [4, 5])
def test_versions_that_are_code_of_their_own_are_refused(version, tmp_path):
    name = f"JinaEmbeddingsV{version}Model"
    config = {
        "architectures": [name],
        "model_type": f"jina_embeddings_v{version}",
        "auto_map": {"AutoModel": f"modeling_jina.{name}"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"no installed plugin has the architecture '{name}'"):
        LLM(str(tmp_path), max_model_len=64)
