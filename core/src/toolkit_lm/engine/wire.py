"""Messages between a front and its engine process: msgspec structs in msgpack, one per ZeroMQ
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
    """The first command. The engine process refuses it if its plugins differ from the front's."""

    config: VllmConfig
    """Config, resolved except for the device."""
    fingerprint: Fingerprint
    """Fingerprint of the front's installed plugins."""
    listening: bool
    """The front wants the events."""


class Shared(Struct):
    """Values that all requests of one call share. They may be far larger than the rest of the
    requests."""

    params: SamplingParams
    inputs: SequenceInputs


class Add(Struct, tag="add"):
    """Queues requests."""

    requests: list[EngineRequest]
    shared: Shared | None = None
    """Values that all requests share, in place of their own."""
    evicted: list[str] = []
    """Multimodal items whose data the engine forgets after it has received the requests."""


class Finish(Struct, tag="finish"):
    """Ends a request, or one of its sequences."""

    request_id: str
    reason: FinishReason
    index: int | None


class ResetPrefixCache(Struct, tag="reset_prefix_cache"):
    """Forgets all cached prefixes that no running request uses."""


class Call(Struct, tag="call"):
    """Call a method of every worker, between two steps."""

    number: int
    method: str
    payload: msgspec.Raw


Command = Start | Add | Finish | ResetPrefixCache | Call

# Engine to front


class Phase(Struct, tag="phase"):
    """Progress of the engine's start."""

    name: str
    """Name of the phase, such as "loading the model"."""


class Ready(Struct, tag="ready"):
    """The model is loaded and warmed up."""

    config: VllmConfig
    """The fully resolved config."""
    kv_cache: msgspec.Raw
    """A KVCacheConfig, in msgpack: plugins may have added kinds of specs."""
    pooling: dict[PoolingTask, PoolingRules]
    whole_items: bool


class Outputs(Struct, tag="outputs"):
    """Outputs of a step, or the answer to commands. Every step sends one, if only as a sign of
    life."""

    outputs: EngineOutputs
    num_handled: int
    """Number of commands that the engine had handled before. Outputs of a request may be older than
    a later command of the front."""


class Failed(Struct, tag="failed"):
    """The last report: the error that ends the engine process."""

    kind: str
    """Name of the nearest class of errors.py; empty if there is none."""
    message: str
    traceback: str


class Called(Struct, tag="called"):
    """The answer to a Call."""

    number: int
    values: list[msgspec.Raw]
    failed: Failed | None = None
    """Error of the call. The engine continues."""


Report = Phase | Ready | Outputs | Called | Failed

_NOTHING = Shared(SamplingParams(), SequenceInputs())


def add(requests: Sequence[EngineRequest], evicted: Sequence[str] = ()) -> Add:
    """Makes the command for these requests. Values that they share are sent once, and shared again
    after decoding."""
    if len({(id(request.params), id(request.inputs)) for request in requests}) != 1:
        return Add(list(requests), evicted=list(evicted))
    bare = [
        replace(request, params=_NOTHING.params, inputs=_NOTHING.inputs) for request in requests
    ]
    return Add(bare, Shared(requests[0].params, requests[0].inputs), list(evicted))


def added(command: Add) -> list[EngineRequest]:
    """Returns the requests of a decoded command."""
    if command.shared is not None:
        for request in command.requests:
            request.params = command.shared.params
            request.inputs = command.shared.inputs
    return command.requests


encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def make_socket(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Makes one end of the only connection. Sending never waits."""
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # The front connects before the engine listens; milliseconds.
    socket.setsockopt(zmq.RECONNECT_IVL, 5)
    return socket
