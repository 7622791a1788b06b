"""LatentSpec: what a layer keeps of a sequence."""

from toolkit_lm.kv import KVCacheSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class LatentSpec(KVCacheSpec, frozen=True, kw_only=True, tag="latent"):
    """One vector per token, from which the keys and values of all heads are made: the normed
    latent, then the rotated part of the keys. It has no heads, so that each rank keeps all of
    it."""

    size: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.size * BYTES[self.dtype]
