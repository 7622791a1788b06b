"""CTranslate2's Whisper as a child of encoder_decoder.py: a process of its own, told by lines of
JSON what to compute.

    python benchmarks/ctranslate2_whisper.py MODEL THREADS

For each line [batch, tokens] it answers with the seconds that a greedy transcript of random windows
took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    2: "<|startoftranscript|>",
    1: "<|endoftext|>",
    10: "<|notimestamps|>",
    11: "<|transcribe|>",
    12: "<|translate|>",
    14: "<|en|>",
}
_PROMPT = [2, 14, 11, 10]
_END = 1


def convert(source: Path, target: Path) -> None:
    """A checkpoint of transformers with random weights, whose tokenizer has no names for what
    Whisper marks."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(source)).convert(str(target))
    path = target / "vocabulary.json"
    vocabulary = json.loads(path.read_text(encoding="utf-8"))
    for token, name in _NAMES.items():
        vocabulary[token] = name
    path.write_text(json.dumps(vocabulary), encoding="utf-8")


def main(model: str, threads: int) -> None:
    import ctranslate2

    whisper = ctranslate2.models.Whisper(
        model, device="cpu", compute_type="float32", intra_threads=threads, inter_threads=1
    )
    generator = np.random.default_rng(0)
    for line in sys.stdin:
        batch, tokens = json.loads(line)
        features = ctranslate2.StorageView.from_array(
            generator.standard_normal((batch, 80, 3000)).astype(np.float32)
        )
        start = time.perf_counter()
        # Its lengths count twice: half is for the prompt.
        found: list[Any] = whisper.generate(
            features,
            [_PROMPT] * batch,
            beam_size=1,
            max_length=2 * tokens,
            suppress_blank=False,
            suppress_tokens=[_END],
        )
        seconds = time.perf_counter() - start
        if any(len(one.sequences_ids[0]) != tokens for one in found):
            raise RuntimeError(
                f"not all have {tokens} tokens: {[len(one.sequences_ids[0]) for one in found]}"
            )
        print(seconds, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
