"""DeltaRule: base of layers that compute the gated delta rule, with a decay by head (Yang et al.
2024) or by channel (Kimi Team 2025)."""

from __future__ import annotations

from torch import Tensor, split

from toolkit_lm_hybrid.mixer import CausalConv, RecurrentMixer
from toolkit_lm_hybrid.recurrence import attend, heads_of

_EPS = 1e-6
"""Epsilon of the norms of queries and keys."""


class DeltaRule(RecurrentMixer):
    """A subclass makes the attributes in its constructor. Counts are this rank's."""

    conv1d: CausalConv
    """Over queries, keys and values side by side."""
    sizes: list[int]
    """Channels of queries, keys and values."""
    num_groups: int
    """Heads of queries and keys."""
    num_heads: int
    """Heads of values and states."""

    def apply_rule(self, qkv: Tensor, decay: Tensor, beta: Tensor, out: Tensor) -> None:
        """Fills `out` [T, heads, dv], float32: of qkv [T, channels], decay [T, heads] or [T, heads,
        dk], and beta [T, heads]. Tokens that the step does not compute get zeros."""
        out.zero_()
        for rows, (windows, states) in self.steps():
            q, k, v = split(self.conv1d(qkv, windows, rows), self.sizes, dim=-1)
            attend(
                self.kernels,
                heads_of(q, self.num_groups),
                heads_of(k, self.num_groups),
                heads_of(v, self.num_heads),
                decay,
                beta,
                eps=_EPS,
                ring=states,
                rows=rows,
                out=out,
            )
