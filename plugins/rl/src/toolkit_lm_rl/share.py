"""Messages between the front and the engine's halves. Importing it needs no torch."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of running requests in a pause. "abort": they end. "wait": they finish first.
"keep": they go on after it."""
Tag = Literal["weights", "kv_cache", "scheduling"]
"""What `wake_up` brings back."""
TAGS: tuple[Tag, ...] = ("weights", "kv_cache", "scheduling")
PART = "rl"


class State(Struct, frozen=True):
    """State of an engine."""

    is_paused: bool
    """Nothing is computed: the engine was paused, or it sleeps."""
    level: int
    """Level at which the engine sleeps; 0: it is awake."""
    asleep: list[Tag]
    """What `wake_up` has not brought back yet."""
    weight_version: str
    """Version of the weights; empty: those of the checkpoint."""
    num_begun: int
    """Requests that have begun, and have not ended."""
    keeps_weights: bool = False
    """The engine sleeps, and each worker has its weights in a file."""


class Pause(Struct, frozen=True):
    """A pause."""

    mode: PauseMode = "abort"


class Sleep(Struct, frozen=True):
    """A sleep."""

    level: int = 1
    mode: PauseMode = "abort"
    keep: bool = False
    """At level 2 each worker on a CPU keeps its weights in a file, as they are in memory."""


class Drop(Struct, frozen=True):
    """What a worker gives up."""

    level: int
    keep: bool = False
    """As in Sleep."""


class Dropped(Struct, frozen=True):
    """What a worker has given up."""

    num_bytes: int
    is_kept: bool = False
    """The weights are in a file."""


class WakeUp(Struct, frozen=True):
    """An end of a sleep, or of a part of it."""

    tags: list[Tag] | None = None


class Staged(Struct, frozen=True):
    """A file of tensors for the next weights, in the format of safetensors."""

    path: str
    owned: bool = False
    """Nobody changes the file any more, so that it can stay mapped. It may be deleted."""


class SavedState(Struct, frozen=True):
    """A folder for the state of each rank's model."""

    path: str
    max_size: int | None = None
    """Bytes after which a rank begins another file; None: the format's own."""


class Call(Struct, frozen=True):
    """A call of a method of the workers' extension, with values as `values.packed` makes them."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


class CallResult(Struct, frozen=True):
    """Result of a call on one rank."""

    value: Any
    num_staged: int
    """Tensors of new weights that the method has given to its model."""


class Update(Struct, frozen=True):
    """New weights: the tensors that were staged, and the present ones for all others."""

    version: str | None = None
    """Version of the weights. None: one more than the present one, if that is a number."""
