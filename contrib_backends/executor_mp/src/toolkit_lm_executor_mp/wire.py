"""Messages between an engine and its workers: msgspec structs in msgpack, one per ZeroMQ message,
never pickle."""

from __future__ import annotations

import hmac

import msgspec
import zmq
from msgspec import Struct
from toolkit_lm.config import ParallelConfig, VllmConfig
from toolkit_lm.executor import Failure, WorkerAnswer
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import Fingerprint

KEY_BYTES = 32
"""Bytes of a launch's key, which each worker reads from its lifeline, and of each nonce."""

# Engine to worker


class Challenge(Struct, tag="challenge"):
    """The engine's answer to Hello."""

    proof: bytes
    """Proof over the worker's nonce that the engine knows the key."""
    nonce: bytes


class Welcome(Struct, tag="welcome"):
    """Welcome of an authenticated node, with the ranks that it runs."""

    ranks: list[int]
    plans_port: int
    """Port of the engine's machine from which the node receives commands."""


class Farewell(Struct, tag="farewell"):
    """Notice to a node that the engine ends."""

    reason: str
    """Why the engine ends. "" if nothing has failed."""


class Start(Struct, tag="start"):
    """The first call. A worker refuses it if its plugins differ from the engine's."""

    config: VllmConfig
    """Resolved config of the engine. Each worker takes its own by `with_rank`."""
    fingerprint: Fingerprint


class Connect(Struct, tag="connect"):
    """Has the rank leave its groups and make new ones, so that nothing of a failed step is left in
    them."""

    folder: str
    """Folder where the ranks of one machine meet. It is of no use once all have answered."""
    store_port: int = 0
    """Port of the engine's machine where ranks of several machines meet."""
    key: bytes = b""
    """Key with which ranks sign their values in the store."""


class Load(Struct, tag="load"):
    """Has the rank make the model, load its shard of the weights, and profile it."""


class Describe(Struct, tag="describe"):
    """Has the rank describe what it has loaded."""


class InitKVCache(Struct, tag="init_kv_cache"):
    """Has the rank allocate its KV cache."""

    kv_caches: list[msgspec.Raw]
    """An encoded KVCacheConfig per rank. It is raw since plugins may have added kinds of specs."""


class WarmUp(Struct, tag="warm_up"):
    """Has the rank run in advance what the first request would otherwise wait for."""


class Step(Struct, tag="step"):
    """Has all ranks run one step. Only the last stage's first rank answers, unless a rank fails."""

    plan: StepPlan


class CallMethod(Struct, tag="call_method"):
    """Has the rank call a method of its parts or model. An error there fails no step."""

    method: str
    payload: msgspec.Raw


# Both sides number the commands after Challenge, from 0 on: each goes to all workers. Welcome and
# Farewell are for nodes.
Command = (
    Challenge
    | Welcome
    | Farewell
    | Start
    | Connect
    | Load
    | Describe
    | InitKVCache
    | WarmUp
    | Step
    | CallMethod
)

# Worker to engine


class Hello(Struct, tag="hello"):
    """A worker's first report."""

    rank: int
    nonce: bytes


class Proof(Struct, tag="proof"):
    """A worker's answer to Challenge, which proves that it knows the key."""

    rank: int
    proof: bytes


class Description(Struct):
    """A worker's description of its loaded model."""

    specs: dict[str, msgspec.Raw]
    """Encoded KVCacheSpec by layer name. It is raw since plugins may have added kinds."""
    backends: dict[str, str]
    parts: dict[str, msgspec.Raw]
    """Encoded facts by part, for the part's planner in the engine."""
    step_memory: int
    """Bytes that the largest step takes."""
    free_memory: int
    free_host_memory: int


class Done(Struct, tag="done"):
    """Report of a call that has succeeded."""

    rank: int
    call: int
    result: StepResult | None = None
    """Result of a step, else None."""
    description: Description | None = None
    answer: WorkerAnswer | None = None
    """Answer of the method that CallMethod called, else None."""


class Failed(Struct, tag="failed"):
    """Report of a call that has failed. Later steps fail too, until the ranks are reconnected."""

    rank: int
    call: int
    failure: Failure
    is_victim: bool
    """Whether the rank failed only because another rank had failed before and left its groups."""


# Node to engine; what its workers report goes through it unread


class NodeHello(Struct, tag="node_hello"):
    """A node's first report."""

    node: int
    nonce: bytes
    host: str
    pid: int
    versions: dict[str, str]
    """Versions by name that must be equal on all nodes, beside the plugins' own."""


class NodeProof(Struct, tag="node_proof"):
    """A node's answer to Challenge, which proves that it knows the key."""

    proof: bytes


class NodeFailed(Struct, tag="node_failed"):
    """Report that a node ends, with its workers."""

    message: str
    notes: list[str]


Report = Hello | Proof | Done | Failed | NodeHello | NodeProof | NodeFailed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def prove(key: bytes, who: str, rank: int, nonce: bytes) -> bytes:
    """Proof of the key: HMAC-SHA256 over the prover's role, the rank and the other side's nonce."""
    return hmac.digest(key, f"{who} {rank} ".encode() + nonce, "sha256")


def make_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """Makes a socket between processes of one machine. Sending never waits."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    # The engine connects before its workers listen; milliseconds.
    socket.setsockopt(zmq.RECONNECT_IVL, 5)
    return socket


def answering_rank(parallel: ParallelConfig) -> int:
    """The rank that returns a step's result: the first of the last pipeline stage."""
    return parallel.num_ranks - parallel.tensor_parallel_size
