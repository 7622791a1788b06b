"""One of four ranks, two tensor parallel by two pipeline parallel: `group_rank.py RANK SYNC_FILE`.
Fails where a collective is wrong."""

import sys
from pathlib import Path

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import pipeline_parallel_group, tensor_parallel_group
from toolkit_lm.model import RowParallelLinear
from toolkit_lm_executor_mp.groups import torch_groups


def main(rank: int, sync_file: str) -> None:
    config = VllmConfig.default(tensor_parallel_size=2, pipeline_parallel_size=2).with_rank(rank)
    with torch_groups(config.parallel, Path(sync_file)):
        check_collectives(rank, config)
        check_messages(rank, config)
        check_residual(config)


def check_collectives(rank: int, config: VllmConfig) -> None:
    tensor = tensor_parallel_group(config.parallel)
    pipeline = pipeline_parallel_group(config.parallel)
    assert (tensor.rank, tensor.size, pipeline.rank, pipeline.size) == (rank % 2, 2, rank // 2, 2)
    mine = torch.full((2, 3), float(rank))
    first = rank // 2 * 2
    assert tensor.all_reduce(mine.clone()).tolist() == [[2.0 * first + 1] * 3] * 2
    assert tensor.all_gather(mine, 1).tolist() == [[first] * 3 + [first + 1] * 3] * 2
    assert tensor.all_gather(mine.t(), 0)[:, 0].tolist() == [first] * 3 + [first + 1] * 3
    assert pipeline.all_reduce(mine.clone())[0, 0] == 2 * (rank % 2) + 2


def check_messages(rank: int, config: VllmConfig) -> None:
    """Tensors of several shapes and dtypes, one of them not contiguous and one empty, arrive by
    name and in order."""
    pipeline = pipeline_parallel_group(config.parallel)
    first = {
        "hidden": torch.arange(6.0).view(2, 3).t(),
        "half": torch.full((2,), float(rank % 2), dtype=torch.bfloat16),
    }
    for sent in (first, {"none": torch.empty(0, 4, dtype=torch.int64)}):
        if pipeline.rank == 0:
            pipeline.send(sent, 1)
        else:
            received = pipeline.recv(0)
            assert list(received) == list(sent)
            for name, tensor in sent.items():
                torch.testing.assert_close(received[name], tensor, rtol=0, atol=0)


def check_residual(config: VllmConfig) -> None:
    """Bias and residual are added once, not by each rank."""
    x, weight, bias, residual = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for shape in ((5, 8), (6, 8), (6,), (5, 6))
    )
    layer = RowParallelLinear(8, 6, bias=True, vllm_config=config, prefix="layer")
    layer.weight.weight_loader(layer.weight, weight)
    layer.bias.weight_loader(layer.bias, bias)
    mine = slice(
        config.parallel.tensor_parallel_rank * 4, config.parallel.tensor_parallel_rank * 4 + 4
    )
    torch.testing.assert_close(
        layer(x[:, mine], residual), torch.nn.functional.linear(x, weight, bias) + residual
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
