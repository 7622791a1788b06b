"""Qwen2's reward models: of whole answers (Yang et al. 2024), and of the steps of solutions (Zhang
et al. 2025)."""

from __future__ import annotations

import json
from pathlib import Path

from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import HeadLinear
from toolkit_lm.pooling import Pooler
from toolkit_lm_decoder.qwen2 import Qwen2Attention
from toolkit_lm_poolers import token_classification_pooler
from torch import nn

from toolkit_lm_reward.reward_model import RewardModel

STEP_TAG = "<extra_0>"
"""The token that ends a step."""


class Qwen2ForRewardModel(RewardModel):
    """Qwen2.5-Math-RM: one reward for each token; that of the last is the answer's."""

    attention = Qwen2Attention

    def make_head(self, size: int) -> nn.Module:
        return nn.Sequential(HeadLinear(size, size), nn.ReLU(), HeadLinear(size, self.num_labels))


class Qwen2ForProcessRewardModel(Qwen2ForRewardModel):
    """Qwen2.5-Math-PRM: for each step the probabilities that it is wrong, and that it is right."""

    num_labels = 2

    def make_pooler(self, head: nn.Module) -> Pooler:
        options = self.vllm_config.pooler
        asked = options.step_tag_id is not None or options.pooling_type == "ALL"
        tag = None if asked else self._step_tag()
        return token_classification_pooler(
            self.vllm_config,
            head,
            default="STEP",
            num_labels=self.num_labels,
            activation="softmax",
            step_tag_id=tag,
        )

    def _step_tag(self) -> int:
        """The id of STEP_TAG, of tokenizer.json. Raises CheckpointError: to score each token in its
        place would be no process reward."""
        assert self.vllm_config.checkpoint is not None
        path = (
            Path(self.vllm_config.renderer.tokenizer or self.vllm_config.checkpoint.path)
            / "tokenizer.json"
        )
        try:
            added = json.loads(path.read_bytes())["added_tokens"]
            return next(int(token["id"]) for token in added if token["content"] == STEP_TAG)
        except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
            raise CheckpointError(
                f"{str(path)!r} does not tell the id of the token {STEP_TAG!r}, which ends a "
                f"step ({type(error).__name__}). "
                "Give step_tag_id, or pooling_type='ALL'."
            ) from error
