"""A third party's quantization: weights in int4, with a scale and a zero for each group of 32
inputs; and, where the checkpoint says so, KV caches in int8, with an attention backend of their
own."""

from toolkit_lm.plugin import (
    AttentionBackendRegistry,
    KVKindRegistry,
    QuantizationRegistry,
    hookimpl,
)


@hookimpl
def toolkit_register_quantization(quantization: QuantizationRegistry) -> None:
    quantization.add("minmax4", "toolkit_lm_int4.int4:Int4")


@hookimpl
def toolkit_register_kv_kinds(kv_kinds: KVKindRegistry) -> None:
    kv_kinds.add("int8_full", "toolkit_lm_int4.cache:Int8FullSpec")
    kv_kinds.add("int8_window", "toolkit_lm_int4.cache:Int8WindowSpec")


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    backends.add("int8", "toolkit_lm_int4.cache:Int8Backend", priority=0)
