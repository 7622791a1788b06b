"""One rank of small models over gloo: `decoder_rank.py RANK RANKS FOLDER [ARCHITECTURE CHECKPOINT]...`. Writes their logits to FOLDER."""

import sys
from pathlib import Path

import torch
from decoder_families import our_class
from decoder_harness import load, logits_of
from safetensors.torch import save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import destroy, initialize


def main(rank: int, ranks: int, folder: Path, work: list[str]) -> None:
    parallel = VllmConfig.default(tensor_parallel_size=ranks).with_rank(rank).parallel
    initialize(parallel, init_method=f"file://{folder / 'sync'}", backend="gloo")
    for architecture, checkpoint in zip(work[::2], work[1::2], strict=True):
        model = load(our_class(architecture), Path(checkpoint), rank=rank, tensor_parallel_size=ranks)
        logits = logits_of([model], torch.arange(3, 40))
        save_file({"logits": logits.contiguous()}, folder / f"{architecture}.{rank}.safetensors")
    destroy()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
