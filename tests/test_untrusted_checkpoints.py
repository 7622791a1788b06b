"""Checkpoints that nobody vouches for, through the whole engine: a clear error at the start, and no
code of theirs runs."""

from __future__ import annotations

import json
import shutil
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import CheckpointError

SMALL = {"num_kv_blocks": 64, "block_size": 4, "max_model_len": 128, "max_num_seqs": 8}
CODE = "import sys\nsys.remote_code_ran = True\n"


@pytest.fixture
def folder(make_llama, tmp_path):
    """A copy of a small Llama, to spoil."""
    return shutil.copytree(make_llama("untrusted")[0], tmp_path / "copy")


def rewrite(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers must be an integer of at least 1, at most 1024",
        ),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer of at least 1"),
        ({"num_attention_heads": 3}, "3 query heads cannot share 2 KV heads|not fitting"),
        ({"hidden_size": 10**7}, "not fitting"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be of type float, not nan"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' must be of type float"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}},
            "rotary embeddings are not finite",
        ),
        ({"eos_token_id": "2"}, "config.json: eos_token_id must be a token id"),
        ({"text_config": [1]}, "'text_config' must be of type dict"),
    ],
)
def test_an_absurd_config_is_refused_at_once(folder, change, message):
    rewrite(folder / "config.json", **change)
    start = time.monotonic()
    with pytest.raises(CheckpointError, match=message):
        LLM(str(folder), **SMALL)
    assert time.monotonic() - start < 20


def test_weights_that_are_no_numbers_are_refused(folder):
    weights = load_file(folder / "model.safetensors")
    save_file(
        weights | {"model.norm.weight": torch.full_like(weights["model.norm.weight"], torch.nan)},
        folder / "model.safetensors",
    )
    said = (
        r"cannot draw a first token: the model's logits are not finite\. The weight "
        r"'model\.norm\.weight' holds NaN or infinity\."
    )
    with pytest.raises(CheckpointError, match=said):
        LLM(str(folder), **SMALL)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("budget", [16, 2048])
def test_a_token_whose_embedding_is_no_number_fails_the_requests_that_use_it(
    make_llama, tmp_path, value, budget
):
    """The others get what they get alone, also from blocks that held its keys and values."""
    folder = shutil.copytree(make_llama("untied", tie_word_embeddings=False)[0], tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][100] = value
    save_file(weights, folder / "model.safetensors")
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)
    good = [[5 + number] * (3 + number % 7) for number in range(12)]
    bad = [[100], [5, 100, 6], [100, *[7] * 20], [*[7] * 20, 100]] * 3
    with LLM(
        str(folder),
        **SMALL | {"num_kv_blocks": 24, "max_model_len": 64, "max_num_seqs": 4},
        max_num_batched_tokens=budget,
    ) as llm:

        def outputs(*token_ids: list[int]):
            return llm.generate(
                [{"prompt_token_ids": one} for one in token_ids], params, use_tqdm=False
            )

        alone = [output.outputs[0].token_ids for output in outputs(*good)]
        for _ in range(2):
            mixed = outputs(*(one for pair in zip(good, bad, strict=True) for one in pair))
            assert [output.outputs[0].token_ids for output in mixed[::2]] == alone
            assert {output.error for output in mixed[1::2]} == {"the model's logits are not finite"}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("task", "culprit"),
    [
        ("embed", "model.layers.1.mlp.down_proj.weight"),
        ("classify", "score.weight"),
        ("classify", "model.embed_tokens.weight"),
    ],
)
def test_weights_of_a_pooling_model_that_are_no_numbers_are_refused(folder, task, culprit, value):
    weights = load_file(folder / "model.safetensors")
    if task == "classify":
        rewrite(
            folder / "config.json",
            architectures=["LlamaForSequenceClassification"],
            id2label={"0": "no", "1": "yes"},
        )
        weights["score.weight"] = torch.ones(2, 64)
    weights[culprit][:2] = value
    save_file(weights, folder / "model.safetensors")
    said = (
        rf"cannot serve the task '{task}': .* not finite\. The weight '{culprit}' holds NaN or "
        r"infinity\."
    )
    with pytest.raises(CheckpointError, match=said):
        LLM(str(folder), max_model_len=128, convert=task)


def test_code_that_comes_along_does_not_run(folder, monkeypatch):
    monkeypatch.setattr(sys, "remote_code_ran", False, raising=False)
    for name in (
        "mine",
        "config",
        "configuration_llama",
        "modeling_llama",
        "tokenization_llama",
        "__init__",
    ):
        (folder / f"{name}.py").write_text(CODE)
    auto_map = {
        "AutoConfig": "mine.Config",
        "AutoModelForCausalLM": "mine.Model",
        "AutoTokenizer": ["mine.Tokenizer", None],
    }
    rewrite(folder / "config.json", auto_map=auto_map)
    rewrite(folder / "tokenizer_config.json", auto_map=auto_map)
    with LLM(str(folder), **SMALL) as llm:
        assert (
            llm.generate("abc", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0]
            .outputs[0]
            .token_ids
        )
    assert not sys.remote_code_ran
