"""CacheConfig: the paged KV cache, and the caches of media."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct, field

from toolkit_lm.config.memory import parse_memory
from toolkit_lm.config.options import option
from toolkit_lm.errors import ConfigError


class CacheConfig(Struct, frozen=True, kw_only=True):
    """The paged KV cache."""

    block_size: Annotated[int, option("Tokens per block of the KV cache.", ge=1, le=1024)] = 16
    kv_cache_memory: Annotated[
        str,
        option(
            "Memory of the KV cache: bytes ('2GiB') or a fraction ('0.5') of the memory that a "
            "full step leaves free. auto: nearly all of a GPU, part of a host."
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "model", "int8", "fp8"],
        option(
            "Type of cached keys and values. auto: the checkpoint's; model: the model's dtype; "
            "int8, fp8: quantized, with a scale per token and head unless the checkpoint has some."
        ),
    ] = "auto"
    kv_cache_dtype_skip_layers: Annotated[
        list[str],
        option(
            "Layers that `kv_cache_dtype` leaves as they are: numbers ('0'), or patterns of names "
            "('*.self_attn.attn')."
        ),
    ] = field(default_factory=list)
    num_kv_blocks: Annotated[
        int | None,
        option(
            "Blocks of the KV cache, in place of an amount of memory. With several pools: blocks "
            "of the pool that long sequences fill first.",
            none="as many as kv_cache_memory holds",
            ge=1,
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool | None,
        option(
            "Prefix caching: reuse the KV cache of earlier requests with the same prefix.",
            none="on where text is generated, if all layers can share what they cache",
        ),
    ] = None
    encoder_cache_memory: Annotated[
        str,
        option(
            "Memory for embeddings of images and other media, until prompts have been computed: "
            "bytes ('256MiB')."
        ),
    ] = "256MiB"
    feature_cache_memory: Annotated[
        str,
        option(
            "Memory for processed images and other media: a repeated item is not processed again. "
            "0: none."
        ),
    ] = "1GiB"
    swap_memory: Annotated[
        str | None,
        option(
            "Host memory for swapped requests: bytes ('4GiB') or a fraction of the free memory.",
            none="none",
        ),
    ] = None

    def __post_init__(self) -> None:
        amounts = {
            "kv_cache_memory": self.kv_cache_memory,
            "swap_memory": self.swap_memory,
            "encoder_cache_memory": self.encoder_cache_memory,
            "feature_cache_memory": self.feature_cache_memory,
        }
        for name, text in amounts.items():
            if text is not None and (name, text) not in (
                ("kv_cache_memory", "auto"),
                ("feature_cache_memory", "0"),
            ):
                try:
                    if isinstance(parse_memory(text), float) and name in (
                        "encoder_cache_memory",
                        "feature_cache_memory",
                    ):
                        raise ConfigError(
                            f"{text!r} is a fraction; it takes bytes, such as '256MiB'."
                        )
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}") from None

    @property
    def feature_cache_bytes(self) -> int:
        return (
            0 if self.feature_cache_memory == "0" else int(parse_memory(self.feature_cache_memory))
        )
