"""What passes between an engine and its workers: msgspec structs in msgpack, one per ZeroMQ
message, never pickle."""

from __future__ import annotations

import hmac

import msgspec
import zmq
from msgspec import Struct
from toolkit_lm.config import ParallelConfig, VllmConfig
from toolkit_lm.executor import Failure
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import Fingerprint

KEY_BYTES = 32
"""Of the key of a launch, which each worker reads from its lifeline, and of the nonces."""

# Engine to worker


class Challenge(Struct, tag="challenge"):
    """The answer to Hello."""

    proof: bytes
    """Of the worker's nonce: the engine knows the key."""
    nonce: bytes


class Welcome(Struct, tag="welcome"):
    """To a node that has proven that it knows the key: which ranks are its own."""

    ranks: list[int]
    plans_port: int
    """Of the engine's machine: where the commands come from."""


class Farewell(Struct, tag="farewell"):
    """To a node: the engine ends."""

    reason: str
    """"" where nothing has failed."""


class Start(Struct, tag="start"):
    """The first call. A worker refuses it where its plugins are not the engine's."""

    config: VllmConfig
    """Resolved; each worker's own is `with_rank`."""
    fingerprint: Fingerprint


class Connect(Struct, tag="connect"):
    """Leave the groups, and make new ones, where nothing of a failed step waits."""

    folder: str
    """Where the ranks of one machine meet. Nobody needs it once all have answered."""
    store_port: int = 0
    """Of the engine's machine: where ranks of several machines meet."""
    key: bytes = b""
    """By which they sign what they put there."""


class Load(Struct, tag="load"):
    """Make the model, load the rank's shard of its weights, and profile it."""


class Describe(Struct, tag="describe"):
    """Say what was loaded."""


class InitKVCache(Struct, tag="init_kv_cache"):
    """Allocate the cache."""

    kv_caches: list[msgspec.Raw]
    """By rank, a KVCacheConfig: plugins may have added kinds of specs."""


class WarmUp(Struct, tag="warm_up"):
    """Run what the first request would otherwise wait for."""


class Step(Struct, tag="step"):
    """Run one step. The last stage's first rank alone answers, where nothing fails."""

    plan: StepPlan


# Both sides number the commands after Challenge, from 0 on: each goes to all workers. Welcome and
# Farewell are for nodes.
Command = (
    Challenge | Welcome | Farewell | Start | Connect | Load | Describe | InitKVCache | WarmUp | Step
)

# Worker to engine


class Hello(Struct, tag="hello"):
    """The first report."""

    rank: int
    nonce: bytes


class Proof(Struct, tag="proof"):
    """The answer to Challenge: the worker knows the key, too."""

    rank: int
    proof: bytes


class Description(Struct):
    """What a worker has loaded."""

    specs: dict[str, msgspec.Raw]
    """By layer, its KVCacheSpec: plugins may have added kinds."""
    backends: dict[str, str]
    parts: dict[str, msgspec.Raw]
    """By part, what its planner is to know."""
    step_memory: int
    """Bytes that the largest step takes."""
    free_memory: int
    free_host_memory: int


class Done(Struct, tag="done"):
    """A call is over."""

    rank: int
    call: int
    result: StepResult | None = None
    """Of a step."""
    description: Description | None = None


class Failed(Struct, tag="failed"):
    """A call has failed. Steps after it fail, too, until the ranks are connected anew."""

    rank: int
    call: int
    failure: Failure
    is_victim: bool
    """Another rank has failed before: it left this one alone."""


# Node to engine; what its workers report goes through it unread


class NodeHello(Struct, tag="node_hello"):
    """The first report of a node."""

    node: int
    nonce: bytes
    host: str
    pid: int
    versions: dict[str, str]
    """What must be equal on all nodes, beside the plugins, by name."""


class NodeProof(Struct, tag="node_proof"):
    """The answer to Challenge: the node knows the key, too."""

    proof: bytes


class NodeFailed(Struct, tag="node_failed"):
    """A node ends, with its workers."""

    message: str
    notes: list[str]


Report = Hello | Proof | Done | Failed | NodeHello | NodeProof | NodeFailed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def prove(key: bytes, who: str, rank: int, nonce: bytes) -> bytes:
    """What only those can say who know the key: HMAC-SHA256."""
    return hmac.digest(key, f"{who} {rank} ".encode() + nonce, "sha256")


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """One end. Sending never waits."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # The engine connects before its workers listen; milliseconds.
    socket.setsockopt(zmq.RECONNECT_IVL, 5)
    return socket


def answering_rank(parallel: ParallelConfig) -> int:
    """The first rank of the last pipeline stage: it tells what came of a step."""
    return parallel.num_ranks - parallel.tensor_parallel_size
