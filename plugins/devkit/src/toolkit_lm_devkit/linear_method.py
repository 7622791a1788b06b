"""LinearMethodConformance: what every quantization and its linear methods must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import (
    ColumnParallelLinear,
    Epilogue,
    LayerKind,
    LinearBase,
    LinearSpec,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    Quantization,
    ReplicatedLinear,
    RowParallelLinear,
    Shard,
    VocabParallelEmbedding,
    construction,
    torch_dtype,
)
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.equality import assert_bf16_error
from toolkit_lm_devkit.sharding import assert_shards

INPUTS = 128
HEAD_SIZE = 16
HEADS = 8
KV_HEADS = 2
OUTPUTS = 64
VOCABULARY = 96
TOLERANCE = 1e-5
"""Most difference of a product in float32, of values of unit variance and weights that keep it."""


def _expert(config: VllmConfig, name: str) -> LinearBase:
    inner = Shard.even(OUTPUTS, config.parallel, "outputs")
    dtype = torch_dtype(config.model.dtype)
    return LinearBase(
        LinearSpec(
            kind="experts",
            prefix=name,
            inputs=Shard.whole(INPUTS),
            outputs=(inner, inner),
            dtype=dtype,
        )
    )


_LAYERS: Mapping[str, tuple[LayerKind, Callable[[VllmConfig, str], LinearBase]]] = {
    "replicated": (
        "linear",
        lambda c, name: ReplicatedLinear(INPUTS, OUTPUTS, bias=True, vllm_config=c, prefix=name),
    ),
    "column": (
        "linear",
        lambda c, name: ColumnParallelLinear(INPUTS, OUTPUTS, vllm_config=c, prefix=name),
    ),
    "merged": (
        "linear",
        lambda c, name: MergedColumnParallelLinear(
            INPUTS, [OUTPUTS, 32], bias=True, vllm_config=c, prefix=name
        ),
    ),
    "qkv": (
        "linear",
        lambda c, name: QKVParallelLinear(
            INPUTS, HEAD_SIZE, HEADS, KV_HEADS, vllm_config=c, prefix=name
        ),
    ),
    "row": (
        "linear",
        lambda c, name: RowParallelLinear(INPUTS, OUTPUTS, vllm_config=c, prefix=name),
    ),
    "lm_head": (
        "lm_head",
        lambda c, name: ParallelLMHead(VOCABULARY, INPUTS, vllm_config=c, prefix=name),
    ),
    "expert": ("experts", _expert),
}
"""Layer -> its kind, and what makes it, with a name."""
NAMES: Mapping[str, str] = {
    "replicated": "model.layers.0.mlp.gate",
    "column": "model.layers.0.mlp.up_proj",
    "merged": "model.layers.0.mlp.gate_up_proj",
    "qkv": "model.layers.0.self_attn.qkv_proj",
    "row": "model.layers.0.mlp.down_proj",
    "lm_head": "lm_head",
    "expert": "model.layers.0.mlp.experts.0.gate_up_proj",
}
"""Layer -> its name, as in checkpoints of Llama and its relatives; "embedding" is
"model.embed_tokens"."""


class LinearMethodConformance(Conformance):
    """Subclass it as `class TestMine(LinearMethodConformance)`, name `quantization`, and say in
    `dequantized` what weight it stands for.

    Layers of all kinds are made with random weights, on the CPU, and compared with that weight in
    plain torch.
    """

    quantization: ClassVar[type[Quantization]]
    quantization_config: ClassVar[Mapping[str, Any]] = {}
    """Quantization config of checkpoints; empty if weights are quantized while they are loaded."""
    kinds: ClassVar[Sequence[LayerKind]] = ("linear",)
    """The kinds of layers that it has methods for."""
    tensor_parallel_sizes: ClassVar[Sequence[int]] = (2, 4)
    names: ClassVar[Mapping[str, str]] = {}
    """Names of layers as a checkpoint has them, where those of `NAMES` are not those that
    `quantization_config` speaks of."""

    @classmethod
    def name(cls, layer: str) -> str:
        """Name of a layer in the checkpoint: its `LinearSpec.prefix`."""
        return {"embedding": "model.embed_tokens", **NAMES, **cls.names}[layer]

    def stored(self, weight: Tensor) -> Mapping[str, Tensor]:
        """Stored form of a weight [outputs, inputs] float32 in a checkpoint: the layer's parameter
        -> tensor."""
        return {"weight": weight}

    def dequantized(self, weight: Tensor) -> Tensor:
        """The weight that the method multiplies with, for that one: float32, of its shape."""
        raise NotImplementedError(f"{type(self).__name__} must define dequantized(weight)")

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        return {
            "layer": {name: name for name, (kind, _) in _LAYERS.items() if kind in cls.kinds},
            "ranks": {str(size): size for size in cls.tensor_parallel_sizes},
            "dtype": {"float32": torch.float32, "bfloat16": torch.bfloat16},
        }

    def make(
        self,
        layer: str,
        *,
        rank: int = 0,
        ranks: int = 1,
        dtype: torch.dtype = torch.float32,
        process: bool = True,
    ) -> LinearBase:
        """A layer with the weights of `pieces`, and a random bias where it has one."""
        name = str(dtype).removeprefix("torch.")
        config = VllmConfig.default(
            {"quantization_config": dict(self.quantization_config)},
            tensor_parallel_size=ranks,
            dtype=name,
        ).with_rank(rank)
        assert self.quantization.refuses(config) is None
        with construction(quantization=self.quantization(config)):
            made = _LAYERS[layer][1](config, self.name(layer))
        pieces = self.pieces(made)
        for index, piece in enumerate(pieces):
            for key, tensor in self.stored(piece).items():
                param: Any = made.get_parameter(key)
                param.weight_loader(param, tensor, index if len(pieces) > 1 else None)
        if made.bias is not None:
            bias: Any = made.bias
            bias.weight_loader(
                bias, torch.randn(_full(made.spec.outputs), generator=_generator(99))
            )
        if process:
            made.method.process(made)
        return made

    def pieces(self, layer: LinearBase) -> list[Tensor]:
        """The checkpoint's weights of a layer: one for each shard of its outputs."""
        inputs = layer.spec.inputs.full
        return [
            torch.randn(shard.full, inputs, generator=_generator(i)) * inputs**-0.5
            for i, shard in enumerate(layer.spec.outputs)
        ]

    def weight(self, layer: LinearBase) -> Tensor:
        """Weight of the whole layer, in float32."""
        return torch.cat([self.dequantized(piece) for piece in self.pieces(layer)])

    def test_the_product_is_that_of_the_dequantized_weight(
        self, layer: str, dtype: torch.dtype
    ) -> None:
        made = self.make(layer, dtype=dtype)
        weight = self.weight(made)
        bias = made.bias
        shown = made.method.dequantized()
        assert (shown.shape, shown.is_floating_point()) == (weight.shape, True)
        near = max(TOLERANCE, torch.finfo(dtype).eps) * weight.abs().max().item()
        torch.testing.assert_close(shown.float(), weight, atol=near, rtol=0)
        for rows in (0, 1, 33):
            x = torch.randn(rows, INPUTS, generator=_generator(7)).to(dtype)
            ours = made.method.apply(x, bias)
            assert (ours.shape, ours.dtype) == ((rows, len(weight)), dtype)
            if (found := made.method.likeliest(x, bias)) is not None:
                assert all(map(torch.equal, found, ours.max(-1))), (
                    "the likeliest outputs are others than those of the product"
                )
            exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
            if dtype is torch.float32:
                torch.testing.assert_close(ours.double(), exact, atol=TOLERANCE, rtol=0)
            elif rows:
                assert_bf16_error([ours], [F.linear(x, weight.to(dtype), bias)], [exact])

    def test_a_row_is_computed_alike_whatever_is_beside_it(
        self, layer: str, dtype: torch.dtype
    ) -> None:
        """Other rows may be a thousand times as large, or all zeros: a request's result does not
        depend on the others."""
        made = self.make(layer, dtype=dtype)
        sizes = (
            torch.ones(33)
            .index_fill(0, torch.tensor([0, 7]), 1000)
            .index_fill(0, torch.tensor([3]), 0)
        )
        x = (torch.randn(33, INPUTS, generator=_generator(8)) * sizes[:, None]).to(dtype)
        together = made.method.apply(x, made.bias)
        for row in (0, 1, 3, 8, 32):
            alone = made.method.apply(x[row : row + 1].clone(), made.bias)[0]
            # A sum in another order may round otherwise.
            rounding = max(TOLERANCE, 2 * torch.finfo(dtype).eps) * max(alone.abs().max().item(), 1)
            worst = (together[row] - alone).abs().max().item()
            assert worst <= rounding, (
                f"row {row} is off by {worst:.3g} from what it is alone: it depends on the "
                "rows beside it"
            )

    def test_activation_and_residual_follow_the_product(self, layer: str) -> None:
        made = self.make(layer)
        x = torch.randn(9, INPUTS)
        residual = torch.randn(9, _full(made.spec.outputs))
        plain = made.method.apply(x, made.bias)
        before = residual.clone()
        torch.testing.assert_close(
            made.method.apply(x, made.bias, Epilogue(residual=residual)),
            plain + residual,
            atol=TOLERANCE,
            rtol=0,
        )
        assert torch.equal(residual, before), "the residual is changed"
        for name, function in (("gelu", F.gelu), ("silu", F.silu)):
            ours = made.method.apply(x, made.bias, Epilogue(name))
            torch.testing.assert_close(ours, function(plain), atol=TOLERANCE, rtol=0)
            ours = made.method.apply(x, made.bias, Epilogue(name, gated=True))
            first, up = plain.chunk(2, dim=-1)
            torch.testing.assert_close(ours, function(first) * up, atol=TOLERANCE, rtol=0)

    def test_shards_make_up_the_whole(self, layer: str, ranks: int) -> None:
        whole = self.make(layer, process=False)
        assert_shards(
            whole,
            [self.make(layer, rank=rank, ranks=ranks, process=False) for rank in range(ranks)],
        )

    def test_the_ranks_compute_what_one_does(self, layer: str, ranks: int) -> None:
        whole = self.make(layer)
        shards = [self.make(layer, rank=rank, ranks=ranks) for rank in range(ranks)]
        x = torch.randn(5, INPUTS)
        expected = whole.method.apply(x, None)
        if whole.spec.inputs.size != shards[0].spec.inputs.size:
            total = torch.stack(
                [shard.method.apply(_share(x, shard.spec.inputs), None) for shard in shards]
            ).sum(0)
            torch.testing.assert_close(total, expected, atol=TOLERANCE, rtol=0)
            return
        outputs = torch.split(expected, [shard.full for shard in whole.spec.outputs], dim=-1)
        for shard in shards:
            mine = torch.cat(
                [_share(out, own) for out, own in zip(outputs, shard.spec.outputs, strict=True)],
                dim=-1,
            )
            torch.testing.assert_close(shard.method.apply(x, None), mine, atol=TOLERANCE, rtol=0)

    def test_it_holds_fewer_bytes(self, layer: str) -> None:
        made = self.make(layer)
        held = sum(tensor.nbytes for tensor in [*made.parameters(), *made.buffers()])
        assert held < self.weight(made).nbytes, f"{layer} holds {held} bytes"

    def test_a_tied_head_is_refused_or_right(self) -> None:
        config = VllmConfig.default({"quantization_config": dict(self.quantization_config)})
        with construction(quantization=self.quantization(config)):
            embedding = VocabParallelEmbedding(
                VOCABULARY, INPUTS, vllm_config=config, prefix=self.name("embedding")
            )
            try:
                head = ParallelLMHead(
                    VOCABULARY,
                    INPUTS,
                    tied_to=embedding,
                    vllm_config=config,
                    prefix=self.name("lm_head"),
                )
            except UnsupportedError:
                return
        weight = torch.randn(VOCABULARY, INPUTS, generator=_generator(3)) * INPUTS**-0.5
        parameters: Mapping[str, Any] = dict(embedding.named_parameters())
        # An embedding may be left as it is, under a name that codes have elsewhere.
        stored = self.stored(weight)
        for key, param in parameters.items():
            param.weight_loader(
                param, stored[key] if stored.keys() <= parameters.keys() else weight
            )
        for module in (embedding, head):
            module.method.process(module)
        rows = embedding(torch.arange(VOCABULARY))
        x = torch.randn(4, INPUTS)
        assert any(
            torch.allclose(rows, expected, atol=TOLERANCE)
            for expected in (weight, self.dequantized(weight))
        )
        torch.testing.assert_close(head(x), x @ rows.T, atol=TOLERANCE, rtol=0)

    def test_it_leaves_no_layer_of_its_kinds(self, layer: str) -> None:
        config = VllmConfig.default({"quantization_config": dict(self.quantization_config)})
        spec = self.make(layer, process=False).spec
        assert self.quantization(config).method(spec) is not None, f"it has no method for {layer}"

    def test_a_refusal_is_a_reason(self) -> None:
        for device in ("cpu", "cuda", "meta"):
            config = VllmConfig.default(
                {"quantization_config": dict(self.quantization_config)}, device=device
            )
            refusal = self.quantization.refuses(config)
            assert refusal is None or (isinstance(refusal, str) and refusal.strip())


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _full(shards: Sequence[Shard]) -> int:
    return sum(shard.full for shard in shards)


def _share(x: Tensor, shard: Shard) -> Tensor:
    """[..., shard.full] -> [..., shard.size]."""
    return x[..., shard.start : shard.start + shard.size]
