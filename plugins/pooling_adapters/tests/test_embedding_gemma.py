"""EmbeddingGemma: Gemma 3 in both directions, and the modules that sentence-transformers runs after
it."""

import json

import numpy as np
import pytest
import torch
import transformers
from adapter_harness import SMALL, save_tokenizer
from safetensors.torch import save_file
from toolkit_lm import LLM, PoolingParams
from toolkit_lm.errors import UnsupportedError
from toolkit_lm_devkit import save_random
from torch.nn import functional as F

GENERATOR = torch.Generator().manual_seed(3)
PROMPTS = [
    torch.randint(3, SMALL["vocab_size"], (length,), generator=GENERATOR).tolist()
    for length in (3, 40, 1, 17, 40)
]
FIELDS = {
    **SMALL,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    # Tokens see ten others, on either side.
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
    "use_bidirectional_attention": True,
}
PROMPT = "task: search result | query: "


def write_module(folder, index, kind, config, weights=None):
    path = folder / f"{index}_{kind}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file(weights, path / "model.safetensors")
    return {
        "idx": index,
        "name": str(index),
        "path": path.name,
        "type": f"sentence_transformers.models.{kind}",
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder, transformers' model and the weights of the two Dense modules."""
    folder = tmp_path_factory.mktemp("embedding_gemma")
    model = transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**FIELDS)).eval()
    save_random(folder, model)
    save_tokenizer(folder)
    weights = [
        torch.randn(64, 32, generator=GENERATOR),
        torch.randn(32, 64, generator=GENERATOR),
    ]
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        write_module(
            folder,
            1,
            "Pooling",
            {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
        ),
        *(
            write_module(
                folder,
                2 + index,
                "Dense",
                {
                    "in_features": weight.shape[1],
                    "out_features": weight.shape[0],
                    "bias": False,
                    "activation_function": "torch.nn.modules.linear.Identity",
                },
                {"linear.weight": weight},
            )
            for index, weight in enumerate(weights)
        ),
        write_module(folder, 4, "Normalize", {}),
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": PROMPT}, "similarity_fn_name": "cosine"})
    )
    return folder, model, weights


def test_embeddings_are_those_of_transformers(checkpoint):
    folder, model, (first, second) = checkpoint
    with LLM(str(folder), device="cpu", dtype="float32", matryoshka=True) as llm:
        given = [{"prompt_token_ids": ids} for ids in PROMPTS]
        found = llm.embed(given, use_tqdm=False)
        short = llm.encode(given, PoolingParams(task="embed", dimensions=8), use_tqdm=False)
    with torch.inference_mode():
        for ids, whole, cut in zip(PROMPTS, found, short, strict=True):
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
            expected = mean @ first.T @ second.T
            np.testing.assert_allclose(
                whole.outputs.data, F.normalize(expected, dim=0).numpy(), atol=1e-5
            )
            np.testing.assert_allclose(
                cut.outputs.data, F.normalize(expected[:8], dim=0).numpy(), atol=1e-5
            )


def test_a_named_prompt_goes_before_the_text(checkpoint):
    with LLM(str(checkpoint[0]), device="cpu", dtype="float32") as llm:
        texts = [PROMPT + "w5 w9", "w5 w9"]
        whole, bare = (llm.embed([text], use_tqdm=False)[0] for text in texts)
        [named] = llm.embed(["w5 w9"], prompt_name="query", use_tqdm=False)
    assert named.prompt_token_ids == whole.prompt_token_ids != bare.prompt_token_ids
    np.testing.assert_array_equal(named.outputs.data, whole.outputs.data)


def test_it_does_not_generate(checkpoint):
    with pytest.raises(UnsupportedError, match="It embeds with runner='pooling'"):
        LLM(str(checkpoint[0]), device="cpu", dtype="float32", runner="generate")
