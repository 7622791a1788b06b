def supports(isa: str) -> bool: ...
def attend(
    type: int,
    pointers: tuple[int, int, int, int],
    strides: tuple[int, int, int, int],
    rows: tuple[int, ...],
    block_tiles: int,
    layer: tuple[int, int, int, int, float, float, int],
    sight: int,
    additions: tuple[int, int, int, int, int],
    /,
) -> None: ...
def write_kv(
    type: int,
    pointers: tuple[int, int, int, int],
    strides: tuple[int, int, int, int],
    slots: int,
    tokens: int,
    kv_heads: int,
    size: int,
    block_size: int,
    /,
) -> None: ...
def set_threads(number: int, /) -> None: ...
def bind_threads(cores: tuple[int, ...], /) -> None: ...
def pack(type: int, weight: int, to: int, outputs: int, inputs: int, /) -> None: ...
def linear(
    weight: tuple[int, int, int, int, int, int, bool],
    rows: tuple[int, int, int, int, int, int],
    num_rows: int,
    /,
) -> None: ...
def likeliest_output(
    weight: tuple[int, int, int, int, int], rows: tuple[int, int, int, int], num_rows: int, /
) -> None: ...
def norm(
    type: int,
    pointers: tuple[int, int, int, int],
    strides: tuple[int, int, int],
    sizes: tuple[int, int, int],
    weight: tuple[int, int, float, bool | int],
    /,
) -> None: ...
def rotate(
    type: int,
    pointers: tuple[int, int, int],
    strides: tuple[int, int, int],
    sizes: tuple[int, int, int],
    /,
) -> None: ...
def likeliest(
    type: int, pointers: tuple[int, int, int], stride: int, rows: int, size: int, /
) -> None: ...
def embed(
    pointers: tuple[int, int, int], tokens: int, rows: int, lanes: int, width: int, /
) -> None: ...
def in_huge_pages(start: int, bytes: int, /) -> None: ...
def lose(start: int, bytes: int, /) -> None: ...
def layer(
    types: tuple[int, int, int],
    sizes: tuple[int, int, int, int, int],
    activation: int,
    factor: float,
    /,
    *parts: tuple[int, int, float, bool] | tuple[int, int],
) -> object: ...
def run_layer(
    layer: object,
    step: tuple[int, int, int, bool, int, int],
    angles: tuple[int, int, int, int],
    rows: tuple[int, ...],
    cache: tuple[int, int, int, int, int, int],
    attention: tuple[float, float, int],
    sight: int,
    /,
) -> None: ...
