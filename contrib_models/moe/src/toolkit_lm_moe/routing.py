"""Routers: which experts a token goes to, and with which weights. All in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HFConfig, Shard, ShardLoader, choose_kernels, new_parameter
from torch import Tensor, nn

_MOST_EXPERTS = 2**12


def count_of(config: HFConfig, key: str, least: int, most: int, default: int | None = None) -> int:
    """An integer of config.json. Raises CheckpointError unless it is `least` to `most`."""
    count = config.require(key, int) if default is None else config.get(key, int, default)
    if not least <= count <= most:
        raise CheckpointError(f"config.json: {key!r} must be {least} to {most}, not {count}.")
    return count


def num_experts_of(config: HFConfig) -> int:
    """`n_routed_experts`."""
    return count_of(config, "n_routed_experts", 1, _MOST_EXPERTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the scores of a token's experts become a choice."""

    top_k: int
    scale: float = 1.0
    """Factor of all weights."""
    normalize: bool = False
    """The weights of a token's experts sum to one, before they are scaled."""
    eps: float = 1e-20
    """Added to that sum."""
    groups: int = 1
    """The experts are divided into so many groups of equal size."""
    top_groups: int = 1
    """A token goes to experts of so many groups."""
    best: int = 1
    """A group's score is the sum of the scores of so many of its experts, the best."""

    @classmethod
    def read(
        cls, config: HFConfig, *, normalize: bool, grouped: bool = True, best: int = 1
    ) -> Routing:
        """Reads config.json. `grouped`: the experts may be divided into groups.

        Raises CheckpointError for counts that do not fit together.
        """
        experts = num_experts_of(config)
        groups = count_of(config, "n_group", 1, experts, 1) if grouped else 1
        if experts % groups or experts // groups < best:
            raise CheckpointError(
                f"config.json: {experts} experts ('n_routed_experts') cannot be divided into "
                f"{groups} equal groups ('n_group') of {best} at least."
            )
        top_groups = count_of(config, "topk_group", 1, groups, 1) if groups > 1 else 1
        return cls(
            top_k=count_of(config, "num_experts_per_tok", 1, experts // groups * top_groups),
            scale=config.get("routed_scaling_factor", float, 1.0),
            normalize=normalize,
            groups=groups,
            top_groups=top_groups,
            best=best,
        )

    def choose(self, scores: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Scores [T, E] -> the experts of each token [T, K] (int64), and their weights [T, K].

        `bias` [E] is added for the choice alone.
        """
        wanted = scores if bias is None else scores + bias
        if self.groups > 1:
            wanted = self._within_groups(wanted)
        experts = wanted.topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        return experts, weights * self.scale

    def _within_groups(self, scores: Tensor) -> Tensor:
        """The scores, -inf where an expert's group is not among the best."""
        grouped = scores.view(len(scores), self.groups, -1)
        best = grouped.topk(self.best, dim=-1).values.sum(-1)
        chosen = best.topk(self.top_groups, dim=-1, sorted=False).indices
        hidden = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        return grouped.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)


class Router(nn.Module):
    """A linear router: x [T, H] -> scores of experts [T, E] in float32, by softmax, or else by
    sigmoid. Its weight is never quantized.

    `e_score_correction_bias` [E], where there is one, balances experts: it is added to the scores
    for the choice, not to the weights (DeepSeek-AI 2024, V3).
    """

    def __init__(
        self, num_experts: int, *, softmax: bool, corrected: bool, vllm_config: VllmConfig
    ) -> None:
        super().__init__()
        hidden_size = HFConfig(vllm_config.hf_config).require("hidden_size", int)
        loader = ShardLoader((Shard.whole(num_experts),))
        self.weight = new_parameter((num_experts, hidden_size), torch.float32, loader)
        self.e_score_correction_bias = (
            new_parameter((num_experts,), torch.float32, loader) if corrected else None
        )
        self.softmax = softmax
        self.kernels = choose_kernels()

    def forward(self, x: Tensor) -> Tensor:
        logits = self.kernels.linear(x.float(), self.weight, None)
        return logits.softmax(-1) if self.softmax else logits.sigmoid()
