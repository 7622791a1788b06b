"""MambaSpec: what a layer keeps of a sequence."""

from typing import ClassVar

from toolkit_lm.kv import KVCacheSpec


class MambaSpec(KVCacheSpec, frozen=True, kw_only=True, tag="mamba"):
    """The last inputs of the convolution and the state, in float32: one block of max_model_len
    tokens, which every step writes. It holds a ring of them: those after token t are in place
    t % (rewinds + 1), so that a step can begin after any of the last tokens. Others begin from
    snapshots of the block."""

    caches_prefixes: ClassVar[bool] = False
    forks_anywhere: ClassVar[bool] = False
    grows: ClassVar[bool] = False

    channels: int
    kernel_size: int
    state_size: int

    @property
    def page_bytes(self) -> int:
        return 4 * self.places * self.channels * (self.kernel_size - 1 + self.state_size)

    @property
    def places(self) -> int:
        """Places of the ring."""
        return self.rewinds + 1
