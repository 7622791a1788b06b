"""Quantized weights: what the record stands for, and the method that a reader gives way to."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from toolkit_lm.model import (
    DequantizingMethod,
    Kernels,
    LinearMethod,
    LinearSpec,
    QuantizedReader,
    QuantizedWeight,
    Shard,
    new_parameter,
)
from torch import Tensor, nn

N = 6
K = 16
G = 4
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0] + [-1.0] * 8)


def random_weight(**fields: Tensor | None) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    stated = {
        "codes": torch.randint(0, 16, (N, K), dtype=torch.uint8, generator=generator),
        "scales": torch.rand(N, G, generator=generator),
        "bits": 4,
    }
    return QuantizedWeight(**(stated | fields))


def one_by_one(weight: QuantizedWeight) -> Tensor:
    """W by the record's formula, element by element."""
    out = torch.empty(N, K)
    floats = weight.codes.is_floating_point()
    for n in range(N):
        for k in range(K):
            g = k * G // K if weight.groups is None else int(weight.groups[k])
            code = weight.codes[n, k]
            value = code.float() if weight.values is None else weight.values[int(code)]
            zero = 0.0 if floats or weight.values is not None else 2.0 ** (weight.bits - 1)
            zero = zero if weight.zeros is None else float(weight.zeros[n, g])
            least = 0.0 if weight.mins is None else float(weight.mins[n, g])
            out[n, k] = (value - zero) * weight.scales[n, g] - least
    return out


KINDS = {
    "symmetric": {},
    "8 bits": {
        "codes": torch.arange(N * K, dtype=torch.uint8).view(N, K) + 100,
        "bits": 8,
    },
    "zeros": {"zeros": torch.arange(N * G).float().view(N, G) % 16},
    "mins": {"zeros": torch.zeros(N, G), "mins": torch.linspace(-1, 1, N * G).view(N, G)},
    "values": {"values": VALUES},
    "groups": {"groups": torch.arange(K) % G},
    "float8": {"codes": torch.linspace(-8, 8, N * K).view(N, K).to(torch.float8_e4m3fn), "bits": 8},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_is_what_the_formula_says(kind):
    weight = random_weight(**KINDS[kind])
    assert torch.equal(weight.dequantized(), one_by_one(weight))


@pytest.mark.parametrize("kind", KINDS)
def test_plain_kernels_multiply_and_embed(kind):
    weight = random_weight(**KINDS[kind])
    dense = weight.dequantized()
    method = DequantizingMethod(weight, torch.float32)
    x = torch.randn(3, K)
    bias = torch.randn(N)
    assert torch.equal(method.dequantized(), dense)
    assert torch.equal(method.multiply(x, bias), nn.functional.linear(x, dense, bias))
    ids = torch.tensor([4, 0, 4])
    assert torch.equal(method.embed(ids), dense[ids])


class Nibbles(QuantizedReader):
    def make_parameters(self, spec: LinearSpec) -> dict[str, nn.Parameter]:
        return {"codes": new_parameter(spec.shape, torch.uint8, spec.loader())}

    def read(self, spec: LinearSpec, loaded: Mapping[str, Tensor]) -> QuantizedWeight:
        return random_weight(codes=loaded["codes"])


def test_a_reader_gives_way_to_the_kernels_method():
    """A tied head reads its embedding's parameters, and gets the embedding's new method."""
    asked = []

    class Told(Kernels):
        def quantized_method(self, spec: LinearSpec, weight: QuantizedWeight) -> LinearMethod:
            asked.append(spec)
            return super().quantized_method(spec, weight)

    spec = LinearSpec(
        kind="embedding",
        prefix="embed",
        inputs=Shard.whole(K),
        outputs=(Shard.whole(N),),
        dtype=torch.float32,
    )
    embedding = nn.Module()
    head = nn.Module()
    reader = Nibbles(Told())
    reader.create(embedding, spec)
    tied = Nibbles(Told())
    tied.create(
        head,
        LinearSpec(
            kind="lm_head",
            prefix="lm_head",
            inputs=spec.inputs,
            outputs=spec.outputs,
            dtype=spec.dtype,
            tied_to=reader,
        ),
    )
    assert head.codes is embedding.codes
    codes = random_weight().codes
    embedding.codes.data.copy_(codes)
    reader.process(embedding)
    tied.process(head)
    assert asked[1].tied_to is embedding.method
    for layer in (embedding, head):
        assert not list(layer.parameters())
        assert torch.equal(layer.method.dequantized(), random_weight(codes=codes).dequantized())
