"""One rank over gloo: `moe_rank.py RANK RANKS FOLDER FAMILY...`. Writes the logits of the checkpoints FOLDER/FAMILY to FOLDER."""

import sys
from pathlib import Path

import torch
from moe_harness import FAMILIES, load, logits_of
from safetensors.torch import save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import destroy, initialize


def main(rank: int, ranks: int, folder: Path, families: list[str]) -> None:
    parallel = VllmConfig.default(tensor_parallel_size=ranks).with_rank(rank).parallel
    initialize(parallel, init_method=f"file://{folder / 'sync'}", backend="gloo")
    for family in families:
        model = load(FAMILIES[family][0], folder / family, rank=rank, tensor_parallel_size=ranks)
        save_file({"logits": logits_of([model], torch.arange(3, 40)).contiguous()}, folder / f"{family}.{rank}.safetensors")
    destroy()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
