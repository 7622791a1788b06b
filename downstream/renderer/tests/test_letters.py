"""The renderer: what every one must do, and what this one reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from acme_lm_letters.renderer import FILE, LettersRenderer, read_letters
from toolkit_lm.errors import CheckpointError
from toolkit_lm_devkit import RendererConformance


class TestLetters(RendererConformance):
    renderer_class = LettersRenderer

    def write_files(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps({"letters": list("etaoin shrdlué日")}))

    def test_letters_are_tokens_and_all_else_is_bytes(self, renderer):
        # e is the first letter of the file; z is none of them, and byte 122.
        assert renderer.render_prompt("ez日").token_ids == [257, 123, 257 + 14]
        assert renderer.eos_token_ids == [0] and renderer.vocab_size == 257 + 15


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"letters": ["ab"]}', '{"letters": ["a", "a"]}'])
def test_a_file_without_an_alphabet_is_refused(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(CheckpointError, match=FILE):
        read_letters(tmp_path / FILE)
