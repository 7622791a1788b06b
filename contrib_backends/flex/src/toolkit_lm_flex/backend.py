"""FlexBackend: paged attention by torch's FlexAttention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from toolkit_lm.attention import (
    AttentionBias,
    AttentionCall,
    AttentionSpec,
    GroupSetup,
    LayerParams,
    OffsetBias,
    common_refusal,
)
from toolkit_lm_paged_attention import PagedBackend, PagedStep, halves
from torch import Tensor

from toolkit_lm_flex.kernel import ScoreMod, formula, fused
from toolkit_lm_flex.plan import Group, LayerKey, make_plan

_DEVICES = ("cpu", "cuda")
_DTYPES = ("float32", "bfloat16", "float16")
_WRITTEN_SCORES = 2**22
"""Most scores of a group where they, or their biases, are written to memory."""
_FUSED_SCORES = 2**28
"""Most scores of a group in a kernel that writes none."""


class FlexBackend(PagedBackend):
    """Exact attention of all types.

    Masks, soft caps and biases are functions, which FlexAttention applies to scores; sinks join by
    the logarithm of the denominator. Rows are gathered out of the cache and are a batch with
    padding, so that no row meets the keys of another. In an encoder, a window hides keys at a
    distance of `window` or more on both sides.
    """

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if spec.device not in _DEVICES:
            return f"no kernel for device {spec.device}, only for {', '.join(_DEVICES)}"
        if (reason := common_refusal(spec, _DTYPES)) is not None:
            return reason
        if spec.spans:
            return "tokens see only what came before them, and spans are seen from both sides"
        return None

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        # Compiled for a CPU it takes seconds and a compiler, decodes no faster, and does not give
        # the denominators that sinks need.
        self.fuses = setup.device.type == "cuda" and importlib.util.find_spec("triton") is not None

    def forward(self, call: AttentionCall) -> None:
        layer = call.layer
        step: PagedStep = call.metadata
        if call.kv_cache is None:
            assert call.k is not None and call.v is not None
            keys = call.k
            values = call.v
        else:
            keys, values = halves(call.kv_cache)
        most_scores = _WRITTEN_SCORES if self.writes_scores(layer.bias) else _FUSED_SCORES
        plan = step.plan(LayerKey.of(layer, call.kv_cache, most_scores), make_plan)
        for tokens in plan.keyless:
            call.out[tokens].zero_()
        for group in plan.groups:
            self._attend(call, keys, values, group)

    def writes_scores(self, bias: AttentionBias | None) -> bool:
        """Whether a layer with that bias needs memory for each score."""
        return not self.fuses or not (bias is None or isinstance(bias, OffsetBias))

    def _attend(self, call: AttentionCall, keys: Tensor, values: Tensor, group: Group) -> None:
        layer = call.layer
        out = call.out
        padded = (
            _gather(call.q, group.tokens),
            _gather(keys, group.keys),
            _gather(values, group.keys),
        )
        change = _score_mod(layer, group)
        if self.fuses:
            found, logsumexp = fused(
                *padded, group.blocks(), change, layer.scale, logsumexp=layer.sinks is not None
            )
        else:
            found, logsumexp = formula(*padded, group.mask, change, layer.scale)
        if layer.sinks is not None:
            assert logsumexp is not None
            # Softmax with a sink is softmax without, times the share that the sink leaves.
            share = torch.sigmoid(logsumexp - layer.sinks.float()[:, None])
            found = (found * share[..., None]).to(out.dtype)
        found = found.transpose(1, 2).flatten(0, 1)
        out.index_copy_(0, group.tokens.flatten()[group.real], found.index_select(0, group.real))


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """[N, heads, L, size] of x [T, heads, size] and an index [N, L]."""
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:]).transpose(1, 2)


def _score_mod(layer: LayerParams, group: Group) -> ScoreMod | None:
    """Function that changes a scaled score: it applies the soft cap, then the bias. None: scores
    stay as they are."""
    bias = _bias(layer, group)
    if layer.soft_cap is None and bias is None:
        return None
    caps = group.number(layer.soft_cap, torch.float32)

    def change(score: Tensor, piece: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if caps is not None:
            score = caps[piece] * torch.tanh(score / caps[piece])
        return score if bias is None else score + bias(piece, head, query, key)

    return change


def _bias(
    layer: LayerParams, group: Group
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """(piece, head, query, key), all indices -> what is added to the score, in fp32."""
    bias = layer.bias
    if bias is None:
        return None
    if isinstance(bias, OffsetBias):
        # One number for each offset that comes up, looked up for each score.
        table = bias.by_offset(group.longest).float().to(group.k_positions.device)
        queries = group.q_positions - group.longest
        keys = group.k_positions
        return lambda piece, head, query, key: table[head, keys[piece, key] - queries[piece, query]]
    pieces = zip(group.q_positions, group.k_positions, strict=True)
    biases = torch.stack([bias(queries, keys).float() for queries, keys in pieces])
    return lambda piece, head, query, key: biases[piece, head, query, key]
