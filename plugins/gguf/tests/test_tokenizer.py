"""Tokenizers out of GGUF files: the ids of transformers' converter, or of the definition."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from gguf_tokenizers import TEXTS, pieces, sentencepiece, write_tokenizer
from toolkit_lm_gguf.file import GGUFFile
from toolkit_lm_gguf.tokenizer import SPLITS, generation_config, tokenizer, tokenizer_config
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
    convert_gguf_tokenizer,
)

CUTS = {
    "gpt-2": ["abc", " 12345", ",", " x", "1", "'s", "   ", " 77"],
    "smollm": ["abc", " ", "1", "2", "3", "4", "5", ",", " x", "1", "'s", "    ", "7", "7"],
    "default": ["abc", " ", "123", "45", ",", " x", "1", "'", "s", "   ", " ", "77"],
}
"""The words of "abc 12345, x1's    77", as llama.cpp's patterns cut it."""


def theirs(architecture: str, kind: str, values: dict[str, Any]) -> Any:
    names = {"pre": "pre_tokenizer_type", "add_space_prefix": "add_prefix_space"}
    stated = {names.get(name, name): value for name, value in values.items()}
    return convert_gguf_tokenizer(architecture, {"tokenizer_type": kind, **stated})[0]


def ids(made: Any, text: str) -> list[int]:
    return made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("pre", SPLITS)
def test_a_byte_level_tokenizer_cuts_words_as_its_kind_does(tmp_path, byte_level, pre):
    made = tokenizer(write_tokenizer(tmp_path / "m.gguf", model="gpt2", pre=pre, **byte_level))
    for text in TEXTS:
        assert made.decode(ids(made, text), skip_special_tokens=False) == text
    if pre in GGUF_PRE_TOKENIZER_SPLITS:
        # transformers merges words that are tokens for all kinds.
        reference = theirs("llama", "gpt2", {"pre": pre, **byte_level})
        for text in TEXTS:
            cuts = [
                [word for word, _ in one.pre_tokenizer.pre_tokenize_str(text)]
                for one in (made, reference)
            ]
            assert cuts[0] == cuts[1]
            assert ids(made, text) == ids(reference, text)
        return
    same = next(name for name in CUTS if SPLITS[name] == SPLITS[pre])
    cuts = made.pre_tokenizer.pre_tokenize_str("abc 12345, x1's    77")
    assert [word.replace("Ġ", " ") for word, _ in cuts] == CUTS[same]


def test_what_surrounds_a_text_is_what_the_file_says(tmp_path, byte_level):
    def encoded(**values):
        file = write_tokenizer(tmp_path / "m.gguf", model="gpt2", **{**byte_level, **values})
        return tokenizer(file).encode("a").ids

    (a,) = encoded(pre="gpt-2")
    assert encoded(pre="gpt-2", add_bos_token=True) == [0, a]
    assert encoded(pre="llama-bpe") == [0, a]
    assert encoded(pre="llama-bpe", add_bos_token=False, add_eos_token=True) == [a, 1]


def test_all_tokens_that_end_an_answer_are_named(tmp_path, byte_level):
    file = write_tokenizer(
        tmp_path / "m.gguf", model="gpt2", pre="gpt-2", **{**byte_level, "eos_token_id": 7}
    )
    assert generation_config(file) == {"eos_token_id": [1, 7]}
    assert tokenizer_config(file)["bos_token"] == "<|begin|>"


@pytest.mark.parametrize(
    "text", ["the cat and the hat", " leading", "then, other", "naïve 😀", "a\nb  c"]
)
def test_a_sentencepiece_tokenizer_merges_by_score(tmp_path, text):
    file = sentencepiece(tmp_path / "model.gguf")
    made = tokenizer(file)
    encoded = made.encode(text)
    assert encoded.ids[0] == 1
    assert made.decode(encoded.ids, skip_special_tokens=False).removeprefix("<s>").strip(
        " "
    ) == text.strip(" ")
    assert encoded.ids[1:] == merged_by_score(file, text)
    # Phi-3's tokenizer in transformers is Llama 2's as its authors have it.
    assert encoded.ids[1:] == ids(theirs("phi3", "llama", pieces()), text)


def merged_by_score(file: GGUFFile, text: str) -> list[int]:
    """SentencePiece's BPE by its definition: the neighbours whose token has the highest score are
    merged first, the leftmost of equals."""
    tokens = file.require("tokenizer.ggml.tokens", list)
    scores = file.require("tokenizer.ggml.scores", list)
    known = {token: index for index, token in enumerate(tokens)}
    found = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[known[a + b]], -i) for i, (a, b) in enumerate(pairwise(found)) if a + b in known
        ]
        if not pairs:
            break
        place = -max(pairs)[1]
        found[place : place + 2] = ["".join(found[place : place + 2])]
    return [
        i
        for piece in found
        for i in (
            [known[piece]]
            if piece in known
            else [known[f"<0x{byte:02X}>"] for byte in piece.encode()]
        )
    ]


def test_gemma_merges_by_place_and_has_runs_of_spaces(tmp_path):
    """Files have those runs as spaces, of the type of tokens that the user defines."""
    stated = pieces()
    runs = {"▁▁": "  ", "▁▁▁▁": "    "}
    stated["token_type"] = [
        4 if text in runs else kind
        for text, kind in zip(stated["tokens"], stated["token_type"], strict=True)
    ]
    stated["tokens"] = [runs.get(text, text) for text in stated["tokens"]]
    stated["scores"] = [-score for score in stated["scores"]]
    file = sentencepiece(tmp_path / "model.gguf", "gemma2", add_space_prefix=False, **stated)
    made = tokenizer(file)
    reference = theirs("gemma2", "llama", {**stated, "add_space_prefix": False})
    for text in ("the cat and the hat", "a  b    c", "naïve 😀", " x"):
        assert ids(made, text) == ids(reference, text)
        assert made.decode(ids(made, text)) == text
