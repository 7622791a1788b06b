"""Tiny tokenizers, trained here, and a maker of checkpoint folders."""

from __future__ import annotations

import json

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from toolkit_lm.config import Checkpoint, VllmConfig
from toolkit_lm_renderer_hf.renderer import HfRenderer

CORPUS = [
    "The cat sat on the mat, and the dog barked at the cat.",
    "What is the capital of France? Paris is the capital of France.",
    "Hello world, hello again: 1 2 3 4 5 ...",
    "<|im_start|>user\nassistant system",
] * 5
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def train_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def train_sentencepiece() -> Tokenizer:
    """Tokenizer like Llama 2's: spaces are "▁", and characters outside the vocabulary fall back to
    byte tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    )
    # The byte tokens are ordinary tokens, only the first ones are special.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] in SPECIAL
    ]
    return Tokenizer.from_str(json.dumps(state))


TRAINERS = {"byte_level": train_byte_level, "sentencepiece": train_sentencepiece}


@pytest.fixture(scope="session", params=list(TRAINERS))
def tokenizer(request) -> Tokenizer:
    return TRAINERS[request.param]()


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return train_byte_level()


@pytest.fixture
def make_renderer(tmp_path):
    """make_renderer(tokenizer, tokenizer_config, files={name: text}, hf_config={},
    generation_config={}, **options)."""

    def make(
        tokenizer=None,
        tokenizer_config=None,
        *,
        files=None,
        hf_config=None,
        generation_config=None,
        **options,
    ) -> HfRenderer:
        if tokenizer is not None:
            tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = (
            {"bos_token": "<s>", "eos_token": "</s>"}
            if tokenizer_config is None
            else tokenizer_config
        )
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        for name, text in (files or {}).items():
            (tmp_path / name).write_text(text)
        resolved = VllmConfig.default(hf_config=hf_config or {}, **options)
        checkpoint = Checkpoint(
            path=str(tmp_path),
            architecture="none",
            hf_config=hf_config or {},
            generation_config=generation_config or {},
        )
        return HfRenderer(msgspec.structs.replace(resolved, checkpoint=checkpoint))

    return make
