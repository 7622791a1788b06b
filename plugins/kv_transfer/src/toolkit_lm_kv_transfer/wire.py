"""Messages between peers: msgpack of declared types in ZeroMQ frames, encrypted and authenticated
by CURVE. Needs no torch.

A peer asks which of some blocks are there or will be, then for those. Each is sent as soon as it is
there: its bytes are a second frame, or lie in memory that both share.
"""

from __future__ import annotations

import hmac
from enum import IntEnum
from typing import Annotated, Any

import zmq
import zmq.utils.z85
from msgspec import Meta, Struct, msgpack

MOST_KEYS = 512
"""Most blocks of a message."""
HEAD_BYTES = 64 * MOST_KEYS
"""Most bytes of a frame that holds no block."""
_BEAT = 1000
"""Milliseconds between two heartbeats of a connection."""
_CURVE = 64
"""More bytes than encryption adds to a frame: 33. The bound of a frame counts them."""

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Key = tuple[int, Digest]
"""KV group and digest of a block."""


class State(IntEnum):
    """Whether a server has a block."""

    ABSENT = 0
    HELD = 1
    COMING = 2
    """A request that computes it is waiting or running."""


class ArenaName(Struct, frozen=True, array_like=True):
    """Memory that processes of one machine can share: see `arena`."""

    pid: Annotated[int, Meta(gt=0)]
    """The process that has it open."""
    file: Annotated[int, Meta(ge=0)]
    """Number of the file in that process."""
    token: Digest
    """Its first bytes."""


class Ask(Struct, frozen=True, array_like=True, tag=True):
    """Asks which blocks are there. Without keys: whether the peer is."""

    number: int
    identity: Digest
    """Identity of the asking engine's keys and values."""
    keys: Annotated[list[Key], Meta(max_length=MOST_KEYS)]
    shares: bool = False
    """The asking process has opened the arena."""


class Get(Struct, frozen=True, array_like=True, tag=True):
    """Asks for blocks that are held or coming."""

    number: int
    identity: Digest
    keys: Annotated[list[Key], Meta(max_length=MOST_KEYS)]
    shares: bool = False
    """The blocks may stay in the arena."""


class Done(Struct, frozen=True, array_like=True, tag=True):
    """Gives back places of the arena."""

    loans: Annotated[list[int], Meta(max_length=MOST_KEYS)]


class Has(Struct, frozen=True, array_like=True, tag=True):
    """Answer of `Ask`."""

    number: int
    is_kin: bool
    """The identities are the same."""
    states: Annotated[list[State], Meta(max_length=MOST_KEYS)]
    """State of each block, in the order of the keys."""
    arena: ArenaName | None = None
    """Memory that blocks may be read from."""


class Block(Struct, frozen=True, array_like=True, tag=True):
    """A block of `Get`; its bytes are the next frame."""

    group: int
    digest: Digest
    is_there: bool
    checksum: int
    """CRC-32 of the bytes."""
    place: Annotated[int, Meta(ge=-1)] = -1
    """Offset of the bytes in the arena, and the next frame is empty. -1: they are that frame."""
    loan: int = 0
    """Number by which the place is given back."""


Question = Ask | Get | Done
Answer = Has | Block

encode = msgpack.Encoder().encode
decode_question = msgpack.Decoder(Question).decode
decode_answer = msgpack.Decoder(Answer).decode


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, secret: bytes, most: int, *, serves: bool
) -> zmq.Socket[bytes]:
    """A socket of a peer. Only holders of the secret can connect. `most`: most bytes of a frame
    that it takes.

    The server's key pair is derived from the secret. Neither crosses the network.
    """
    made = context.socket(kind)
    options: dict[int, Any] = {
        zmq.IPV6: 1,
        zmq.LINGER: 0,
        zmq.SNDHWM: 0,
        zmq.RCVHWM: 0,
        zmq.MAXMSGSIZE: most + _CURVE,
        zmq.HEARTBEAT_IVL: _BEAT,
        zmq.HEARTBEAT_TIMEOUT: 5 * _BEAT,
        zmq.HEARTBEAT_TTL: 5 * _BEAT,
    }
    private = zmq.utils.z85.encode(hmac.digest(secret, b"toolkit_lm kv_transfer", "sha256"))
    if serves:
        options |= {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: private}
    else:
        public, own = zmq.curve_keypair()
        options |= {
            zmq.CURVE_SERVERKEY: zmq.curve_public(private),
            zmq.CURVE_PUBLICKEY: public,
            zmq.CURVE_SECRETKEY: own,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 1000,
        }
    for option, value in options.items():
        made.setsockopt(option, value)
    return made
