"""One rank of small models over gloo: `encoder_rank.py RANK RANKS FOLDER [ARCHITECTURE CHECKPOINT]...`. Writes hidden states to FOLDER."""

import sys
from pathlib import Path

import torch
from encoder_families import VOCAB_SIZE, our_class
from encoder_harness import hidden_states, load, random_sequences
from safetensors.torch import save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import destroy, initialize


def main(rank: int, ranks: int, folder: Path, work: list[str]) -> None:
    parallel = VllmConfig.default(tensor_parallel_size=ranks).with_rank(rank).parallel
    initialize(parallel, init_method=f"file://{folder / 'sync'}", backend="gloo")
    for architecture, checkpoint in zip(work[::2], work[1::2], strict=True):
        model = load(our_class(architecture), Path(checkpoint), rank=rank, tensor_parallel_size=ranks)
        states = torch.cat(hidden_states([model], random_sequences(VOCAB_SIZE)))
        save_file({"states": states.contiguous()}, folder / f"{architecture}.{rank}.safetensors")
    destroy()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
