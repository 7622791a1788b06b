"""GGUF files of a checkpoint, for llama.cpp: in bf16 by `toolkit quantize`, and in a type such as
Q4_0 or Q4_K_M as llama.cpp itself quantizes that.

usage: python race_gguf.py FILE OUT TYPE

With the Python of llama-cpp-python: writes a file in bf16 anew, in TYPE.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def write_gguf(checkpoint: Path, file: Path) -> Path:
    """In the checkpoint's dtype. A file that is there is left as it is."""
    if not file.exists():
        toolkit("quantize", checkpoint, "--format", "gguf", "--out", file)
    return file


def toolkit(*arguments: str | Path) -> None:
    """The command `toolkit`, by this Python."""
    main = "from toolkit_lm_cli import main; main()"
    subprocess.run([sys.executable, "-c", main, *arguments], check=True)


def quantize(file: Path, out: Path, kind: str) -> Path:
    """Needs llama-cpp-python."""
    import llama_cpp

    unfinished = out.with_suffix(".part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = 2
    if llama_cpp.llama_model_quantize(str(file).encode(), str(unfinished).encode(), params):
        raise RuntimeError(f"llama.cpp could not write {file} in {kind}")
    return unfinished.rename(out)


if __name__ == "__main__":
    quantize(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
