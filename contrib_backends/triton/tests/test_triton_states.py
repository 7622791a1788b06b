"""Linear attention, scans and convolutions of recurrent layers, against the formula in float64: on
a GPU, or by Triton's interpreter, with which `test_interpreter.py` runs these tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toolkit_lm.model import get_activation
from toolkit_lm_triton.device import interprets, refusal
from toolkit_lm_triton.layers import GATES, TritonKernels
from toolkit_lm_triton.states import MOST_KEYS, MOST_TAPS, chunk_of
from torch import Tensor

DEVICE = "cpu" if interprets() else "cuda"
pytestmark = pytest.mark.skipif(
    refusal(DEVICE, "float32") is not None, reason=str(refusal(DEVICE, "float32"))
)
GROUPS = 1
HEADS = 2
EPS = 1e-6
CHUNK = chunk_of(16)
DTYPES = [torch.float32, torch.float16] + ([] if interprets() else [torch.bfloat16])
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
RULES = [(None, False), (None, True), (EPS, False), (EPS, True)]
"""With `eps` it is the delta rule; decays are of heads or of keys."""


def rows_of(count: int, length: int, starts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a flat batch that begins with a token of another one, in blocks out of order."""
    tokens = torch.arange(1, count * length + 1).view(count, length)
    found = tokens, torch.arange(count, 0, -1), torch.tensor(starts)
    return tuple(x.to(DEVICE) for x in found)  # type: ignore[return-value]


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) - 0.5) * scale


def inputs(count: int, length: int, keys: int, values: int, per_key: bool) -> list[Tensor]:
    """q, k and v side by side, decays of which some are 0 and many nearly 1, and factors. Keys of
    neighbours are alike, as those of a text that repeats itself are."""
    mixed = random(count, length, 2 * GROUPS * keys + HEADS * values, seed=3)
    mixed[:, length // 4 : length // 2, GROUPS * keys : 2 * GROUPS * keys] = 0.3
    sizes = (HEADS, keys) if per_key else (HEADS,)
    decay = (random(count, length, *sizes, seed=4) + 0.5).pow(0.1)
    decay[:, length // 3] = 0
    decay[:, length // 2 :: 3] = 1
    return [mixed, decay, random(count, length, HEADS, seed=5) + 0.5]


def split(mixed: Tensor, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [GROUPS * keys, GROUPS * keys, mixed.shape[-1] - 2 * GROUPS * keys]
    q, k, v = mixed.split(sizes, dim=-1)
    return (*(x.unflatten(-1, (GROUPS, -1)) for x in (q, k)), v.unflatten(-1, (HEADS, -1)))


def attend(given: list[Tensor], keys: int, eps: float | None, ring: Tensor, rows: Any) -> Tensor:
    """Results [R, L, heads, values]. The ring is changed in place."""
    mixed, decay, factor = (x.to(DEVICE) for x in given)
    q, k, v = split(mixed, keys)
    # The token of another row is not to be touched.
    decay, factor = (
        torch.cat([torch.full_like(x[0, :1], torch.nan), x.flatten(0, 1)]) for x in (decay, factor)
    )
    out = torch.full((len(decay), *v.shape[2:]), 7.0, device=DEVICE)
    assert TritonKernels().linear_attention(q, k, v, decay, factor, eps, ring, rows, out)
    assert (out[0] == 7).all()
    return out[1:].view(v.shape)


def formula(
    given: list[Tensor], keys: int, eps: float | None, state: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The recurrence in float64, and the states after each token."""
    mixed, decay, factor, state = (x.cpu().double() for x in (*given, state))
    q, k, v = split(mixed, keys)
    q, k = (x.repeat_interleave(HEADS // GROUPS, 2) for x in (q, k))
    if eps is not None:
        q, k = (x / (x.square().sum(-1, keepdim=True) + eps).sqrt() for x in (q, k))
        q = q * keys**-0.5
    outs = []
    after = []
    for t in range(mixed.shape[1]):
        state = state * decay[:, t].reshape(len(state), HEADS, -1, 1)
        value = v[:, t]
        if eps is not None:
            value = value - torch.einsum("rhk,rhkv->rhv", k[:, t], state)
        value = value * factor[:, t, :, None]
        state = state + torch.einsum("rhk,rhv->rhkv", k[:, t], value)
        outs.append(torch.einsum("rhk,rhkv->rhv", q[:, t], state))
        after.append(state)
    return torch.stack(outs, 1), after


def first_states(ring: Tensor, blocks: Tensor, starts: list[int]) -> Tensor:
    at = torch.tensor(starts)
    found = ring[blocks.cpu(), (at - 1) % ring.shape[1]]
    return found * (at > 0).view(-1, *[1] * (found.ndim - 1))


def check_ring(ring: Tensor, rows: Any, starts: list[int], after: list[Tensor]) -> None:
    """The last states are there, and those of other blocks are as they were."""
    places = ring.shape[1]
    for t in range(max(0, len(after) - places), len(after)):
        for row, (block, start) in enumerate(zip(rows[1].tolist(), starts, strict=True)):
            found = ring[block, (start + t) % places].cpu().double()
            torch.testing.assert_close(found, after[t][row], **CLOSE)
    assert ring[0].isnan().all()


@pytest.mark.parametrize(("eps", "per_key"), RULES)
@pytest.mark.parametrize(
    ("length", "keys", "values", "places"),
    [
        (1, 16, 16, 1),
        (5, 24, 20, 4),
        (CHUNK, 16, 16, 1),
        (CHUNK + 1, 24, 20, 4),
        (2 * CHUNK + 3, 8, 33, 2),
    ],
)
def test_linear_attention_is_its_formula(eps, per_key, length, keys, values, places) -> None:
    starts = [0, 6]
    rows = rows_of(2, length, starts)
    ring = random(3, places, HEADS, keys, values, seed=2)
    ring[0] = torch.nan
    first = first_states(ring, rows[1], starts)
    ring = ring.to(DEVICE)
    given = inputs(2, length, keys, values, per_key)
    expected, after = formula(given, keys, eps, first)
    out = attend(given, keys, eps, ring, rows)
    torch.testing.assert_close(out.cpu().double(), expected, **CLOSE)
    check_ring(ring, rows, starts, after)


@pytest.mark.parametrize(("eps", "per_key"), RULES)
def test_cuts_change_little_and_neighbours_nothing(eps, per_key) -> None:
    """Chunks begin where a step does, so that cuts change bits."""
    length = CHUNK + 10
    given = inputs(2, length, 16, 16, per_key)
    ring = torch.zeros(3, 1, HEADS, 16, 16, device=DEVICE)
    whole = attend(given, 16, eps, ring, rows_of(2, length, [0, 0]))
    cut_ring = torch.zeros_like(ring)
    start = 0
    for size in (3, 1, CHUNK, 6):
        piece = [x[:, start : start + size] for x in given]
        out = attend(piece, 16, eps, cut_ring, rows_of(2, size, [start] * 2))
        torch.testing.assert_close(out, whole[:, start : start + size], **CLOSE)
        start += size
    torch.testing.assert_close(cut_ring, ring, **CLOSE)
    for row in range(2):
        alone = [x[row : row + 1] for x in given]
        found = attend(alone, 16, eps, torch.zeros_like(ring), rows_of(1, length, [0]))
        assert found.equal(whole[row : row + 1])


def test_bits_of_single_tokens_depend_on_no_cut() -> None:
    length = 9
    for eps, per_key in RULES:
        given = inputs(1, length, 16, 16, per_key)
        ring = torch.zeros(2, 1, HEADS, 16, 16, device=DEVICE)
        whole = attend(given, 16, eps, ring, rows_of(1, length, [0]))
        cut_ring = torch.zeros_like(ring)
        for start, end in ((0, 4), (4, 5), (5, 9)):
            piece = [x[:, start:end] for x in given]
            out = attend(piece, 16, eps, cut_ring, rows_of(1, end - start, [start]))
            assert out.equal(whole[:, start:end])
        assert cut_ring.equal(ring)


@pytest.mark.parametrize(
    ("length", "channels", "size", "places"),
    [(1, 64, 16, 1), (7, 40, 5, 4), (9, 70, 1, 2)],
)
def test_a_scan_is_its_formula(length, channels, size, places) -> None:
    starts = [0, 6]
    rows = rows_of(2, length, starts)
    ring = random(3, places, size, channels, seed=2)
    ring[0] = torch.nan
    state = first_states(ring, rows[1], starts).double()
    ring = ring.to(DEVICE)
    x, time = (random(2, length, channels, seed=seed) + 0.5 for seed in (3, 4))
    factors = random(2, length, 2 * size, seed=5)
    rates = -20 * (random(size, channels, seed=6) + 0.5)
    flat = [
        torch.cat([torch.full_like(one[0, :1], torch.nan), one.flatten(0, 1)]).to(DEVICE)
        for one in (x, time, factors)
    ]
    into, out_of = flat[2].chunk(2, dim=-1)
    out = torch.full_like(flat[0], 7.0)
    taken = TritonKernels().selective_scan(
        flat[0], flat[1], rates.to(DEVICE), into, out_of, ring, rows, out
    )
    assert taken and (out[0] == 7).all()
    found = out[1:].view(x.shape).cpu().double()
    x, time, factors, rates = (one.double() for one in (x, time, factors, rates))
    after = []
    for t in range(length):
        state = state * torch.exp(time[:, t, None] * rates)
        state = state + factors[:, t, :size, None] * x[:, t, None]
        expected = (state * factors[:, t, size:, None]).sum(1)
        torch.testing.assert_close(found[:, t], expected, **CLOSE)
        after.append(state)
    check_ring(ring, rows, starts, after)


class Convolution:
    """A convolution with random weights, and inputs of two rows of `length` tokens."""

    def __init__(self, length: int, channels: int, size: int, dtype: torch.dtype) -> None:
        # Inputs of layers are a part of a wider product, too.
        wide = random(2 * length + 1, channels + 3, seed=3).to(dtype)
        wide[0] = torch.nan
        self.x = wide[:, :channels]
        self.weight = random(channels, 1, size, seed=4).to(dtype)
        self.bias = random(channels, seed=5).to(dtype)
        self.states = 3, size - 1, channels

    def run(self, x: Tensor, ring: Tensor, rows: Any, activation: str | None) -> Tensor | None:
        bias = None if activation is None else self.bias.to(DEVICE)
        weight = self.weight.to(DEVICE)
        wide = torch.empty(len(x), x.stride(0), dtype=x.dtype, device=DEVICE)[:, : x.shape[1]]
        return TritonKernels().causal_conv(wide.copy_(x), weight, bias, activation, ring, rows)

    def formula(self, state: Tensor, activation: str | None) -> tuple[Tensor, list[Tensor]]:
        """Results [2, length, channels] in float64, and the states after each token."""
        size = self.weight.shape[2]
        x = self.x[1:].unflatten(0, (2, -1))
        wide = torch.cat([state, x.double()], 1)
        windows = wide.unfold(1, size, 1)
        out = (windows * self.weight[:, 0].double()).sum(-1)
        if activation is not None:
            out = get_activation(activation)(out + self.bias.double())
        return out, [wide[:, t + 1 : t + size] for t in range(x.shape[1])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("length", "channels", "size", "places", "activation"),
    [
        (1, 64, 4, 1, "silu"),
        (1, 40, 3, 4, None),
        (3, 140, 8, 2, "gelu"),
        (4, 40, 4, 4, "gelu_pytorch_tanh"),
        (35, 140, 4, 1, "relu"),
        (2 * MOST_TAPS, 20, MOST_TAPS, 4, "silu"),
    ],
)
def test_a_convolution_is_its_formula(dtype, length, channels, size, places, activation) -> None:
    starts = [0, 6]
    rows = rows_of(2, length, starts)
    conv = Convolution(length, channels, size, dtype)
    ring = random(3, places, size - 1, channels, seed=2)
    ring[0] = torch.nan
    first = first_states(ring, rows[1], starts)
    ring = ring.to(DEVICE)
    expected, after = conv.formula(first.double(), activation)
    out = conv.run(conv.x, ring, rows, activation)
    assert out is not None
    torch.testing.assert_close(out.cpu().double(), expected, **CLOSE)
    check_ring(ring, rows, starts, after)


def test_bits_of_convolutions_depend_on_no_cut_and_no_neighbour() -> None:
    length = 2 * MOST_TAPS
    conv = Convolution(length, 40, 4, torch.float32)
    x = conv.x[1:].unflatten(0, (2, -1))
    ring = torch.zeros(3, 2, 3, 40, device=DEVICE)
    whole = conv.run(conv.x, ring, rows_of(2, length, [0, 0]), "silu")
    assert whole is not None
    for row in range(2):
        cut_ring = torch.zeros_like(ring)
        for start, end in ((0, 1), (1, 3), (3, 24), (24, 32)):
            piece = torch.cat([conv.x[:1], x[row, start:end]])
            tokens, _, starts = rows_of(1, end - start, [start])
            block = torch.tensor([2 - row], device=DEVICE)
            out = conv.run(piece, cut_ring, (tokens, block, starts), "silu")
            assert out is not None and out.equal(whole[row : row + 1, start:end])
        assert cut_ring[2 - row].equal(ring[2 - row])


def test_every_activation_of_a_convolution_is_computed_or_left() -> None:
    conv = Convolution(1, 16, 2, torch.float32)
    rows = rows_of(2, 1, [0, 0])

    def found(activation: str | None) -> Tensor | None:
        return conv.run(conv.x, torch.zeros(conv.states, device=DEVICE)[:, None], rows, activation)

    for activation in (None, *GATES):
        out = found(activation)
        expected, _ = conv.formula(torch.zeros(2, 1, 16).double(), activation)
        assert out is not None
        torch.testing.assert_close(out.cpu().double(), expected, **CLOSE)
    assert found("tanh") is None


def test_what_kernels_do_not_take_is_left_to_the_caller() -> None:
    kernels = TritonKernels()
    rows = rows_of(1, 2, [0])

    def taken(keys: int, dtype: torch.dtype = torch.float32) -> bool:
        q, k, v = split(torch.zeros(1, 2, 2 * keys + HEADS * 16, dtype=dtype, device=DEVICE), keys)
        decay = torch.ones(3, HEADS, dtype=dtype, device=DEVICE)
        ring = torch.zeros(2, 1, HEADS, keys, 16, device=DEVICE)
        out = torch.zeros(3, HEADS, 16, device=DEVICE)
        return kernels.linear_attention(q, k, v, decay, decay, None, ring, rows, out)

    assert taken(16)
    assert not taken(MOST_KEYS + 1)
    assert not taken(16, torch.float64)
    for size, dtype in ((1, torch.float32), (MOST_TAPS + 1, torch.float32), (2, torch.float64)):
        conv = Convolution(1, 16, size, dtype)
        ring = torch.zeros(3, 1, size - 1, 16, device=DEVICE)
        assert conv.run(conv.x, ring, rows_of(2, 1, [0, 0]), None) is None
