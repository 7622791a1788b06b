"""Steps of recurrent layers and of latent attention by the kernels."""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
from toolkit_lm.model import StateRows
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from toolkit_lm_cpu.library import _kernels, exported, usable_types
from toolkit_lm_cpu.panels import ACTIVATIONS, LANES

MOST_TAPS = exported("MOST_TAPS")


class Convolutions:
    """Causal depthwise convolutions of a model. Weights are laid out anew at their first use."""

    def __init__(self) -> None:
        self._turned: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        ring: Tensor,
        rows: StateRows,
    ) -> Tensor | None:
        """The arguments and results of Kernels.causal_conv."""
        channels, _, size = weight.shape
        fits = (
            x.dtype in usable_types()
            and x.device.type == "cpu"
            and x.stride(1) == 1
            and channels % LANES == 0
            and 1 < size <= MOST_TAPS
            and activation in ACTIVATIONS
            and _is_ring(ring)
        )
        if not fits:
            return None
        out = torch.empty((*rows[0].shape, channels))
        shift = None if bias is None else self._turn(bias)
        _kernels.convolve(
            usable_types()[x.dtype],
            tokens=rows[0].data_ptr(),
            blocks=rows[1].data_ptr(),
            starts=rows[2].data_ptr(),
            rows=rows[0].shape[0],
            length=rows[0].shape[1],
            ring=ring.data_ptr(),
            places=ring.shape[1],
            page=ring.stride(0),
            x=x.data_ptr(),
            weight=self._turn(weight).data_ptr(),
            bias=0 if shift is None else shift.data_ptr(),
            out=out.data_ptr(),
            x_stride=x.stride(0),
            channels=channels,
            size=size,
            width=x.itemsize,
            is_bfloat16=x.dtype is torch.bfloat16,
            activation=ACTIVATIONS[activation],
        )
        return out

    def _turn(self, weight: Tensor) -> Tensor:
        """A weight [channels, 1, size] or [channels] in float32, channels last."""
        found = self._turned.get(weight)
        if found is None:
            turned = weight.detach().float().reshape(len(weight), -1).mT
            found = self._turned[weight] = turned.clone(memory_format=torch.contiguous_format)
        return found


def linear_attention(
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
    heads, size = v.shape[2:]
    groups, keys = k.shape[2:]
    strides = {_stride(x) for x in (q, k, v)}
    fits = (
        bool(usable_types())
        and v.device.type == "cpu"
        and keys % LANES == size % LANES == 0
        and len(strides) == 1
        and all(x.dtype is torch.float32 for x in (q, k, v, decay, factor, out))
        and all(x.is_contiguous() for x in (decay, factor, out))
        and _is_ring(ring)
    )
    stride = strides.pop()
    if not fits or stride is None:
        return False
    _kernels.recur(
        usable_types()[torch.float32],
        tokens=rows[0].data_ptr(),
        blocks=rows[1].data_ptr(),
        starts=rows[2].data_ptr(),
        rows=rows[0].shape[0],
        length=rows[0].shape[1],
        ring=ring.data_ptr(),
        places=ring.shape[1],
        page=ring.stride(0),
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        decays=decay.data_ptr(),
        factors=factor.data_ptr(),
        out=out.data_ptr(),
        stride=stride,
        heads=heads,
        groups=groups,
        keys=keys,
        values=size,
        scale=1.0 if eps is None else keys**-0.5,
        eps=-1.0 if eps is None else eps,
        is_delta=eps is not None,
        per_key=decay.dim() == 3,
    )
    return True


def selective_scan(
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
        bool(usable_types())
        and x.device.type == "cpu"
        and channels % LANES == 0
        and all(t.dtype is torch.float32 for t in (x, time, rates, into, out_of, out))
        and all(t.is_contiguous() for t in (x, time, rates, out))
        and into.stride(1) == out_of.stride(1) == 1
        and _is_ring(ring)
    )
    if not fits:
        return False
    _kernels.scan(
        usable_types()[torch.float32],
        tokens=rows[0].data_ptr(),
        blocks=rows[1].data_ptr(),
        starts=rows[2].data_ptr(),
        rows=rows[0].shape[0],
        length=rows[0].shape[1],
        ring=ring.data_ptr(),
        places=ring.shape[1],
        page=ring.stride(0),
        x=x.data_ptr(),
        time=time.data_ptr(),
        rates=rates.data_ptr(),
        into=into.data_ptr(),
        out_of=out_of.data_ptr(),
        out=out.data_ptr(),
        into_stride=into.stride(0),
        out_of_stride=out_of.stride(0),
        channels=channels,
        size=size,
    )
    return True


def latent_attention(
    q: Tensor, latents: Tensor, places: Tensor, lengths: Tensor, scale: float, out: Tensor
) -> bool:
    """The arguments and results of Kernels.latent_attention."""
    rows, heads, rank = out.shape
    size = latents.shape[1]
    fits = (
        latents.dtype in usable_types()
        and latents.device.type == "cpu"
        and size % LANES == rank % LANES == 0
        and q.dtype is out.dtype is torch.float32
        and all(x.is_contiguous() for x in (q, latents, places, lengths, out))
    )
    if not fits:
        return False
    _kernels.latent(
        usable_types()[torch.float32],
        latents=latents.data_ptr(),
        places=places.data_ptr(),
        lengths=lengths.data_ptr(),
        q=q.data_ptr(),
        out=out.data_ptr(),
        stride=places.shape[1],
        rows=rows,
        heads=heads,
        size=size,
        rank=rank,
        width=latents.itemsize,
        is_bfloat16=latents.dtype is torch.bfloat16,
        scale=scale,
    )
    return True


def _stride(x: Tensor) -> int | None:
    """Elements from token to token of x [R, L, heads, size]. None: these are not the same, or heads
    do not lie side by side."""
    count, length, heads, size = x.shape
    row, token, head, element = x.stride()
    if element != 1 or (heads > 1 and head != size):
        return None
    if length == 1:
        return row if count > 1 else 0
    return token if count == 1 or row == length * token else None


def _is_ring(ring: Tensor) -> bool:
    """Whether each block of the ring is one piece of memory."""
    return ring.dtype is torch.float32 and ring[0].is_contiguous()
