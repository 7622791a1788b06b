"""The token embedding and the language-modeling head, both sharded by vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from toolkit_lm.attention import head_tokens
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model.kernels import choose_kernels, method_chooser
from toolkit_lm.model.linear import LinearBase
from toolkit_lm.model.linear_method import LayerKind, LinearMethod, LinearSpec, Rows
from toolkit_lm.model.parameters import Shard, torch_dtype


class _VocabParallel(LinearBase):
    """Each rank holds the rows of its share of the vocabulary, which is padded to a multiple of the
    number of ranks."""

    def __init__(
        self,
        kind: LayerKind,
        vocab_size: int,
        size: int,
        *,
        bias: bool = False,
        tied_to: LinearMethod | None = None,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        parallel = vllm_config.parallel
        dtype = torch_dtype(vllm_config.model.dtype)
        share = -(-vocab_size // parallel.tensor_parallel_size)
        shard = Shard(vocab_size, parallel.tensor_parallel_rank * share, share)
        super().__init__(
            LinearSpec(
                kind=kind,
                prefix=prefix,
                inputs=Shard.whole(size),
                outputs=(shard,),
                dtype=dtype,
                tied_to=tied_to,
            ),
            bias=bias,
        )
        self.vocab_size = vocab_size
        self.shard = shard
        self.parallel = parallel
        self.is_sharded = parallel.tensor_parallel_size > 1


class VocabParallelEmbedding(_VocabParallel):
    """Token ids [T] -> [T, embedding_size], times `scale`."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        *,
        scale: float = 1.0,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__(
            "embedding", vocab_size, embedding_size, vllm_config=vllm_config, prefix=prefix
        )
        self.scale = scale

    def wrap(self, make: Callable[[LinearMethod], LinearMethod]) -> None:
        method = make(self.method)
        if type(method).embed is LinearMethod.embed:
            raise UnsupportedError(
                f"{type(method).__name__} cannot wrap {self.prefix}: it has no method embed."
            )
        self.method = method

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        embedded = self._sharded(input_ids) if self.is_sharded else self.method.embed(input_ids)
        return embedded if self.scale == 1 else embedded.mul_(self.scale)

    def _sharded(self, input_ids: Tensor) -> Tensor:
        local = input_ids - self.shard.start
        elsewhere = (local < 0) | (local >= self.shard.size)
        embedded = self.method.embed(local.masked_fill(elsewhere, 0))
        return tensor_parallel_group(self.parallel).all_reduce(
            embedded.masked_fill_(elsewhere.unsqueeze(-1), 0)
        )


class ParallelLMHead(_VocabParallel):
    """Hidden states [R, hidden_size] -> logits [R, vocab_size], gathered from all ranks.

    With `tied_to` the weight is the embedding's own, unless the checkpoint holds another one.
    """

    seams = frozenset()

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
        method = None if tied_to is None else tied_to.method
        super().__init__(
            "lm_head",
            vocab_size,
            hidden_size,
            bias=bias,
            tied_to=method,
            vllm_config=vllm_config,
            prefix=prefix,
        )
        self.kernels = choose_kernels()
        self._choose_method = method_chooser()

    def untie(self) -> None:
        """Gives the head a weight of its own, which is still to be loaded."""
        self.spec = replace(self.spec, tied_to=None)
        with torch.device(next(self.parameters()).device):
            self.method = self._choose_method(self.spec)
            self.method.create(self, self.spec)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        tokens = head_tokens()
        rows = Rows.SAMPLED if tokens is None else tokens
        logits = self.method.apply(hidden_states, self.bias, rows=rows)
        if not self.is_sharded:
            return logits
        return tensor_parallel_group(self.parallel).all_gather(logits, -1)[..., : self.vocab_size]

    def likeliest(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Like `Kernels.likeliest` of the logits. The logits are computed only if they are sharded,
        or if the linear method needs them.

        They are also computed if a subclass has a `forward` of its own, or the head has a hook.
        """
        in_place = not self.is_sharded and self.may_bypass()
        found = self.method.likeliest(hidden_states, self.bias) if in_place else None
        return self.kernels.likeliest(self(hidden_states)) if found is None else found
