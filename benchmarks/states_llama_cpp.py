"""llama.cpp as a peer of states.py: a checkpoint in bf16 by llama.cpp's own converter, and rates of
its `llama-batched-bench`.

usage: python states_llama_cpp.py SOURCES CHECKPOINT FILE

Writes the GGUF file alone. SOURCES is a folder of llama.cpp with its converter
(convert_hf_to_gguf.py and conversion/), built in SOURCES/build:
    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF
    cmake --build build --target llama-batched-bench
The files have no tokens' texts: the converter knows tokenizers of published checkpoints alone, and
llama-batched-bench draws the ids of its tokens.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCH = Path("build", "bin", "llama-batched-bench")
SETTINGS = (("-fa", "on"), ("-fa", "off"), ("-fa", "on", "-kvu"), ("-fa", "off", "-kvu"))
"""With flash attention and without, each with a cache per sequence, and one of all."""
CELLS = 256
"""llama.cpp rounds the cache of a sequence up to so many tokens."""
MOST_SECONDS = 600


class LlamaCppError(RuntimeError):
    """The converter or llama-batched-bench failed on a shape."""


class LlamaCpp:
    """A shape in llama.cpp. Each measurement is a process of its own, warmed up by itself."""

    name = "llama.cpp"

    def __init__(self, sources: Path, checkpoint: Path, threads: int) -> None:
        """Raises LlamaCppError where llama.cpp does not convert or not run the checkpoint."""
        self.sources = sources
        self.threads = threads
        self.file = checkpoint / "model.gguf"
        command = [sys.executable, __file__, sources, checkpoint, self.file]
        _output(command, "llama.cpp's converter")
        self.settings: dict[tuple[int, int, int], Sequence[str]] = {}
        """The fastest by count, prompt and new tokens."""

    def rate(self, count: int, prompt: int, new: int) -> float:
        """Tokens per second of `new` steps of `count` rows, or, without steps, of their prompts.
        The first call of a work tries all settings, and keeps the fastest."""
        work = count, prompt, new
        if work not in self.settings:
            tried = {setting: self._run(work, setting) for setting in SETTINGS}
            self.settings[work] = max(tried, key=lambda setting: tried[setting])
        return self._run(work, self.settings[work])

    def _run(self, work: tuple[int, int, int], setting: Sequence[str]) -> float:
        count, prompt, new = work
        cells = -(-(prompt + max(1, new)) // CELLS) * CELLS
        options = {
            "-m": self.file,
            "-t": self.threads,
            "-c": count * cells,
            "-npp": prompt,
            "-ntg": max(1, new),
            "-npl": count,
            "--output-format": "jsonl",
        }
        words = [str(word) for option in options.items() for word in option]
        text = _output([self.sources / BENCH, *words, *setting], "llama-batched-bench")
        found = [json.loads(line) for line in text.splitlines() if line.startswith('{"n_kv_max"')]
        if not found:
            raise LlamaCppError(f"llama-batched-bench measured nothing: {text[-500:]}")
        return float(found[0]["speed_tg" if new else "speed_pp"])


def _output(command: Sequence[str | Path], subject: str) -> str:
    """Its standard output. Raises LlamaCppError with the end of what it has said."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise LlamaCppError(f"{subject}: {error}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-600:]
        raise LlamaCppError(f"{subject} ended with {done.returncode}: {said}")
    return done.stdout


def convert(sources: Path, checkpoint: Path, file: Path) -> None:
    """Writes the GGUF file of a checkpoint in bf16, without texts of tokens."""
    import torch

    sys.path.insert(0, str(sources))
    conversion: Any = importlib.import_module("conversion")
    gguf: Any = importlib.import_module("gguf")
    fields = conversion.ModelBase.load_hparams(checkpoint, False)
    vocab_size = fields.get("text_config", fields)["vocab_size"]
    architecture = conversion.get_model_architecture(fields, conversion.ModelType.TEXT)
    model_class = conversion.get_model_class(architecture)

    def set_vocab(model: Any) -> None:
        model.gguf_writer.add_tokenizer_model("none")
        model.gguf_writer.add_vocab_size(vocab_size)

    model_class.set_vocab = set_vocab
    # transformers saves no layers for drafts.
    model_class.no_mtp = True
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        folder = Path(name)
        for path in (checkpoint / "config.json", *checkpoint.glob("*.safetensors")):
            (folder / path.name).symlink_to(path.absolute())
        # Gemma's embeddings are cut to the tokens that are counted here.
        tokens = {"model": {"vocab": {str(token): token for token in range(vocab_size)}}}
        text = json.dumps({**tokens, "added_tokens": []})
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")
        model_class(folder, gguf.LlamaFileType.MOSTLY_BF16, file).write()


if __name__ == "__main__":
    convert(*map(Path, sys.argv[1:]))
