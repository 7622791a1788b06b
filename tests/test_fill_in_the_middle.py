"""Filling in the middle, by real tokenizers with the tokens that Qwen2.5-Coder, StarCoder and
CodeLlama have for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app

SIZE = 300
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
PREFIX = "def add(a, b):\n    return"
SUFFIX = " + b\n"


def byte_level(marks: list[str]) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in marks]
    )
    return tokenizer


def code_llama(marks: list[str]) -> Tokenizer:
    """Llama's tokens: "▁" for a space, one before each text, single bytes for unknown text, and a
    token before the prompt."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abdefrtu(),:+n",
    ]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in ("<s>", "</s>", *marks)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


MODELS = {
    "Qwen2.5-Coder": (byte_level, ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]),
    "StarCoder": (byte_level, ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]),
    "CodeLlama": (code_llama, ["▁<PRE>", "▁<SUF>", "▁<MID>"]),
}


@contextmanager
def serving(folder: Path, tokenizer: Tokenizer) -> Iterator[TestClient]:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (folder / "config.json").write_text(json.dumps(LLAMA))
    options = {
        "device": "cpu",
        "dtype": "float32",
        "engine_process": False,
        "num_kv_blocks": 64,
        "load_format": "dummy",
    }
    engine = AsyncLLM(VllmConfig.make(model=str(folder), **options))
    try:
        with TestClient(create_app(engine)) as client:
            yield client
    finally:
        engine.close()


def asked(client: TestClient, **body: object) -> list[int]:
    """The ids of the prompt."""
    reply = client.post("/v1/completions", json={"max_tokens": 1, "return_token_ids": True, **body})
    assert reply.status_code == 200, reply.text
    found: list[int] = reply.json()["choices"][0]["prompt_token_ids"]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_what_the_models_were_trained_on(tmp_path, name):
    """The texts as they are between the marks: a suffix goes on where the middle ends, so that no
    space comes before it."""
    make, marks = MODELS[name]
    tokenizer = make(marks)
    before, after, middle = map(tokenizer.token_to_id, marks)
    start = [1] if name == "CodeLlama" else []
    prefix = tokenizer.encode(PREFIX, add_special_tokens=False).ids
    # CodeLlama's reference does the same: a continuation has no space of its own.
    anchored = tokenizer.encode("a" + SUFFIX, add_special_tokens=False).ids
    suffix = anchored[len(tokenizer.encode("a", add_special_tokens=False).ids) :]
    with serving(tmp_path, tokenizer) as client:
        assert asked(client, prompt=PREFIX, suffix=SUFFIX) == [
            *start,
            before,
            *prefix,
            after,
            *suffix,
            middle,
        ]
        assert asked(client, prompt="", suffix=SUFFIX) == [*start, before, after, *suffix, middle]
        filled = client.post(
            "/infill", json={"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 2}
        )
        assert filled.status_code == 200 and isinstance(filled.json()["content"], str)
        assert filled.json()["tokens_evaluated"] == len(
            [*start, before, *prefix, after, *suffix, middle]
        )


def test_a_tokenizer_without_the_tokens(tmp_path):
    with serving(tmp_path, byte_level(["<|endoftext|>"])) as client:
        reply = client.post("/v1/completions", json={"prompt": PREFIX, "suffix": SUFFIX})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "suffix")
