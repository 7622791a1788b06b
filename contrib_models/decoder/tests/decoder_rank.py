"""One rank of a small Llama over gloo: `decoder_rank.py CHECKPOINT RANK RANKS SYNC_FILE OUT`. Writes its logits to OUT."""

import sys
from pathlib import Path

import torch
from decoder_harness import load, logits_of
from llm_toolkit.config import VllmConfig
from llm_toolkit.distributed import destroy, initialize
from llm_toolkit_decoder.llama import LlamaForCausalLM
from safetensors.torch import save_file


def main(checkpoint: str, rank: int, ranks: int, sync_file: str, out: str) -> None:
    model = load(LlamaForCausalLM, Path(checkpoint), rank=rank, tensor_parallel_size=ranks)
    parallel = VllmConfig.default(tensor_parallel_size=ranks).with_rank(rank).parallel
    initialize(parallel, init_method=f"file://{sync_file}", backend="gloo")
    save_file({"logits": logits_of([model], torch.arange(3, 40)).contiguous()}, out)
    destroy()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
