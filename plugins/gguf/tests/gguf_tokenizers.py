"""Files that hold a tokenizer alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from toolkit_lm_gguf.file import GGUFFile

TEXTS = [
    "The cat sat on the mat, and then it's 12345 o'clock: I'LL go!",
    " leading spaces,   many   of them \n\n  and\tlines\r\n",
    "naïve Ünïcode, Привет мир, 中文字符 2024年, héllo 😀 x1y22z333",
    "camelCase HTTPServer/path//to--x (a+b)=c && d||e; $5.00 100%",
    "",
    "<|end|>and more<|im_end|>",
]


def write_tokenizer(path: Path, architecture: str = "llama", **values: Any) -> GGUFFile:
    """A file that holds a tokenizer alone; `values` by the names in `tokenizer.ggml`."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(path)


WORDS = ["▁t", "he", "▁the", "in", "▁c", "at", "▁cat", "er", "▁a", "nd", "▁and", "th", "▁▁", "▁▁▁▁"]
PIECES = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *((word, -float(i), 1) for i, word in enumerate(WORDS)),
    *((letter, -100.0 - i, 1) for i, letter in enumerate("▁etaoinshrdlucmfwypvbgkqjxz.,")),
]
"""Text, score and type of the pieces of a vocabulary such as Llama 2's."""


def sentencepiece(path: Path, architecture: str = "llama", **values: Any) -> GGUFFile:
    return write_tokenizer(path, architecture, model="llama", **(pieces() | values))


def pieces() -> dict[str, Any]:
    return {
        "tokens": [text for text, _, _ in PIECES],
        "scores": [score for _, score, _ in PIECES],
        "token_type": [kind for _, _, kind in PIECES],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
