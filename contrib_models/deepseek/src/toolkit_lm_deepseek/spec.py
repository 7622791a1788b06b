"""LatentSpec: what a layer with multi-head latent attention caches. Needs no torch."""

from toolkit_lm.kv import KVCacheSpec

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class LatentSpec(KVCacheSpec, frozen=True, kw_only=True, tag="latent"):
    """One vector per token, from which the keys and values of all heads are made: the normed
    latent, the rotated part of the keys, and the key of an indexer where there is one. It has no
    heads, so each tensor parallel rank keeps all of it."""

    size: int
    """Length of the vector: kv_lora_rank + qk_rope_head_dim, and index_head_dim of an indexer."""
    dtype: str

    @property
    def page_bytes(self) -> int:
        return self.block_size * self.size * BYTES[self.dtype]
