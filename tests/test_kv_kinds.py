"""Core's own kinds of KV cache specs do what the kit asks of all."""

from __future__ import annotations

from toolkit_lm.kv import FullSpec, WindowSpec
from toolkit_lm_devkit import KVKindConformance
from toolkit_lm_sdpa.backend import SdpaBackend

SHAPE = {"num_kv_heads": 2, "head_size": 8, "dtype": "float32"}


class TestFull(KVKindConformance):
    backend = SdpaBackend
    spec = FullSpec(block_size=16, **SHAPE)
    variants = [
        FullSpec(block_size=1, **SHAPE),
        FullSpec(block_size=16, **SHAPE | {"num_kv_heads": 1}),
        FullSpec(block_size=16, **SHAPE | {"head_size": 9}),
        FullSpec(block_size=16, **SHAPE | {"dtype": "bfloat16"}),
    ]


class TestWindow(KVKindConformance):
    backend = SdpaBackend
    spec = WindowSpec(block_size=16, window=40, **SHAPE)
    variants = [
        WindowSpec(block_size=size, window=window, **SHAPE)
        for size in (1, 4, 17)
        for window in (1, 2, 16, 17, 50, 1000)
    ]
