"""The embedding of tokens and the head that gives logits, both split by vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model.kernels import choose_kernels, method_chooser
from toolkit_lm.model.linear import LinearBase
from toolkit_lm.model.linear_method import LayerKind, LinearMethod, LinearSpec, head_rows
from toolkit_lm.model.parameters import Part, torch_dtype


class _VocabParallel(LinearBase):
    """Each rank holds the rows of its share of the vocabulary, which is padded to a multiple of the
    ranks."""

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
        part = Part(vocab_size, parallel.tensor_parallel_rank * share, share)
        super().__init__(
            LinearSpec(
                kind=kind,
                prefix=prefix,
                inputs=Part.whole(size),
                outputs=(part,),
                dtype=dtype,
                tied_to=tied_to,
            ),
            bias=bias,
        )
        self.vocab_size = vocab_size
        self.part = part
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
        embedded = (
            self._of_all_ranks(input_ids) if self.is_sharded else self.method.embed(input_ids)
        )
        return embedded if self.scale == 1 else embedded.mul_(self.scale)

    def _of_all_ranks(self, input_ids: Tensor) -> Tensor:
        local = input_ids - self.part.start
        elsewhere = (local < 0) | (local >= self.part.size)
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
        """Gives the head a weight of its own, which is to be loaded."""
        self.spec = replace(self.spec, tied_to=None)
        with torch.device(next(self.parameters()).device):
            self.method = self._choose_method(self.spec)
            self.method.create(self, self.spec)

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        logits = self.method.apply(hidden_states, self.bias, rows=head_rows())
        if not self.is_sharded:
            return logits
        return tensor_parallel_group(self.parallel).all_gather(logits, -1)[..., : self.vocab_size]

    def likeliest(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """As `Kernels.likeliest` of the logits, which are made only where they are sharded, or the
        linear method needs them.

        They are also made where a subclass has a `forward` of its own, and while a hook hangs on
        the head.
        """
        in_place = not self.is_sharded and self.may_bypass()
        found = self.method.likeliest(hidden_states, self.bias) if in_place else None
        return self.kernels.likeliest(self(hidden_states)) if found is None else found
