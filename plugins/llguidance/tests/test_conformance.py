"""The processor passes the conformance kit, over a vocabulary of bytes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from toolkit_lm.config import VllmConfig
from toolkit_lm_devkit import LogitsProcessorConformance
from toolkit_lm_structured_output.params import StructuredOutputs
from toolkit_lm_structured_output.preparing import prepare
from toolkit_lm_structured_output.processor import StructuredOutput

EOS = 0


@pytest.fixture(scope="session", autouse=True)
def bytes_renderer(tmp_path_factory):
    """A renderer whose tokens are bytes, but for the first, which ends a text."""
    folder = tmp_path_factory.mktemp("bytes")
    letters = ["<eos>", *sorted(ByteLevel.alphabet())[:255]]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    special = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": EOS, "content": "<eos>", **special}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {letter: index for index, letter in enumerate(letters)},
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(path=str(folder)),
        renderer=SimpleNamespace(tokenizer=None),
        plugins=VllmConfig.make(model="any").plugins,
    )
    return Renderer(config, Tokenizer.from_file(str(folder / "tokenizer.json")))


class Renderer:
    eos_token_ids = (EOS,)
    vocab_size = 256
    plugins = None

    def __init__(self, config, tokenizer):
        self.config = config
        self.tokenizer = tokenizer

    def token_texts(self, token_ids):
        return [self.tokenizer.decode([token], skip_special_tokens=False) for token in token_ids]


class TestStructuredOutput(LogitsProcessorConformance):
    processor = StructuredOutput
    params = StructuredOutputs
    end_token_id = EOS
    cases = (
        {"structured_outputs": {"regex": "[a-z]*"}},
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["yes", "no"]},
    )
    wrong = (
        {"structured_outputs": {"regex": "("}},
        {"guided_json": "{"},
        {"response_format": 5},
        {"guided_regex": ""},
    )

    @pytest.fixture(autouse=True)
    def renderer(self, bytes_renderer):
        type(self).used = bytes_renderer

    def arguments(self, given):
        params = StructuredOutputs(**given)
        arguments = prepare(
            {name: value for name, value in given.items() if getattr(params, name) is not None},
            self.used,
        )
        assert arguments is not None
        return dict(arguments)
