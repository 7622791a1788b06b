from collections.abc import Mapping
from typing import TypedDict, Unpack

from toolkit_lm_cpu import arguments

KERNELS: tuple[tuple[str, str, int], ...]
"""(instruction set, dtype, elements per lane) of each kernel, by its number."""
CODE_KERNELS: tuple[str, ...]
"""Instruction set of each kernel for quantized weights, by its number, the oldest first."""
FIELDS: Mapping[str, tuple[str, ...]]
"""Field names of each tuple of `arguments`, in the order that the C code reads."""
PLAIN: int
RELU: int
SILU: int
GELU: int
GELU_TANH: int
QUICK_GELU: int
LANES: int
TILE: int
MOST_SIZE: int
AMX_INPUTS: int
MOST_TAPS: int
SEE_ALL: int
SEE_PAST: int
SEE_AROUND: int

def supports(isa: str) -> bool: ...
def set_threads(number: int, /) -> None: ...
def bind_threads(cores: tuple[int, ...], /) -> None: ...
def in_huge_pages(start: int, bytes: int, /) -> None: ...
def lose(start: int, bytes: int, /) -> None: ...
def low_rank(low_rank: arguments.LowRank, /) -> object: ...
def low_ranks(low_ranks: tuple[object, ...], next: object, /) -> object: ...
def row_groups(groups: tuple[tuple[int, int, float], ...], rank: int, /) -> object: ...
def layer(layer: arguments.Layer, /) -> object: ...
def group(parts: tuple[arguments.LinearPart, ...], /) -> object: ...

# Keyword arguments are given in this order, which the headers of the sources explain.
class _Product(TypedDict):
    weights: int
    bias: int
    outputs: int
    inputs: int
    activation: int
    is_gated: bool
    x: int
    x_stride: int
    residual: int
    residual_stride: int
    out: int
    out_stride: int
    rows: int

class _QuantizedProduct(_Product):
    quantized: arguments.Quantized
    codes: int

def run_layer(
    layer: object,
    rows: arguments.Rows,
    adapted: tuple[object, ...] | None,
    /,
    *,
    x: int,
    residual: int,
    y: int,
    adds: bool,
    tokens: int,
    workspace: int,
    cos: int,
    sin: int,
    angle_stride: int,
    angle_size: int,
    slots: int,
    embedding: int,
    embedding_stride: int,
) -> None: ...
def attend(
    type: int,
    rows: arguments.Rows,
    /,
    *,
    queries: int,
    keys: int,
    values: int,
    out: int,
    query_stride: int,
    key_stride: int,
    value_stride: int,
    out_stride: int,
    block_tiles: int,
    heads: int,
    kv_heads: int,
    size: int,
    real: int,
    scale: float,
    soft_cap: float,
    window: int,
    sight: int,
    sinks: int,
    bias: int,
    bias_keys: int,
    bias_center: int,
    spans: int,
    code: int,
    key_scales: int,
    value_scales: int,
    scale_page: int,
) -> None: ...
def write_kv(
    type: int,
    /,
    *,
    keys: int,
    values: int,
    to_keys: int,
    to_values: int,
    key_stride: int,
    value_stride: int,
    key_page: int,
    value_page: int,
    slots: int,
    tokens: int,
    kv_heads: int,
    size: int,
    block_size: int,
    code: int,
    key_scales: int,
    value_scales: int,
    scale_page: int,
) -> None: ...
def pack(
    type: int,
    /,
    *,
    weight: int,
    to: int,
    outputs: int,
    inputs: int,
) -> None: ...
def pack_codes(
    *,
    codes: int,
    order: int,
    to: int,
    outputs: int,
    inputs: int,
    width: int,
    bits: int,
    added: int,
    has_levels: bool,
) -> None: ...
def linear(
    type: int, groups: object, low_ranks: object, /, **product: Unpack[_Product]
) -> None: ...
def likeliest_output(
    type: int, best: int, indices: int, /, **product: Unpack[_Product]
) -> None: ...
def quantized_linear(
    type: int, groups: object, low_ranks: object, /, **product: Unpack[_QuantizedProduct]
) -> None: ...
def likeliest_quantized(
    type: int, best: int, indices: int, /, **product: Unpack[_QuantizedProduct]
) -> None: ...
def grouped(
    type: int,
    group: object,
    /,
    *,
    ends: int,
    biases: int,
    bias_bytes: int,
    element: int,
    x: int,
    x_stride: int,
    out: int,
    codes: int,
    code_bytes: int,
    inputs: int,
    outputs: int,
    activation: int,
    is_gated: bool,
) -> None: ...
def experts(
    type: int,
    gate_up: object,
    down: object,
    /,
    *,
    x: int,
    chosen: int,
    weights: int,
    out: int,
    x_stride: int,
    tokens: int,
    top: int,
    first: int,
    hidden: int,
    inner: int,
    element: int,
    up_biases: int,
    down_biases: int,
    up_bias_bytes: int,
    down_bias_bytes: int,
    rows: int,
    between: int,
    codes: int,
    up_code_bytes: int,
    down_code_bytes: int,
    activation: int,
    is_gated: bool,
) -> None: ...
def norm(
    type: int,
    /,
    *,
    x: int,
    residual: int,
    sum: int,
    out: int,
    x_stride: int,
    head_stride: int,
    residual_stride: int,
    tokens: int,
    heads: int,
    size: int,
    weight: int,
    bias: int,
    eps: float,
    is_wide: bool,
) -> None: ...
def rotate(
    type: int,
    /,
    *,
    x: int,
    cos: int,
    sin: int,
    x_stride: int,
    head_stride: int,
    angle_stride: int,
    tokens: int,
    heads: int,
    size: int,
) -> None: ...
def likeliest(
    type: int,
    num_rows: int,
    /,
    *,
    scores: int,
    best: int,
    indices: int,
    stride: int,
    size: int,
) -> None: ...
def soft_cap(
    type: int,
    rows: int,
    /,
    *,
    x: int,
    stride: int,
    size: int,
    cap: float,
) -> None: ...
def embed(
    num_rows: int,
    /,
    *,
    weights: int,
    ids: int,
    out: int,
    tokens: int,
    lanes: int,
    width: int,
) -> None: ...
def convolve(
    type: int,
    /,
    *,
    tokens: int,
    blocks: int,
    starts: int,
    rows: int,
    length: int,
    ring: int,
    places: int,
    page: int,
    x: int,
    weight: int,
    bias: int,
    out: int,
    x_stride: int,
    channels: int,
    size: int,
    width: int,
    is_bfloat16: bool,
    activation: int,
) -> None: ...
def recur(
    type: int,
    /,
    *,
    tokens: int,
    blocks: int,
    starts: int,
    rows: int,
    length: int,
    ring: int,
    places: int,
    page: int,
    q: int,
    k: int,
    v: int,
    decays: int,
    factors: int,
    out: int,
    stride: int,
    heads: int,
    groups: int,
    keys: int,
    values: int,
    scale: float,
    eps: float,
    is_delta: bool,
    per_key: bool,
) -> None: ...
def scan(
    type: int,
    /,
    *,
    tokens: int,
    blocks: int,
    starts: int,
    rows: int,
    length: int,
    ring: int,
    places: int,
    page: int,
    x: int,
    time: int,
    rates: int,
    into: int,
    out_of: int,
    out: int,
    into_stride: int,
    out_of_stride: int,
    channels: int,
    size: int,
) -> None: ...
def latent(
    type: int,
    /,
    *,
    latents: int,
    places: int,
    lengths: int,
    q: int,
    out: int,
    stride: int,
    rows: int,
    heads: int,
    size: int,
    rank: int,
    width: int,
    is_bfloat16: bool,
    scale: float,
) -> None: ...
