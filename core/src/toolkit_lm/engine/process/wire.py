"""What passes between a front and its engine process: msgspec structs in msgpack, one per ZeroMQ
message, never pickle."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import zmq
from msgspec import Struct
from msgspec.structs import replace

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.messages import EngineOutputs, EngineRequest, PoolingRules, SequenceInputs
from toolkit_lm.params import FinishReason, SamplingParams
from toolkit_lm.plugin import Fingerprint

# Front to engine


class Start(Struct, tag="start"):
    """The first command. The engine process refuses it where its plugins are not the front's."""

    config: VllmConfig
    """Resolved, but for the device."""
    fingerprint: Fingerprint
    """Of the front's installed plugins."""
    listening: bool
    """Somebody wants the events."""


class Shared(Struct):
    """What requests of one call may have in common. It may be far larger than the rest of them."""

    params: SamplingParams
    inputs: SequenceInputs


class Add(Struct, tag="add"):
    """Queue requests."""

    requests: list[EngineRequest]
    shared: Shared | None = None
    """What all of them have, in place of their own."""
    evicted: list[str] = []
    """Items of media whose data the engine forgets after it has taken these in."""


class Finish(Struct, tag="finish"):
    """End a request, or one of its sequences."""

    request_id: str
    reason: FinishReason
    index: int | None


class ResetPrefixCache(Struct, tag="reset_prefix_cache"):
    """Forget all cached prefixes that no running request uses."""


Command = Start | Add | Finish | ResetPrefixCache

# Engine to front


class Phase(Struct, tag="phase"):
    """How far the start has come."""

    name: str
    """Such as "loading the model"."""


class Ready(Struct, tag="ready"):
    """The model is loaded and warm."""

    config: VllmConfig
    """With nothing left open."""
    kv_cache: msgspec.Raw
    """A KVCacheConfig, in msgpack: plugins may have added kinds of specs."""
    pooling: dict[PoolingTask, PoolingRules]
    whole_items: bool


class Outputs(Struct, tag="outputs"):
    """What a step gave, or the answer to commands. Every step sends one, if only as a sign of
    life."""

    outputs: EngineOutputs
    num_handled: int
    """Commands that the engine had taken in before: what it says of a request may be older than
    what the front asked since."""


class Failed(Struct, tag="failed"):
    """The last report: why the engine process ends."""

    kind: str
    """The nearest class of errors.py, by name; empty where there is none."""
    message: str
    traceback: str


Report = Phase | Ready | Outputs | Failed

_NOTHING = Shared(SamplingParams(), SequenceInputs())


def add(requests: Sequence[EngineRequest], evicted: Sequence[str] = ()) -> Add:
    """The command whose decoded requests share what these share."""
    if len({(id(one.params), id(one.inputs)) for one in requests}) != 1:
        return Add(list(requests), evicted=list(evicted))
    bare = [replace(one, params=_NOTHING.params, inputs=_NOTHING.inputs) for one in requests]
    return Add(bare, Shared(requests[0].params, requests[0].inputs), list(evicted))


def added(command: Add) -> list[EngineRequest]:
    """The requests of a decoded command."""
    if command.shared is not None:
        for one in command.requests:
            one.params = command.shared.params
            one.inputs = command.shared.inputs
    return command.requests


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def make_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """One end of the only connection there is. Sending never waits."""
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # The front connects before the engine listens; milliseconds.
    socket.setsockopt(zmq.RECONNECT_IVL, 5)
    return socket
