"""Specification of an attention layer. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct

from toolkit_lm.kv import FullSpec, KVCacheSpec


class AttentionType(StrEnum):
    """Which tokens a token can see. A plugin's layer may be of another type, by its own name."""

    DECODER = "decoder"
    """Itself and what came before it, through the KV cache."""
    ENCODER = "encoder"
    """All tokens of its own sequence in the batch; no cache."""
    CROSS = "cross"
    """All tokens of the request's encoder sequence, whose keys and values are cached."""


class AttentionSpec(Struct, frozen=True, kw_only=True):
    """All that a backend needs to know to say whether it can run a layer. Head counts are per
    rank."""

    layer: str
    type: AttentionType | str
    """A text: of a type that a plugin brings, for backends that know it."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    device: str
    """Device type: "cpu", "cuda", ..."""
    kv_cache: KVCacheSpec | None
    """Spec of the layer's cache. None: it caches nothing."""
    window: int | None = None
    """Sliding window: a token at position p sees positions above p - window; in an encoder, also
    only those below p + window."""
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap)."""
    sinks: bool = False
    """A learned logit per head joins the softmax's denominator."""
    bias: bool = False
    """An additive bias per head and pair of positions (ALiBi, T5)."""
    offset_bias: bool = False
    """It is an `OffsetBias`."""
    spans: bool = False
    """The tokens of a span, an image's, see those after them in it too: `BatchView.spans`. A window
    holds all the same."""


def common_refusal(
    spec: AttentionSpec, dtypes: Sequence[str], caches: Sequence[tuple[str, str]] = ()
) -> str | None:
    """Why no backend that caches keys and values, with kernels for these dtypes, can run the layer;
    None: one may. `caches`: dtype and `scales` of quantized caches that it reads.

    It is where `AttentionBackend.refuses` of most backends begins. They go on with what their own
    kernels lack.
    """
    if spec.dtype not in dtypes:
        return f"no kernel for {spec.dtype}, only for {', '.join(dtypes)}"
    if spec.type not in tuple(AttentionType):
        return f"no attention of type {spec.type!r}, only of {', '.join(AttentionType)}"
    if (cache := spec.kv_cache) is not None:
        if not isinstance(cache, FullSpec):
            return f"no layout for a cache of kind {cache.kind!r}, only for keys and values"
        kept = cache.dtype, cache.scales
        if kept not in ((spec.dtype, "none"), *caches):
            scales = "" if cache.scales == "none" else f" with scales for each {cache.scales}"
            others = sorted({spec.dtype} | {dtype for dtype, _ in caches})
            return f"no kernel for a cache in {cache.dtype}{scales}, only for {', '.join(others)}"
    asked = [name for name in ("window", "bias") if getattr(spec, name)]
    if spec.type is AttentionType.CROSS and asked:
        return (
            f"{' and '.join(asked)} {'relate' if len(asked) > 1 else 'relates'} positions of one "
            "sequence, and cross attention has two"
        )
    if spec.spans and spec.type is not AttentionType.DECODER:
        return f"spans are of decoders, and this is attention of type {str(spec.type)!r}"
    return None
