"""States: steps of recurrent layers by the kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from toolkit_lm.model import StateRows
from torch import Tensor

from toolkit_lm_triton.device import LAUNCH
from toolkit_lm_triton.pieces import power_of_2

MOST_KEYS = 256
"""Most keys of a head's state, and lines of a scan's: a program holds all of them."""
_CELLS = 1024
"""Numbers of a state that a warp holds, while it goes from token to token."""
MOST_TAPS = 16
"""Most inputs of a convolution's kernel."""
_CHANNELS = 128
"""Channels of a convolution that a program computes."""
_FEWEST = 16
"""Smallest side of a matrix that tensor cores multiply."""


class States:
    """Linear attention, selective scans and causal convolutions of a model.

    Linear attention computes whole chunks of a prompt by products of matrices, and the tokens after
    them, or of short steps, one by one. Scans go token by token.
    """

    def __init__(self, device: str) -> None:
        from toolkit_lm_triton.kernels import recurrence

        self._kernels: ModuleType = recurrence
        self._device = device

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        factor: Tensor,
        eps: float | None,
        ring: Tensor,
        rows: StateRows,
        out: Tensor,
    ) -> bool:
        """The arguments and results of Kernels.linear_attention."""
        heads, values = v.shape[2:]
        groups, keys = k.shape[2:]
        fits = (
            keys <= MOST_KEYS
            and all(self._is_own(x) for x in (q, k, v, decay, factor, out))
            and all(has_whole_heads(x) for x in (q, k, v))
            and all(x.is_contiguous() for x in (decay, factor, out))
            and self._is_ring(ring)
        )
        if not fits:
            return False
        shape: dict[str, Any] = {
            "HEADS": heads,
            "GROUPS": groups,
            "KEYS": keys,
            "KEYS_FILLED": max(_FEWEST, power_of_2(keys)),
            "DELTA": eps is not None,
            "PER_KEY": decay.dim() == 3,
            **LAUNCH,
        }
        norms = (1.0, 0.0) if eps is None else (keys**-0.5, eps)
        operands = q, k, v, decay, factor, out, *(tensor.contiguous() for tensor in rows), ring
        done = self._attend_in_chunks(operands, norms, shape)
        length = rows[0].shape[1]
        places = ring.shape[1]
        if done < length:
            columns = min(power_of_2(values), _CELLS // shape["KEYS_FILLED"])
            self._kernels.recur[len(rows[0]), heads, -(-values // columns)](
                *(*operands, length, done, places, ring.stride(0)),
                *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *norms),
                VALUES=values,
                COLUMNS=columns,
                num_warps=1,
                **shape,
            )
        return True

    def _attend_in_chunks(
        self, operands: tuple[Tensor, ...], norms: tuple[float, float], shape: dict[str, Any]
    ) -> int:
        """Computes the first tokens of rows, as many as whole chunks have. Returns how many.
        `operands`: the tensors that `recur` takes."""
        q, k, v, decay, factor, _, tokens, _, _, ring = operands
        count, length = tokens.shape
        heads, values = v.shape[2:]
        places = ring.shape[1]
        chunk = chunk_of(shape["KEYS_FILLED"])
        # Chunks leave one state behind, that of their last token.
        chunks = max(0, length - places + 1) // chunk
        if not chunks:
            return 0
        steps = [*q.stride()[:2], *k.stride()[:2]]
        scores = torch.empty(count, heads, chunks, chunk, chunk, device=v.device)
        solved = torch.empty_like(scores) if shape["DELTA"] else scores
        self._kernels.within_chunks[count, heads, chunks](
            *(q, k, decay, factor, tokens, scores, solved, length, chunks, *steps, *norms),
            CHUNK=chunk,
            **shape,
        )
        columns = columns_of(shape["KEYS_FILLED"])
        self._kernels.over_chunks[count, heads, -(-values // columns)](
            *(*operands, scores, solved, length, chunks, places, ring.stride(0)),
            *(*steps, *v.stride()[:2], *norms),
            VALUES=values,
            COLUMNS=columns,
            CHUNK=chunk,
            num_stages=1,
            **shape,
        )
        return chunks * chunk

    def selective_scan(
        self,
        x: Tensor,
        time: Tensor,
        rates: Tensor,
        into: Tensor,
        out_of: Tensor,
        ring: Tensor,
        rows: StateRows,
        out: Tensor,
    ) -> bool:
        """The arguments and results of Kernels.selective_scan."""
        size, channels = rates.shape
        fits = (
            size <= MOST_KEYS
            and all(self._is_own(t) for t in (x, time, rates, into, out_of, out))
            and all(t.is_contiguous() for t in (x, time, rates, out))
            and into.stride(1) == out_of.stride(1) == 1
            and self._is_ring(ring)
        )
        if not fits:
            return False
        count, length = rows[0].shape
        filled = power_of_2(size)
        block = min(power_of_2(channels), max(32, _CELLS // filled))
        self._kernels.scan[count, -(-channels // block)](
            *(x, time, rates, into, out_of, out, *(tensor.contiguous() for tensor in rows), ring),
            *(length, ring.shape[1], ring.stride(0), channels, into.stride(0), out_of.stride(0)),
            SIZE=size,
            SIZE_FILLED=filled,
            CHANNELS=block,
            num_warps=1,
            **LAUNCH,
        )
        return True

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        ring: Tensor,
        rows: StateRows,
    ) -> Tensor | None:
        """The arguments and results of Kernels.causal_conv. `activation`: one that the kernel
        knows, or "" for none."""
        channels, _, size = weight.shape
        fits = (
            1 < size <= MOST_TAPS
            and x.stride(1) == 1
            and weight.is_contiguous()
            and self._is_ring(ring)
        )
        if not fits:
            return None
        count, length = rows[0].shape
        out = torch.empty(count, length, channels, device=x.device)
        block = min(power_of_2(length), MOST_TAPS)
        self._kernels.convolve[count, -(-length // block), -(-channels // _CHANNELS)](
            *(x, weight, bias, out, *(tensor.contiguous() for tensor in rows), ring),
            *(length, ring.shape[1], ring.stride(0), x.stride(0), channels),
            SIZE=size,
            TOKENS=block,
            CHANNELS=_CHANNELS,
            ACTIVATION=activation,
            **LAUNCH,
        )
        return out

    def _is_own(self, x: Tensor) -> bool:
        return x.dtype is torch.float32 and x.device.type == self._device

    def _is_ring(self, ring: Tensor) -> bool:
        """Whether each block of the ring is one piece of memory."""
        return self._is_own(ring) and ring[0].is_contiguous()


def has_whole_heads(x: Tensor) -> bool:
    """Whether heads of x [R, L, heads, size] lie side by side."""
    return x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3])


def chunk_of(keys: int) -> int:
    """Tokens of a chunk. With more, a program of an A100 has no memory for wide heads."""
    return 64 if keys <= 128 else 32


def columns_of(keys: int) -> int:
    """Columns of a head's state that a program takes from chunk to chunk."""
    return 32 if keys <= 128 else _FEWEST
