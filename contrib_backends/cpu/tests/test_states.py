"""Convolutions, linear attention and scans of recurrent layers: equal to the formula in float64,
and the same bits however steps cut sequences, and whatever else is in a step."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm_cpu import states
from toolkit_lm_cpu.library import KERNELS
from toolkit_lm_cpu.states import (
    Convolutions,
    latent_attention,
    linear_attention,
    selective_scan,
)

GROUPS = 2
HEADS = 4
EPS = 1e-6


@pytest.fixture(params=["avx2", "avx512"], autouse=True)
def isa(request, monkeypatch):
    numbers = {**KERNELS["avx2"], **KERNELS[request.param]}
    monkeypatch.setattr(states, "usable_types", lambda: numbers)


def rows_of(count, length, start=0):
    tokens = torch.arange(count * length).view(count, length)
    return tokens, torch.arange(count) + 1, torch.full((count,), start)


def random(*shape):
    return torch.rand(*shape) - 0.5


def inputs(count, length, keys, values, *, per_key=False):
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(3)
    mixed = random(count, length, 2 * GROUPS * keys + HEADS * values)
    decay, factor = torch.rand(2, count, length, HEADS)
    if per_key:
        decay = torch.rand(count, length, HEADS, keys)
    torch.random.set_rng_state(generator_state)
    return mixed, decay, factor


def attend(mixed, decay, factor, keys, eps, ring, rows):
    sizes = [GROUPS * keys, GROUPS * keys, mixed.shape[-1] - 2 * GROUPS * keys]
    q, k, v = mixed.split(sizes, dim=-1)
    q, k = (x.unflatten(-1, (GROUPS, -1)) for x in (q, k))
    v = v.unflatten(-1, (HEADS, -1))
    decay, factor = (x.flatten(0, 1).contiguous() for x in (decay, factor))
    out = torch.zeros(len(decay), *v.shape[2:])
    assert linear_attention(q, k, v, decay, factor, eps, ring, rows, out)
    return out.view(v.shape)


def formula(mixed, decay, factor, keys, eps, state):
    """The recurrence in float64, and the states after each token."""
    mixed, decay, factor, state = (x.double() for x in (mixed, decay, factor, state))
    sizes = [GROUPS * keys, GROUPS * keys, mixed.shape[-1] - 2 * GROUPS * keys]
    q, k, v = mixed.split(sizes, dim=-1)
    q, k = (x.unflatten(-1, (GROUPS, -1)).repeat_interleave(2, 2) for x in (q, k))
    v = v.unflatten(-1, (HEADS, -1))
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


@pytest.mark.parametrize(("eps", "per_key"), [(None, False), (EPS, False), (EPS, True)])
@pytest.mark.parametrize("places", [1, 4])
@pytest.mark.parametrize(
    ("length", "keys", "values"), [(1, 128, 64), (3, 16, 16), (9, 48, 80), (5, 32, 144)]
)
@pytest.mark.parametrize("start", [0, 6])
def test_linear_attention_is_its_formula(eps, per_key, places, length, keys, values, start):
    ring = random(4, places, HEADS, keys, values)
    first = ring[1:, (start - 1) % places] * (start > 0)
    given = inputs(3, length, keys, values, per_key=per_key)
    expected, after = formula(*given, keys, eps, first)
    out = attend(*given, keys, eps, ring, rows_of(3, length, start))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for t in range(max(0, length - places), length):
        found = ring[1:, (start + t) % places].double()
        torch.testing.assert_close(found, after[t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("eps", "per_key"), [(None, False), (None, True), (EPS, False), (EPS, True)]
)
def test_bits_depend_on_no_cut_and_no_neighbour(eps, per_key):
    length = 11
    given = inputs(3, length, 32, 80, per_key=per_key)
    ring = torch.zeros(4, 1, HEADS, 32, 80)
    whole = attend(*given, 32, eps, ring, rows_of(3, length))
    cut_ring = torch.zeros_like(ring)
    start = 0
    for size in (1, 4, 1, 5):
        piece = [x[:, start : start + size].contiguous() for x in given]
        out = attend(*piece, 32, eps, cut_ring, rows_of(3, size, start))
        assert out.equal(whole[:, start : start + size])
        start += size
    assert cut_ring.equal(ring)
    for row in range(3):
        alone = attend(
            *(x[row : row + 1] for x in given), 32, eps, torch.zeros_like(ring), rows_of(1, length)
        )
        assert alone.equal(whole[row : row + 1])


def scan(given, ring, rows):
    """A scan of x, time [R, L, C], rates [N, C] and of both factors in one tensor [R, L, 2 N]."""
    x, time, rates, factors = given
    x, time, factors = (one.flatten(0, 1).contiguous() for one in (x, time, factors))
    out = torch.zeros_like(x)
    assert selective_scan(x, time, rates, *factors.chunk(2, dim=-1), ring, rows, out)
    return out.view(given[0].shape)


def scan_inputs(count, length, channels, size):
    torch.manual_seed(3)
    time = torch.rand(count, length, channels)
    rates = -20 * torch.rand(size, channels)
    return random(count, length, channels), time, rates, random(count, length, 2 * size)


@pytest.mark.parametrize(
    ("length", "channels", "size", "places", "start"),
    [(1, 64, 16, 1, 0), (1, 80, 5, 4, 6), (7, 144, 16, 4, 0), (9, 16, 1, 1, 6)],
)
def test_a_scan_is_its_formula(length, channels, size, places, start):
    given = scan_inputs(3, length, channels, size)
    ring = random(4, places, size, channels)
    state = (ring[1:, (start - 1) % places] * (start > 0)).double()
    out = scan(given, ring, rows_of(3, length, start))
    x, time, rates, factors = (one.double() for one in given)
    into, out_of = factors.chunk(2, dim=-1)
    for t in range(length):
        state = state * torch.exp(time[:, t, None] * rates)
        state += into[:, t, :, None] * x[:, t, None]
        expected = (state * out_of[:, t, :, None]).sum(1)
        torch.testing.assert_close(out[:, t].double(), expected, rtol=1e-5, atol=1e-5)
        if t >= length - places:
            found = ring[1:, (start + t) % places].double()
            torch.testing.assert_close(found, state, rtol=1e-5, atol=1e-5)


def test_bits_of_a_scan_depend_on_no_cut_and_no_neighbour():
    length = 11
    x, time, rates, factors = scan_inputs(3, length, 80, 16)
    ring = torch.zeros(4, 1, 16, 80)
    whole = scan((x, time, rates, factors), ring, rows_of(3, length))
    cut_ring = torch.zeros_like(ring)
    start = 0
    for size in (1, 4, 1, 5):
        at = slice(start, start + size)
        piece = (x[:, at], time[:, at], rates, factors[:, at])
        assert scan(piece, cut_ring, rows_of(3, size, start)).equal(whole[:, at])
        start += size
    assert cut_ring.equal(ring)
    for row in range(3):
        own = (x[row : row + 1], time[row : row + 1], rates, factors[row : row + 1])
        alone = scan(own, torch.zeros_like(ring), rows_of(1, length))
        assert alone.equal(whole[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_convolution_is_its_formula_however_it_is_cut(dtype, activation):
    channels = 272
    size = 4
    length = 9
    x = random(2, length, channels).to(dtype)
    weight = random(channels, 1, size).to(dtype)
    bias = random(channels).to(dtype)
    padded = torch.nn.functional.pad(x.double(), (0, 0, size - 1, 0))
    windows = padded.unfold(1, size, 1)
    expected = (windows * weight[:, 0].double()).sum(-1) + bias.double()
    if activation is not None:
        expected = torch.nn.functional.silu(expected)
    ring = torch.full((3, 2, size - 1, channels), torch.nan)
    convolve = Convolutions()
    whole = convolve(x.flatten(0, 1), weight, bias, activation, ring, rows_of(2, length))
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-5)
    assert ring[1:, (length - 1) % 2].equal(x[:, length - size + 1 :].float())
    start = 0
    cut_ring = torch.full_like(ring, torch.nan)
    for part in (1, 2, 1, 5):
        piece = x[:, start : start + part].flatten(0, 1)
        out = convolve(piece, weight, bias, activation, cut_ring, rows_of(2, part, start))
        assert out.equal(whole[:, start : start + part])
        start += part
    assert cut_ring[1:].equal(ring[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "rank", "size"), [(8, 64, 80), (11, 48, 64), (3, 512, 576)])
def test_latent_attention_is_its_formula_whatever_else_is_in_a_step(dtype, heads, rank, size):
    torch.manual_seed(7)
    latents = random(100, size).to(dtype)
    places = torch.stack([torch.randperm(100)[:37] for _ in range(4)])
    lengths = torch.tensor([37, 1, 16, 30])
    q = 4 * random(4, heads, size)
    out = torch.full((4, heads, rank), torch.nan)
    assert latent_attention(q, latents, places, lengths, 0.3, out)
    for row, length in enumerate(lengths.tolist()):
        seen = latents[places[row, :length]].double()
        weights = (q[row].double() @ seen.T * 0.3).softmax(-1)
        expected = weights @ seen[:, :rank]
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-5, atol=1e-5)
        alone = torch.empty(1, heads, rank)
        own = places[row : row + 1, :length].contiguous()
        assert latent_attention(q[row : row + 1], latents, own, lengths[row : row + 1], 0.3, alone)
        assert alone.equal(out[row : row + 1])


def test_what_kernels_do_not_take_is_left_to_the_caller():
    given = inputs(1, 2, 8, 16)
    ring = torch.zeros(2, 1, HEADS, 8, 16)
    with pytest.raises(AssertionError):
        attend(*given, 8, None, ring, rows_of(1, 2))
    weight = random(24, 1, 4)
    ring = torch.zeros(2, 1, 3, 24)
    assert Convolutions()(random(2, 24), weight, None, None, ring, rows_of(1, 2)) is None
