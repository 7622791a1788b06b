"""Tokens with which decoders begin."""

import importlib
import json

import msgspec
import pytest
from toolkit_lm.config import VllmConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution.resolution import resolve
from toolkit_lm_devkit import write_tokenizer
from toolkit_lm_encdec import MODELS

START = {"decoder_start_token_id": 2}


def prompt_of(architecture, config, generation):
    resolved = VllmConfig.default(
        {"architectures": [architecture], "vocab_size": 300_000, **config}
    )
    resolved = resolved.with_checkpoint(
        msgspec.structs.replace(resolved.checkpoint, generation_config=generation or {})
    )
    module, name = MODELS[architecture][1].split(":")
    # The rules of these families ask a renderer nothing.
    return getattr(importlib.import_module(module), name)(resolved, None).default_decoder_prompt()


def test_sides_may_state_lengths_of_their_own(tmp_path):
    config = {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "model_type": "t5gemma",
        "vocab_size": 300,
    }
    sides = {"encoder": {"max_position_embeddings": 96}, "decoder": {"max_position_embeddings": 48}}
    (tmp_path / "config.json").write_text(json.dumps({**config, **sides}))
    write_tokenizer(tmp_path, 300)
    plugins = Plugins.load()
    for given, expected in (
        ({}, (48, 96)),
        ({"max_model_len": 64, "max_encoder_len": 128}, (64, 128)),
    ):
        resolved = resolve(
            VllmConfig.make(model=str(tmp_path), device="cpu", load_format="dummy", **given),
            plugins,
        )
        assert (resolved.max_model_len, resolved.max_encoder_len) == expected


@pytest.mark.parametrize(
    ("architecture", "config", "generation", "expected"),
    [
        ("BartForConditionalGeneration", {**START, "bos_token_id": 0}, None, [2]),
        (
            "BartForConditionalGeneration",
            {"bos_token_id": 0},
            {**START, "forced_bos_token_id": 7},
            [2, 7],
        ),
        (
            "BartForConditionalGeneration",
            {**START, "bos_token_id": 0, "forced_bos_token_id": None},
            None,
            [2],
        ),
        ("BartForConditionalGeneration", START, None, [2]),
        # mbart-large-en-ro states the language as the start token, mbart-large-50-many-to-one as
        # the forced one.
        (
            "MBartForConditionalGeneration",
            {"decoder_start_token_id": 250020, "bos_token_id": 0},
            None,
            [250020],
        ),
        (
            "MBartForConditionalGeneration",
            {**START, "bos_token_id": 0},
            {"forced_bos_token_id": 250004},
            [2, 250004],
        ),
        ("T5ForConditionalGeneration", {"decoder_start_token_id": 0, "bos_token_id": 5}, None, [0]),
        (
            "MarianMTModel",
            {"decoder_start_token_id": 58100, "forced_bos_token_id": None},
            {"bos_token_id": 0},
            [58100],
        ),
        ("T5GemmaForConditionalGeneration", {"bos_token_id": 2}, None, [2]),
        ("PegasusForConditionalGeneration", {"decoder_start_token_id": 0}, None, [0]),
    ],
)
def test_default_decoder_prompt(architecture, config, generation, expected):
    assert prompt_of(architecture, config, generation) == expected
