"""Measures recurrent states by the kernels `triton`: prefill in chunks against one token after the
other, and decode.

usage: python -m gpu_kit.states [--quick]

Each rule's chunks are checked against its single tokens, and convolutions against their formula.
All are timed for a prompt and for decodes.
--quick refuses: no kernel but Triton's computes them on a card.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gpu_kit.quantized import microseconds
from gpu_kit.report import MissedError, RefusedError, checking, die_with_the_kit

RULES: dict[str, dict[str, Any]] = {
    "gated delta net of Qwen3-Next": {"groups": 16, "heads": 32, "keys": 128, "values": 128},
    "Kimi Delta Attention": {
        "groups": 32,
        "heads": 32,
        "keys": 128,
        "values": 128,
        "per_key": True,
    },
    "Mamba-2 of Granite 4": {
        "groups": 1,
        "heads": 128,
        "keys": 128,
        "values": 64,
        "is_delta": False,
    },
}
PROMPT = 2048
DECODES = 1, 64
CHECKED = 200
"""Tokens that are computed both ways."""
FAULT = 1e-3
"""Most relative error of chunks against single tokens, in float32."""
CHANNELS = 8192
SIZE = 16
"""Lines of the state of a scan of Mamba."""
TAPS = 4
"""Inputs of a convolution."""


def rows_of(count: int, length: int, device: str, start: int = 0) -> tuple[Any, Any, Any]:
    import torch

    tokens = torch.arange(count * length, device=device).view(count, length)
    blocks = torch.arange(count, device=device)
    return tokens, blocks, torch.full((count,), start, device=device)


class Rule:
    """A rule with random inputs of `count` rows of `length` tokens."""

    def __init__(
        self,
        count: int,
        length: int,
        device: str,
        *,
        groups: int,
        heads: int,
        keys: int,
        values: int,
        is_delta: bool = True,
        per_key: bool = False,
    ) -> None:
        import torch
        from toolkit_lm_triton.layers import TritonKernels

        self.device = device
        self.kernels = TritonKernels()
        self.q, self.k = torch.randn(2, count, length, groups, keys, device=device)
        self.v = torch.randn(count, length, heads, values, device=device)
        sizes = (heads, keys) if per_key else (heads,)
        self.decay = torch.rand(count * length, *sizes, device=device).pow(0.1)
        self.factor = torch.rand(count * length, heads, device=device)
        self.eps = 1e-6 if is_delta else None
        self.ring = torch.zeros(count, 1, heads, keys, values, device=device)
        self.out = torch.empty(count * length, heads, values, device=device)

    def run(self, start: int = 0) -> None:
        """All tokens in one step."""
        rows = rows_of(*self.q.shape[:2], self.device, start)
        operands = (self.decay, self.factor, self.eps, self.ring, rows, self.out)
        if not self.kernels.linear_attention(self.q, self.k, self.v, *operands):
            raise MissedError("the kernels do not take it")

    def bound(self) -> Callable[[], Any]:
        """The same without what the host prepares for a step."""
        rows = rows_of(*self.q.shape[:2], self.device, 1)
        operands = (self.decay, self.factor, self.eps, self.ring, rows, self.out)
        return lambda: self.kernels.linear_attention(self.q, self.k, self.v, *operands)

    def error(self) -> float:
        """Relative error of one row's step against its tokens one by one."""
        self.run()
        whole = self.out.clone()
        state = self.ring.clone()
        for token in range(self.q.shape[1]):
            at = slice(token, token + 1)
            rows = rows_of(1, 1, self.device, token)
            operands = (self.decay[at], self.factor[at], self.eps, self.ring, rows, self.out[at])
            self.kernels.linear_attention(self.q[:, at], self.k[:, at], self.v[:, at], *operands)
        errors = [(whole - self.out).norm() / self.out.norm()]
        errors.append((state - self.ring).norm() / self.ring.norm())
        return float(max(errors))


def measure(name: str, device: str, found: dict[str, Any]) -> None:
    error = Rule(1, CHECKED, device, **RULES[name]).error()
    found["error"] = round(error, 7)
    if not error <= FAULT:
        raise MissedError(f"chunks are off by {error:.5f} of what single tokens give")
    found[f"prefill_{PROMPT}_us"] = microseconds(
        device, [Rule(1, PROMPT, device, **RULES[name]).bound()]
    )
    for count in DECODES:
        found[f"decode_{count}_us"] = microseconds(
            device, [Rule(count, 1, device, **RULES[name]).bound()]
        )


def measure_scan(device: str, found: dict[str, Any]) -> None:
    import torch
    from toolkit_lm_triton.layers import TritonKernels

    kernels = TritonKernels()
    rates = -torch.rand(SIZE, CHANNELS, device=device)
    for name, count, length in (("prefill", 1, PROMPT), *(("decode", n, 1) for n in DECODES)):
        tokens = count * length
        x, time = torch.rand(2, tokens, CHANNELS, device=device)
        into, out_of = torch.randn(2, tokens, SIZE, device=device)
        ring = torch.zeros(count, 1, SIZE, CHANNELS, device=device)
        rows = rows_of(count, length, device)
        operands = (x, time, rates, into, out_of, ring, rows, torch.empty_like(x))
        found[f"{name}_{tokens}_us"] = microseconds(
            device, [lambda operands=operands: kernels.selective_scan(*operands)]
        )


def measure_convolution(device: str, found: dict[str, Any]) -> None:
    """Times Qwen3-Next's convolution, in bfloat16."""
    import torch
    from toolkit_lm_triton.layers import TritonKernels

    kernels = TritonKernels()
    weight = torch.randn(CHANNELS, 1, TAPS, device=device).bfloat16()
    for name, count, length in (("prefill", 1, PROMPT), *(("decode", n, 1) for n in DECODES)):
        x = torch.randn(count * length, CHANNELS, device=device).bfloat16()
        ring = torch.zeros(count, 1, TAPS - 1, CHANNELS, device=device)
        operands = (x, weight, None, "silu", ring, rows_of(count, length, device))
        out = kernels.causal_conv(*operands)
        if out is None:
            raise MissedError("the kernels do not take it")
        wide = x.float().view(count, length, CHANNELS).mT
        wide = torch.nn.functional.pad(wide, (TAPS - 1, 0))
        taps = weight.float()[:, 0, :, None]
        sums = sum(wide[:, :, i : i + length] * taps[:, i] for i in range(TAPS))
        expected = torch.nn.functional.silu(sums).mT
        error = float((out - expected).norm() / expected.norm())
        if not (error <= FAULT and ring[:, 0].equal(wide[:, :, length:].mT)):
            raise MissedError(f"{name} is off by {error:.5f}, or leaves other inputs behind")
        found[f"{name}_{count * length}_us"] = microseconds(
            device, [lambda operands=operands: kernels.causal_conv(*operands)]
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    die_with_the_kit()
    works = {name: lambda found, name=name: measure(name, "cuda", found) for name in RULES}
    works["selective scan of Mamba"] = lambda found: measure_scan("cuda", found)
    works["convolution of Qwen3-Next"] = lambda found: measure_convolution("cuda", found)
    for name, work in works.items():
        with checking(f"states: {name}") as found:
            if args.quick:
                raise RefusedError("Triton's kernels of states run on a card")
            work(found)


if __name__ == "__main__":
    main()
