"""Falcon Mamba: Mamba whose time steps, B and C are of unit root mean square."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_hybrid.mamba import MambaMixer, MambaShape
from toolkit_lm_hybrid.mixer_layer import RecurrentForCausalLM


class FalconMambaMixer(MambaMixer):
    def add_norms(self, config: HFConfig, shape: MambaShape, vllm_config: VllmConfig) -> None:
        self.eps = config.get("mixer_rms_eps", float, 1e-6)

    def normed(self, step: Tensor, into: Tensor, out_of: Tensor) -> tuple[Tensor, ...]:
        return tuple(
            F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype)
            for x in (step, into, out_of)
        )


class FalconMambaForCausalLM(RecurrentForCausalLM):
    mixers = {"linear_attention": {"mixer": FalconMambaMixer}}
