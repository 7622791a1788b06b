MOST_RANKS: int
MOST_OWN: int
"""Number of counters that callers may use."""
COUNTERS: int
"""Bytes of the counters, at the start of the memory."""
BUFFER: int
"""Bytes of a buffer. There are two for each rank, after the counters."""
HAS_FLOAT16: int

_Place = tuple[int, int, int, float]
"""The memory's address, the rank, the number of ranks, and how many seconds to wait for another."""

def all_reduce(place: _Place, type: int, data: int, count: int, /) -> None: ...
def all_gather(place: _Place, data: int, out: int, bytes: int, inner: int, /) -> None: ...
def post(place: _Place, counter: int, /) -> None: ...
def wait(place: _Place, counter: int, value: int, of_rank: int, /) -> None: ...
def leave(place: _Place, /) -> None: ...
