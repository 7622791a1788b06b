"""The embedding of tokens and the head that gives logits, both split by vocabulary."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.model.parameters import Part, ShardLoader, new_parameter, torch_dtype
from toolkit_lm.model.projection import Projection


def _vocab_part(vocab_size: int, vllm_config: VllmConfig) -> Part:
    """This rank's tokens; the vocabulary is padded to a multiple of the ranks."""
    size = -(-vocab_size // vllm_config.parallel.tensor_parallel_size)
    return Part(vocab_size, vllm_config.parallel.tensor_parallel_rank * size, size)


class VocabParallelEmbedding(nn.Module):
    """Token ids [T] -> [T, embedding_size], times `scale`. Each rank holds the rows of its share of the vocabulary."""

    def __init__(self, vocab_size: int, embedding_size: int, *, scale: float = 1.0, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.scale = scale
        self.vocab_size = vocab_size
        self.parallel = vllm_config.parallel
        self.is_sharded = self.parallel.tensor_parallel_size > 1
        self.part = _vocab_part(vocab_size, vllm_config)
        self.weight = new_parameter((self.part.size, embedding_size), torch_dtype(vllm_config.model.dtype), ShardLoader((self.part,)))

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded = self._embed(input_ids)
        return embedded if self.scale == 1 else embedded.mul_(self.scale)

    def _embed(self, input_ids: Tensor) -> Tensor:
        if not self.is_sharded:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.part.start
        elsewhere = (local < 0) | (local >= self.part.size)
        embedded = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return tensor_parallel_group(self.parallel).all_reduce(embedded.masked_fill_(elsewhere.unsqueeze(-1), 0))


class ParallelLMHead(Projection):
    """Hidden states [R, hidden_size] -> logits [R, vocab_size], gathered from all ranks.

    With `tied_to` the weight is the embedding's own.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        tied_to: VocabParallelEmbedding | None = None,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.parallel = vllm_config.parallel
        self.is_sharded = self.parallel.tensor_parallel_size > 1
        part = _vocab_part(vocab_size, vllm_config)
        dtype, loader = torch_dtype(vllm_config.model.dtype), ShardLoader((part,))
        self.weight = tied_to.weight if tied_to is not None else new_parameter((part.size, hidden_size), dtype, loader)
        self.bias = new_parameter((part.size,), dtype, loader) if bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits = self.project(hidden_states, self.bias)
        if not self.is_sharded:
            return logits
        return tensor_parallel_group(self.parallel).all_gather(logits, -1)[..., : self.vocab_size]
