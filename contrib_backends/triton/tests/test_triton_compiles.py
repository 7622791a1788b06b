"""The kernels, compiled to machine code for GPUs, which needs none: Triton brings the assembler
along."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from toolkit_lm_triton.device import LAUNCH, interprets
from toolkit_lm_triton.layers import GATES
from toolkit_lm_triton.pieces import COLUMNS, SPLIT
from toolkit_lm_triton.states import MOST_TAPS, chunk_of, columns_of

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
    ),
    pytest.mark.skipif(interprets(), reason="what is interpreted is not compiled"),
]
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that a program may have, by compute capability: A100 and H100."""
ATTEND = {
    "COLUMNS": COLUMNS,
    "GROUP": 4,
    "GROUP_FILLED": 4,
    "QUERIES": 16,
    "SIZE": 128,
    "SIZE_FILLED": 128,
    "KEYS": 64,
    "BLOCK_SIZE": 16,
    "SPLIT": 0,
    "CAUSAL": True,
    "SPANS": False,
    "WINDOW": 0,
    "SOFT_CAP": 0.0,
    "SINKS": False,
    "BIAS": 0,
}
DECODE = {"QUERIES": 4, "SPLIT": SPLIT}
STEPS: dict[str, dict[str, Any]] = {
    "prefill": {},
    "decode": DECODE,
    "decode, 1 head": DECODE | {"GROUP": 1, "GROUP_FILLED": 1, "QUERIES": 16},
    "decode, all": DECODE
    | {
        "WINDOW": 99,
        "SOFT_CAP": 30.0,
        "SINKS": True,
        "BIAS": 1,
        "GROUP": 3,
        "SIZE": 80,
        "BLOCK_SIZE": 17,
    },
    "spans": {"SPANS": True, "WINDOW": 99, "SOFT_CAP": 30.0},
    "bias of pairs": {"BIAS": 2, "BLOCK_SIZE": 0},
    "encoder": {"CAUSAL": False, "WINDOW": 99, "BLOCK_SIZE": 0},
    "cross": {"CAUSAL": False, "SINKS": True},
    "int8 cache": {"CACHE": "i8"},
    "fp8 cache, decode": DECODE | {"CACHE": "fp8e4nv"},
    "fp8 cache of the layer": {"CACHE": "fp8e4nv", "LAYER": True},
    "wide heads": {"SIZE": 256, "SIZE_FILLED": 256, "KEYS": 32},
}
ROTATED = {"HALF": 48, "HALF_FILLED": 64, "INTERLEAVED": False}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory) -> Iterator[None]:
    """A cache of this file's own: what several cases have, the same, is compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def compiled(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int = 90,
    warps: int = 4,
    **options: int,
) -> Any:
    """Arguments without a type are int32. A pointer that is not given is a constant, None."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants | {name: None for name, type in types.items() if type == "none"}
    names = kernel.arg_names
    assert constants.keys() | types.keys() <= set(names)
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}
    )
    made = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, **LAUNCH, **options},
    )
    assert made.asm["cubin"]
    assert made.metadata.shared <= SHARED_MEMORY[capability]
    return made


@pytest.mark.parametrize(
    ("step", "dtype", "capability"),
    [
        ("decode, all", "bf16", 90),
        *(
            # Conversions from float8 are no GPU's of that age.
            pytest.param(step, "bf16", 90 if "fp8" in step else 80, marks=pytest.mark.slow)
            for step in STEPS
        ),
        *(
            pytest.param(step, "fp32", 80, marks=pytest.mark.slow)
            for step in ("prefill", "decode", "wide heads")
        ),
        pytest.param("prefill", "bf16", 90, marks=pytest.mark.slow),
        *(
            pytest.param(step, "bf16", 90, marks=pytest.mark.nightly)
            for step in ("decode", "wide heads")
        ),
    ],
)
def test_attention(step, dtype, capability) -> None:
    from toolkit_lm_triton.kernels import attention

    constants = ATTEND | STEPS[step]
    cache = constants.pop("CACHE", None)
    is_of_layer = constants.pop("LAYER", False)
    if dtype == "fp32":
        constants["KEYS"] = min(constants["KEYS"], 2**14 // (4 * constants["SIZE_FILLED"]))
    given = {
        "block_table": constants["BLOCK_SIZE"],
        "sinks": constants["SINKS"],
        "bias": constants["BIAS"],
        "span_ends": constants["SPANS"],
    }
    given |= {"partial": constants["SPLIT"], "stats": constants["SPLIT"]}
    given |= {"scales": cache and not is_of_layer, "k_scale": is_of_layer, "v_scale": is_of_layer}
    elements = {"block_table": "*i32", "span_ends": "*i32"}
    types = {
        name: elements.get(name, "*fp32") if is_given else "none"
        for name, is_given in given.items()
    }
    types |= dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}") | {
        "pieces": "*i32",
        "scale": "fp32",
    }
    if cache is not None:
        types |= dict.fromkeys(("k", "v"), f"*{cache}")
    made = compiled(attention.attend, types, constants, capability)
    if dtype == "bf16":
        assert "mma" in made.asm["ptx"], "products do not run on tensor cores"


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("fp16", "fp32"))]
)
def test_what_is_beside_attention(dtype) -> None:
    from toolkit_lm_triton.kernels import attention

    brought = dict.fromkeys(("k", "v"), f"*{dtype}") | {"slots": "*i64"}
    sizes = {"BLOCK_SIZE": 16, "SIZE": 80, "SIZE_FILLED": 128}
    for stored, greatest, given in (
        (dtype, 0, ()),
        ("i8", 127, ("scales",)),
        ("fp8e4nv", 448, ("scales",)),
        ("fp8e4nv", 448, ("k_scale", "v_scale")),
    ):
        pages = dict.fromkeys(("keys", "values"), f"*{stored}")
        scales = dict.fromkeys(("scales", "k_scale", "v_scale"), "none")
        scales |= dict.fromkeys(given, "*fp32")
        compiled(attention.store_kv, brought | pages | scales, sizes | {"GREATEST": greatest})
    shape = {
        name: ATTEND[name] for name in ("COLUMNS", "GROUP", "GROUP_FILLED", "SIZE", "SIZE_FILLED")
    }
    types = {"partial": "*fp32", "stats": "*fp32", "out": f"*{dtype}", "pieces": "*i32"}
    compiled(attention.merge, types, shape | DECODE)


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("fp16", "fp32"))]
)
def test_layers(dtype) -> None:
    from toolkit_lm_triton.kernels import layers

    norm = dict.fromkeys(("x", "residual", "weight", "total", "out"), f"*{dtype}") | {"eps": "fp32"}
    compiled(layers.rms_norm, norm, {"SIZE": 4096, "SIZE_FILLED": 4096, "ADDS": True})
    compiled(
        layers.rms_norm,
        norm | {"residual": "none", "weight": "*fp32"},
        {"SIZE": 80, "SIZE_FILLED": 128, "ADDS": False},
    )
    pointers = dict.fromkeys(("x", "cos", "sin"), f"*{dtype}")
    for interleaved in (False, True):
        compiled(layers.rotate, pointers, ROTATED | {"INTERLEAVED": interleaved}, warps=1)
    pointers = dict.fromkeys(("q", "k", "v", "cos", "sin", "keys", "values"), f"*{dtype}") | {
        "slots": "*i64"
    }
    heads = {"HEADS": 32, "KV_HEADS": 8, "SIZE": 128, "SIZE_FILLED": 128, "BLOCK_SIZE": 16}
    compiled(layers.rotate_and_store, pointers, ROTATED | heads, warps=1)
    for activation in sorted(set(GATES.values())):
        compiled(
            layers.gate,
            dict.fromkeys(("x", "out"), f"*{dtype}"),
            {"SIZE": 11000, "BLOCK": 1024, "ACTIVATION": activation},
        )
    scores = {"scores": f"*{dtype}", "best": f"*{dtype}", "found": "*i64"}
    compiled(layers.likeliest, scores | {"places": "none"}, {"BLOCK": 4096, "HAS_PLACES": False})
    compiled(layers.likeliest, scores | {"places": "*i64"}, {"BLOCK": 32, "HAS_PLACES": True})


FEW = {"ROWS": 16, "OUTPUTS": 32}
MANY = {"ROWS": 128, "OUTPUTS": 128}
PRODUCT = {"ZERO": 8, "GROUP": 128, "PACKED": True, "TILE": 64, "E2M1": False}
CODED = {"ZERO": 0, "GROUP": 0, "PACKED": False, "TILE": 128, "E2M1": False}
MXFP4 = PRODUCT | {"ZERO": 0, "GROUP": 32, "TILE": 32, "E2M1": True}
PRODUCTS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "int4, few rows": ("bf16", PRODUCT | FEW, {}),
    "int4, many rows": ("bf16", PRODUCT | MANY, {}),
    "int4 with zeros": ("fp16", PRODUCT | MANY | {"TILE": 32}, {"zeros": "*u8"}),
    "int4 with mins": ("bf16", PRODUCT | MANY, {"mins": "*bf16", "bias": "*bf16"}),
    "int4 in float32": ("fp32", PRODUCT | {"ROWS": 64, "OUTPUTS": 64}, {}),
    "groups of any size": ("bf16", PRODUCT | MANY, {"groups": "*i64"}),
    "a table": ("bf16", PRODUCT | MANY | {"ZERO": 0}, {"values": "*fp32"}),
    "MXFP4, few rows": ("bf16", MXFP4 | FEW, {}),
    "MXFP4 of experts": ("bf16", MXFP4 | FEW, {"pieces": "*i32", "bias": "*bf16"}),
    "int4 of experts, many rows": ("bf16", PRODUCT | MANY, {"pieces": "*i32", "zeros": "*u8"}),
    "int8 of groups": ("bf16", PRODUCT | MANY | {"ZERO": 128, "PACKED": False}, {}),
    "int8 by int8, few rows": ("i8", CODED | FEW, {"x_scales": "*fp32"}),
    "int8 by int8, many rows": ("i8", CODED | MANY, {"x_scales": "*fp32"}),
}


NOT_OF_DENSE = ("x", "x_scales", "bias", "pieces")


@pytest.mark.parametrize(
    ("product", "capability"),
    [
        ("int4, few rows", 90),
        ("int8 by int8, many rows", 80),
        ("MXFP4 of experts", 90),
        *(pytest.param(product, 80, marks=pytest.mark.slow) for product in PRODUCTS),
        *(pytest.param(product, 90, marks=pytest.mark.nightly) for product in PRODUCTS),
    ],
)
def test_products_of_quantized_weights(product, capability) -> None:
    from toolkit_lm_triton.kernels import quantized

    dtype, constants, given = PRODUCTS[product]
    absent = "x_scales", "zeros", "mins", "values", "groups", "bias", "pieces"
    types = dict.fromkeys(absent, "none")
    types |= {"x": f"*{dtype}", "codes": "*i8" if dtype == "i8" else "*u8", "scales": "*fp32"}
    types |= {"out": "*fp32" if constants["ROWS"] == 16 or dtype == "i8" else f"*{dtype}"}
    warps = 8 if constants["ROWS"] == 128 else 4
    made = compiled(quantized.product, types | given, constants, capability, warps)
    if dtype != "fp32":
        assert "mma" in made.asm["ptx"], "products do not run on tensor cores"
    rows = {"x": "*bf16", "codes": "*i8", "scales": "*fp32"}
    coded = {"TILE": 128, "GREATEST": 127}
    compiled(quantized.quantize_rows, rows, coded, capability, warps=1)
    if capability >= 90:
        of_float = {"TILE": 8192, "GREATEST": 448}
        compiled(quantized.quantize_rows, rows | {"codes": "*fp8e4nv"}, of_float, capability, 8)
    if dtype != "i8":
        dense = {name: kind for name, kind in (types | given).items() if name not in NOT_OF_DENSE}
        sizes = {name: value for name, value in constants.items() if name != "ROWS"}
        compiled(
            quantized.dequantize,
            dense | {"out": f"*{dtype}"},
            sizes | {"OUTPUTS": 32},
            capability,
        )


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [
        ("bf16", 90),
        pytest.param("bf16", 80, marks=pytest.mark.slow),
        pytest.param("fp16", 80, marks=pytest.mark.slow),
        pytest.param("fp32", 90, marks=pytest.mark.slow),
    ],
)
def test_low_ranks(dtype, capability) -> None:
    from toolkit_lm_triton.kernels import low_rank

    shape = {"PARTS": 3, "COLUMNS": 6, "ROWS": 16, "RANK": 16}
    tables = {"table": "*i64", "pieces": "*i32", "rows": "*i32", "low": "*fp32"}
    made = [
        compiled(
            low_rank.shrink,
            tables | {"x": f"*{dtype}"},
            shape | {"TILE": 128, "TILES": 8},
            capability,
        ),
        compiled(
            low_rank.expand,
            tables | {"scales": "*fp32", "out": f"*{dtype}"},
            shape | {"OUTPUTS": 64},
            capability,
        ),
    ]
    if dtype != "fp32":
        assert all("mma" in one.asm["ptx"] for one in made), "products do not run on tensor cores"


@pytest.mark.parametrize(
    ("keys", "delta", "per_key", "capability"),
    [
        (256, False, False, 80),
        *(
            pytest.param(keys, True, per_key, 80, marks=pytest.mark.slow)
            for keys, per_key in ((128, True), (96, False))
        ),
        *(
            pytest.param(128, True, False, capability, marks=pytest.mark.nightly)
            for capability in (80, 90)
        ),
    ],
)
def test_linear_attention(keys, delta, per_key, capability) -> None:
    """The gated delta rule of Qwen3-Next, of Kimi Linear and of OLMo, and Mamba-2 of Bamba."""
    from toolkit_lm_triton.kernels import recurrence

    filled = 128 if keys == 96 else keys
    rule = {"DELTA": delta, "PER_KEY": per_key, "HEADS": 32, "GROUPS": 16}
    sizes = {"KEYS": keys, "KEYS_FILLED": filled}
    names = "q", "k", "decay", "factor", "v", "out", "scores", "solved", "ring"
    pointers = {**dict.fromkeys(names, "*fp32"), "scale": "fp32", "eps": "fp32"}
    pointers |= dict.fromkeys(("tokens", "blocks", "starts"), "*i64")

    def make(kernel: Any, **options: Any) -> Any:
        own = {name: kind for name, kind in pointers.items() if name in kernel.arg_names}
        constants = {name: options.pop(name) for name in [*options] if name.isupper()}
        return compiled(kernel, own, rule | sizes | constants, capability, **options)

    chunk = chunk_of(filled)
    within = make(recurrence.within_chunks, CHUNK=chunk)
    over = make(
        recurrence.over_chunks, CHUNK=chunk, VALUES=128, COLUMNS=columns_of(filled), num_stages=1
    )
    assert all("mma" in one.asm["ptx"] for one in ([over] if per_key else [within, over]))
    make(recurrence.recur, VALUES=128, COLUMNS=1024 // filled, warps=1)


@pytest.mark.parametrize("size", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_scans(size) -> None:
    from toolkit_lm_triton.kernels import recurrence

    names = "x", "time", "rates", "into", "out_of", "out", "ring"
    pointers = dict.fromkeys(names, "*fp32") | dict.fromkeys(("tokens", "blocks", "starts"), "*i64")
    shape = {"SIZE": size, "SIZE_FILLED": size, "CHANNELS": 1024 // size}
    compiled(recurrence.scan, pointers, shape, warps=1)


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in ("fp16", "fp32"))]
)
def test_convolutions(dtype) -> None:
    from toolkit_lm_triton.kernels import recurrence

    pointers = dict.fromkeys(("tokens", "blocks", "starts"), "*i64")
    pointers |= dict.fromkeys(("out", "ring"), "*fp32")
    pointers |= dict.fromkeys(("x", "weight", "bias"), f"*{dtype}")
    shape = {"SIZE": 4, "CHANNELS": 128}
    compiled(recurrence.convolve, pointers, shape | {"TOKENS": 1, "ACTIVATION": "silu"})
    plain = shape | {"TOKENS": MOST_TAPS, "ACTIVATION": ""}
    compiled(recurrence.convolve, pointers | {"bias": "none"}, plain)
