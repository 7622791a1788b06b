"""WarmStates: prompts that begin from snapshots of recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from toolkit_lm.kv import KVCacheSpec

from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.generation import Generated

_BLOCK_SIZE = 2


class WarmStates(Conformance):
    """Tests of models whose layers keep snapshots (`KVCacheSpec.snapshots`)."""

    def test_a_warm_state_is_a_cold_one(self, first: Any) -> None:
        """A prompt that comes again begins from a snapshot, and gets the same log probabilities,
        bit for bit."""
        if not any(spec.snapshots for spec in self.kv_cache_specs(first)):
            return
        # At once, since there may be room for one snapshot alone.
        prompts = [prompt for prompt in self.prompts(first) for _ in range(2)]
        both = self.generate(first, prompts, block_size=_BLOCK_SIZE, max_num_seqs=1)
        for cold, prompt in list(enumerate(prompts))[::2]:
            warm = cold + 1
            if len(prompt) > _BLOCK_SIZE:
                assert both.num_cached[warm], f"of a prompt of {len(prompt)} tokens none is found"
            assert torch.equal(both.logprobs[cold], both.logprobs[warm]), (
                f"a prompt of {len(prompt)} tokens gives something else after a cached prefix"
            )

    def kv_cache_specs(self, subject: Any) -> list[KVCacheSpec]:
        """Returns the specs of the subject's layers."""
        raise NotImplementedError

    def prompts(self, subject: Any) -> list[list[int]]:
        """Returns the conformance prompts."""
        raise NotImplementedError

    def generate(self, subject: Any, prompts: Sequence[Sequence[int]], **options: Any) -> Generated:
        """Runs `prompts` through the engine."""
        raise NotImplementedError
