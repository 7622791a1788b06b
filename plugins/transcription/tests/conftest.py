"""A small Whisper checkpoint with random weights."""

import json

import pytest
import torch
import transformers
from toolkit_lm_devkit import randomize, write_tokenizer

WITHOUT = 300
END = 1
START = 290
GENERATION = {
    "decoder_start_token_id": START,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": 2,
    "no_timestamps_token_id": WITHOUT,
    "lang_to_id": {"<|en|>": 291, "<|de|>": 292},
    "task_to_id": {"transcribe": 293, "translate": 294},
    "prev_sot_token_id": 295,
}
SIDES = {"layers": 1, "attention_heads": 2, "ffn_dim": 64}
SHAPE = {
    "d_model": 32,
    "max_target_positions": 32,
    **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in SIDES.items()},
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    ids = {
        key: GENERATION[key]
        for key in ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = transformers.WhisperConfig(
        vocab_size=1802, suppress_tokens=None, begin_suppress_tokens=None, **SHAPE, **ids
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    randomize(model, seed=4)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    write_tokenizer(folder, 1802)
    return folder
