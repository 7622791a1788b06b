"""Recurrent states: linear attention token by token and in chunks, the selective scan, and causal
convolutions. States and sums are in fp32.

A ring [blocks, places, ...] has the states after token t of a sequence in place t % places of its
block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toolkit_lm_triton.kernels.layers import activate


@triton.jit
def recur(
    q,
    k,
    v,
    decay,
    factor,
    out,
    tokens,
    blocks,
    starts,
    ring,
    length,
    begin,
    places,
    page,
    q_row,
    q_token,
    k_row,
    k_token,
    v_row,
    v_token,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    KEYS_FILLED: tl.constexpr,
    VALUES: tl.constexpr,
    COLUMNS: tl.constexpr,
    DELTA: tl.constexpr,
    PER_KEY: tl.constexpr,
) -> None:
    """Linear attention of the tokens from `begin` on, one after the other. Programs (rows, HEADS,
    VALUES / COLUMNS).

    q, k [rows, length, GROUPS, KEYS], v [rows, length, HEADS, VALUES], decay [tokens, HEADS] or
    with PER_KEY [tokens, HEADS, KEYS], factor [tokens, HEADS], out [tokens, HEADS, VALUES].
    tokens [rows, length], blocks and starts [rows]: int64. A row's tokens are neighbours. `page`:
    floats from block to block of the ring, whose states are [HEADS, KEYS, VALUES].
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key = tl.arange(0, KEYS_FILLED)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key = key < KEYS
    is_column = column < VALUES
    is_cell = is_key[:, None] & is_column[None, :]
    cell = key[:, None] * VALUES + column[None, :]
    before = tl.load(starts + row) + begin
    own = ring + tl.load(blocks + row) * page + head * (KEYS * VALUES)
    state = tl.load(
        own + (before + places - 1) % places * (HEADS * KEYS * VALUES) + cell,
        mask=is_cell,
        other=0.0,
    )
    state = tl.where(before > 0, state, 0.0)
    group = head // (HEADS // GROUPS)
    at_q = q + row * q_row + begin * q_token + group * KEYS
    at_k = k + row * k_row + begin * k_token + group * KEYS
    at_v = v + row * v_row + begin * v_token + head * VALUES
    token = (tl.load(tokens + row * length) + begin) * HEADS + head
    for t in range(begin, length):
        of_q = tl.load(at_q + key, mask=is_key, other=0.0)
        of_k = tl.load(at_k + key, mask=is_key, other=0.0)
        value = tl.load(at_v + column, mask=is_column, other=0.0)
        if PER_KEY:
            state *= tl.load(decay + token * KEYS + key, mask=is_key, other=0.0)[:, None]
        else:
            state *= tl.load(decay + token)
        if DELTA:
            of_q *= scale / tl.sqrt(tl.sum(of_q * of_q, 0) + eps)
            of_k *= 1 / tl.sqrt(tl.sum(of_k * of_k, 0) + eps)
            value -= tl.sum(of_k[:, None] * state, 0)
        value *= tl.load(factor + token)
        state += of_k[:, None] * value[None, :]
        tl.store(out + token * VALUES + column, tl.sum(of_q[:, None] * state, 0), mask=is_column)
        if t >= length - places:
            place = (before - begin + t) % places
            tl.store(own + place * (HEADS * KEYS * VALUES) + cell, state, mask=is_cell)
        at_q += q_token
        at_k += k_token
        at_v += v_token
        token += HEADS


@triton.jit
def within_chunks(
    q,
    k,
    decay,
    factor,
    tokens,
    scores,
    solved,
    length,
    chunks,
    q_row,
    q_token,
    k_row,
    k_token,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    KEYS_FILLED: tl.constexpr,
    CHUNK: tl.constexpr,
    DELTA: tl.constexpr,
    PER_KEY: tl.constexpr,
) -> None:
    """Products of the tokens of each chunk with each other. Programs (rows, HEADS, chunks).

    scores [rows, HEADS, chunks, CHUNK, CHUNK]: q times k of the tokens up to its own, faded by what
    lies between. `solved`, with DELTA: the inverse of 1 + factor k k, faded likewise, of the tokens
    before, times factor (Yang et al. 2024, the UT transform). Decays are multiplied, not divided,
    so that any of them may be 0. The rest is as of `recur`.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.program_id(2) * CHUNK
    key = tl.arange(0, KEYS_FILLED)
    is_key = key < KEYS
    line = tl.arange(0, CHUNK)
    group = head // (HEADS // GROUPS)
    at_q = q + row * q_row + first * q_token + group * KEYS + line[:, None] * q_token
    at_k = k + row * k_row + first * k_token + group * KEYS
    of_q = tl.load(at_q + key[None, :], mask=is_key[None, :], other=0.0)
    of_k = tl.load(at_k + line[:, None] * k_token + key[None, :], mask=is_key[None, :], other=0.0)
    if DELTA:
        of_q *= scale / tl.sqrt(tl.sum(of_q * of_q, 1) + eps)[:, None]
        of_k *= 1 / tl.sqrt(tl.sum(of_k * of_k, 1) + eps)[:, None]
    token = (tl.load(tokens + row * length) + first) * HEADS + head
    is_before = line[:, None] > line[None, :]
    if PER_KEY:
        of_scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        mixed = tl.zeros((CHUNK, CHUNK), tl.float32)
        faded = tl.zeros((CHUNK, KEYS_FILLED), tl.float32)
        for n in range(CHUNK):
            other = CHUNK - 1 - n
            faded = tl.where(line[:, None] == other, 1.0, faded)
            seen = tl.load(at_k + other * k_token + key, mask=is_key, other=0.0)
            if DELTA:
                seen *= 1 / tl.sqrt(tl.sum(seen * seen, 0) + eps)
            weight = faded * seen[None, :]
            is_other = line[None, :] == other
            of_scores = tl.where(is_other, tl.sum(of_q * weight, 1)[:, None], of_scores)
            mixed = tl.where(is_other, tl.sum(of_k * weight, 1)[:, None], mixed)
            rate = tl.load(decay + (token + other * HEADS) * KEYS + key, mask=is_key, other=0.0)
            faded *= rate[None, :]
    else:
        rate = tl.load(decay + token + line * HEADS)
        faded = tl.cumprod(tl.where(is_before, rate[:, None], 1.0), 0)
        faded = tl.where(line[:, None] >= line[None, :], faded, 0.0)
        of_scores = tl.dot(of_q, tl.trans(of_k), input_precision="tf32x3") * faded
        mixed = faded
        if DELTA:
            mixed = tl.dot(of_k, tl.trans(of_k), input_precision="tf32x3") * faded
    cell = line[:, None] * CHUNK + line[None, :]
    part = ((row * HEADS + head) * chunks + tl.program_id(2)) * (CHUNK * CHUNK)
    tl.store(scores + part + cell, of_scores)
    if DELTA:
        beta = tl.load(factor + token + line * HEADS)
        mixed = tl.where(is_before, mixed * beta[:, None], 0.0)
        inverse = tl.where(line[:, None] == line[None, :], 1.0, 0.0)
        for n in range(1, CHUNK):
            is_line = line[:, None] == n
            before = tl.sum(tl.where(is_line, mixed, 0.0), 0)
            sums = tl.sum(before[:, None] * inverse, 0)
            inverse = tl.where(is_line, inverse - sums[None, :], inverse)
        tl.store(solved + part + cell, inverse * beta[None, :])


@triton.jit
def over_chunks(
    q,
    k,
    v,
    decay,
    factor,
    out,
    tokens,
    blocks,
    starts,
    ring,
    scores,
    solved,
    length,
    chunks,
    places,
    page,
    q_row,
    q_token,
    k_row,
    k_token,
    v_row,
    v_token,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    KEYS_FILLED: tl.constexpr,
    VALUES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    DELTA: tl.constexpr,
    PER_KEY: tl.constexpr,
) -> None:
    """Linear attention of the tokens of whole chunks, which ends with their state in the ring.
    Programs (rows, HEADS, VALUES / COLUMNS). The rest is as of `within_chunks`."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key = tl.arange(0, KEYS_FILLED)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, CHUNK)
    is_key = key < KEYS
    is_column = column < VALUES
    is_cell = is_key[:, None] & is_column[None, :]
    cell = key[:, None] * VALUES + column[None, :]
    start = tl.load(starts + row)
    own = ring + tl.load(blocks + row) * page + head * (KEYS * VALUES)
    state = tl.load(
        own + (start + places - 1) % places * (HEADS * KEYS * VALUES) + cell,
        mask=is_cell,
        other=0.0,
    )
    state = tl.where(start > 0, state, 0.0)
    group = head // (HEADS // GROUPS)
    at_q = q + row * q_row + group * KEYS + line[:, None] * q_token + key[None, :]
    at_k = k + row * k_row + group * KEYS + line[:, None] * k_token + key[None, :]
    at_v = v + row * v_row + head * VALUES + line[:, None] * v_token + column[None, :]
    token = (tl.load(tokens + row * length) + line) * HEADS + head
    pair = line[:, None] * CHUNK + line[None, :] + (row * HEADS + head) * chunks * CHUNK * CHUNK
    for _ in range(chunks):
        of_q = tl.load(at_q, mask=is_key[None, :], other=0.0)
        of_k = tl.load(at_k, mask=is_key[None, :], other=0.0)
        value = tl.load(at_v, mask=is_column[None, :], other=0.0)
        if DELTA:
            of_q *= scale / tl.sqrt(tl.sum(of_q * of_q, 1) + eps)[:, None]
            of_k *= 1 / tl.sqrt(tl.sum(of_k * of_k, 1) + eps)[:, None]
        # The decay from the chunk's start to each token, and from it to the chunk's end.
        is_last = line == CHUNK - 1
        if PER_KEY:
            at = decay + token[:, None] * KEYS + key[None, :]
            since = tl.cumprod(tl.load(at, mask=is_key[None, :], other=0.0), 0)
            later = is_key[None, :] & ~is_last[:, None]
            until = tl.cumprod(tl.load(at + HEADS * KEYS, mask=later, other=1.0), 0, reverse=True)
            total = tl.sum(tl.where(is_last[:, None], since, 0.0), 0)[:, None]
        else:
            since = tl.cumprod(tl.load(decay + token), 0)
            until = tl.load(decay + token + HEADS, mask=~is_last, other=1.0)
            until = tl.cumprod(until, 0, reverse=True)[:, None]
            total = tl.sum(tl.where(is_last, since, 0.0), 0)
            since = since[:, None]
        if DELTA:
            value -= tl.dot(of_k * since, state, input_precision="tf32x3")
            value = tl.dot(tl.load(solved + pair), value, input_precision="tf32x3")
        else:
            value *= tl.load(factor + token)[:, None]
        sums = tl.dot(of_q * since, state, input_precision="tf32x3")
        sums = tl.dot(tl.load(scores + pair), value, sums, input_precision="tf32x3")
        at = out + token[:, None] * VALUES + column[None, :]
        tl.store(at, sums, mask=is_column[None, :])
        state = tl.dot(tl.trans(of_k * until), value, total * state, input_precision="tf32x3")
        at_q += CHUNK * q_token
        at_k += CHUNK * k_token
        at_v += CHUNK * v_token
        token += CHUNK * HEADS
        pair += CHUNK * CHUNK
    place = (start + chunks * CHUNK - 1) % places
    tl.store(own + place * (HEADS * KEYS * VALUES) + cell, state, mask=is_cell)


@triton.jit
def scan(
    x,
    time,
    rates,
    into,
    out_of,
    out,
    tokens,
    blocks,
    starts,
    ring,
    length,
    places,
    page,
    channels,
    into_token,
    out_of_token,
    SIZE: tl.constexpr,
    SIZE_FILLED: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Selective scan, one token after the other. Programs (rows, channels / CHANNELS).

    x, time and out [tokens, channels], rates [SIZE, channels], into and out_of [tokens, SIZE]; the
    ring's states are [SIZE, channels]. The rest is as of `recur`.
    """
    row = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, SIZE_FILLED)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_line = line < SIZE
    is_channel = channel < channels
    is_cell = is_line[:, None] & is_channel[None, :]
    cell = line[:, None] * channels + channel[None, :]
    rate = tl.load(rates + cell, mask=is_cell, other=0.0)
    start = tl.load(starts + row)
    own = ring + tl.load(blocks + row) * page
    state = tl.load(
        own + (start + places - 1) % places * SIZE * channels + cell,
        mask=is_cell,
        other=0.0,
    )
    state = tl.where(start > 0, state, 0.0)
    first = tl.load(tokens + row * length)
    at = first * channels
    at_into = into + first * into_token
    at_out_of = out_of + first * out_of_token
    for t in range(length):
        step = tl.load(time + at + channel, mask=is_channel, other=0.0)
        value = tl.load(x + at + channel, mask=is_channel, other=0.0)
        write = tl.load(at_into + line, mask=is_line, other=0.0)
        read = tl.load(at_out_of + line, mask=is_line, other=0.0)
        state = tl.exp(step[None, :] * rate) * state + write[:, None] * value[None, :]
        tl.store(out + at + channel, tl.sum(read[:, None] * state, 0), mask=is_channel)
        if t >= length - places:
            place = (start + t) % places
            tl.store(own + place * SIZE * channels + cell, state, mask=is_cell)
        at += channels
        at_into += into_token
        at_out_of += out_of_token


@triton.jit
def convolve(
    x,
    weight,
    bias,
    out,
    tokens,
    blocks,
    starts,
    ring,
    length,
    places,
    page,
    x_token,
    channels,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """Causal depthwise convolution, then the activation, or none for "". Programs (rows, length /
    TOKENS, channels / CHANNELS).

    x [tokens, channels], weight [channels, SIZE], bias [channels] or None, out [rows, length,
    channels]; the ring's states are the last inputs, [SIZE - 1, channels]. `x_token`: elements from
    token to token of x. TOKENS: at least SIZE - 1, or all. The rest is as of `recur`.
    """
    row = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    start = tl.load(starts + row)
    own = ring + tl.load(blocks + row) * page
    before = own + (start + places - 1) % places * ((SIZE - 1) * channels)
    at = x + tl.load(tokens + row * length) * x_token
    sums = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for i in tl.static_range(SIZE):
        # Counted from the step's first token: those below 0 are of earlier steps.
        source = token + (i - SIZE + 1)
        is_new = ((source >= 0) & (source < length))[:, None] & is_channel[None, :]
        is_old = (source < 0)[:, None] & is_channel[None, :]
        cell = (source + SIZE - 1)[:, None] * channels + channel[None, :]
        value = tl.load(before + cell, mask=is_old, other=0.0)
        value = tl.where(start > 0, value, 0.0)
        cell = source[:, None] * x_token + channel[None, :]
        value += tl.load(at + cell, mask=is_new, other=0.0).to(tl.float32)
        tap = tl.load(weight + channel * SIZE + i, mask=is_channel, other=0.0).to(tl.float32)
        sums += value * tap[None, :]
    if bias is not None:
        sums += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        sums = activate(sums, ACTIVATION)
    cell = (row * length + token)[:, None] * channels + channel[None, :]
    tl.store(out + cell, sums, mask=(token < length)[:, None] & is_channel[None, :])
    if tl.program_id(1) == 0:
        # No other program reads these places. The one that is read comes last, and its lines move
        # towards the first: what a line holds is read before it is written.
        for k in range(tl.minimum(places, length)):
            last = length - 1 - (length - 1 - k) % places
            to = own + (start + k) % places * ((SIZE - 1) * channels)
            for i in tl.static_range(SIZE - 1):
                index = last + (i - SIZE + 2)
                if index >= 0:
                    line = at + index * x_token + channel
                    kept = tl.load(line, mask=is_channel, other=0.0).to(tl.float32)
                else:
                    earlier = before + (index + SIZE - 1) * channels + channel
                    kept = tl.load(earlier, mask=is_channel, other=0.0)
                    kept = tl.where(start > 0, kept, 0.0)
                # Another thread may write what this one has read.
                tl.debug_barrier()
                tl.store(to + i * channels + channel, kept, mask=is_channel)
