def supports(dtype: str) -> bool: ...
def attend(
    is_bf16: bool,
    pointers: tuple[int, int, int, int],
    strides: tuple[int, int, int, int],
    starts: int,
    seen: int,
    sequences: int,
    heads: int,
    kv_heads: int,
    size: int,
    scale: float,
    /,
) -> None: ...
