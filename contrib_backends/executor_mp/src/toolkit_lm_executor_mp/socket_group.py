"""Groups of ranks on one machine, over Unix sockets.

No other user reaches them, and nothing listens once they are connected.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from toolkit_lm.distributed import Group
from torch import Tensor

TIMEOUT = 600.0
"""Seconds that a rank waits for another one in a collective. A pipeline stage waits that long for
the stage before it."""
_RANK = struct.Struct("<i")
"""The first message on a connection: the sender's index in the group."""
_CREDENTIALS = struct.Struct("iII")
"""Linux's ucred: the process, user and group at the other end. User numbers go up to 2**32 - 2."""
_LENGTH = struct.Struct("<q")
"""Format of the header's length, which comes before the header."""
_LOOK = 0.005
"""Seconds between two tries to reach a rank that does not listen yet."""
_MOST_VIEWS = 64
"""Most pieces that one sendmsg call takes."""
_decode = msgspec.msgpack.Decoder(dict[str, tuple[str, tuple[int, ...]]]).decode


class LostRankError(RuntimeError):
    """Another rank of the group has failed, has died, or does not come."""


@contextmanager
def together() -> Iterator[None]:
    """Turns errors of collectives into LostRankError: they fail because another rank has left."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        if isinstance(error, LostRankError):
            raise
        raise LostRankError(f"another rank has left the group: {error}") from error


class SocketGroup(Group):
    """A Unix stream socket to each other rank. Calls raise LostRankError once a rank has closed its
    sockets.

    Sums are in float32, or in the tensor's dtype if that is wider. They are in the order of ranks,
    so all ranks get the same bits.
    """

    def __init__(self, rank: int, size: int, peers: Mapping[int, socket.socket]) -> None:
        """Takes over `peers`: connected sockets by the other rank's index in the group."""
        self.rank = rank
        self.size = size
        self.peers = dict(peers)
        """Connected sockets by the other rank's index in the group. Empty once the group was
        left."""
        for peer in self.peers.values():
            peer.setblocking(False)
        self._sender = ThreadPoolExecutor(1, "toolkit_lm-sender")
        """Sends the messages that the kernel has no room for at once. Its thread starts with the
        first one."""
        self._sent: Future[None] | None = None
        """The message that is being sent, if any."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums over the ranks. Each rank adds one part, and sends the sum to the others."""
        tensor = tensor.contiguous()
        flat = tensor.view(-1)
        bounds = [flat.numel() * rank // self.size for rank in range(self.size + 1)]
        parts = [flat[start:end] for start, end in pairwise(bounds)]
        mine = parts[self.rank]
        addends = {rank: torch.empty_like(mine) for rank in self.peers}
        self._swap({rank: parts[rank] for rank in self.peers}, addends)
        addends[self.rank] = mine
        is_narrow = tensor.dtype in (torch.bfloat16, torch.float16)
        total = addends[0].to(torch.float32 if is_narrow else tensor.dtype, copy=True)
        for rank in range(1, self.size):
            total += addends[rank]
        mine.copy_(total)
        self._swap(dict.fromkeys(self.peers, mine), {rank: parts[rank] for rank in self.peers})
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        tensor = tensor.contiguous()
        pieces = [torch.empty_like(tensor) for _ in range(self.size)]
        pieces[self.rank] = tensor
        self._swap(dict.fromkeys(self.peers, tensor), {rank: pieces[rank] for rank in self.peers})
        return torch.cat(pieces, dim)

    def send(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Returns before the tensors have arrived, so that a stage can begin its next step."""
        described = {
            name: (str(tensor.dtype).removeprefix("torch."), tensor.shape)
            for name, tensor in tensors.items()
        }
        header = msgspec.msgpack.encode(described)
        views = [memoryview(_LENGTH.pack(len(header)) + header), *map(_bytes_of, tensors.values())]
        self.flush()
        with together():
            left = self._push(rank, [view for view in views if len(view)])
            if left:
                self._sent = self._sender.submit(self._move, {rank: left}, {})

    def flush(self) -> None:
        """Waits until all messages are sent and their tensors may be freed."""
        sent, self._sent = self._sent, None
        if sent is not None:
            with together():
                sent.result()

    def recv(self, rank: int) -> dict[str, Tensor]:
        with together():
            (length,) = _LENGTH.unpack(self._receive(rank, _LENGTH.size))
            described = _decode(self._receive(rank, length))
            found = {
                name: torch.empty(shape, dtype=getattr(torch, dtype))
                for name, (dtype, shape) in described.items()
            }
            for tensor in found.values():
                self._move({}, {rank: _bytes_of(tensor)})
            return found

    def share_file(self, descriptor: int) -> None:
        """Shares an open file with the other ranks. `descriptor`: -1 tells them that there is
        none."""
        self.flush()
        with together():
            for peer in self.peers.values():
                socket.send_fds(peer, [b"\0"], [] if descriptor < 0 else [descriptor])

    def receive_file(self, rank: int) -> int:
        """Receives the descriptor of the file that `rank` shares. -1: there is none."""
        with together():
            self._wait([rank], [], time.monotonic() + TIMEOUT)
            word, descriptors, *_ = socket.recv_fds(self._peer(rank), 1, 1)
            if not word:
                raise LostRankError(_gone(rank))
            return descriptors[0] if descriptors else -1

    def close(self) -> None:
        """Leaves the group. The other ranks' calls then fail."""
        peers, self.peers = self.peers, {}
        for peer in peers.values():
            # Wakes who waits for it, here as well.
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        self._sender.shutdown(wait=True)
        for peer in peers.values():
            peer.close()

    def _peer(self, rank: int) -> socket.socket:
        if rank not in self.peers:
            raise LostRankError("the group has been left")
        return self.peers[rank]

    def _receive(self, rank: int, length: int) -> bytearray:
        taken = bytearray(length)
        self._move({}, {rank: memoryview(taken)})
        return taken

    def _swap(self, out: Mapping[int, Tensor], into: Mapping[int, Tensor]) -> None:
        """Sends and receives at the same time, so that no two ranks wait for each other. All
        tensors are contiguous."""
        if not self.peers:
            raise LostRankError("the group has been left")
        self.flush()
        with together():
            views = {rank: [_bytes_of(tensor)] for rank, tensor in out.items() if tensor.numel()}
            self._move(
                views, {rank: _bytes_of(tensor) for rank, tensor in into.items() if tensor.numel()}
            )

    def _move(self, out: dict[int, list[memoryview]], into: dict[int, memoryview]) -> None:
        """Sends all of `out` and fills all of `into`. Both are used up."""
        end = time.monotonic() + TIMEOUT
        into = {rank: view for rank, view in into.items() if len(view)}
        while True:
            out = {rank: views for rank, views in out.items() if self._push(rank, views)}
            into = {
                rank: rest for rank, view in into.items() if len(rest := self._pull(rank, view))
            }
            if not out and not into:
                return
            self._wait(into, out, end)

    def _push(self, rank: int, views: list[memoryview]) -> list[memoryview]:
        """Sends what the kernel takes. Returns `views` without it."""
        try:
            while views:
                sent = self._peer(rank).sendmsg(views[:_MOST_VIEWS])
                while views and sent >= len(views[0]):
                    sent -= len(views.pop(0))
                if sent:
                    views[0] = views[0][sent:]
        except BlockingIOError:
            pass
        return views

    def _pull(self, rank: int, view: memoryview) -> memoryview:
        """Receives what has come. Returns the part of `view` that is still to be filled."""
        try:
            while len(view):
                received = self._peer(rank).recv_into(view)
                if not received:
                    raise LostRankError(_gone(rank))
                view = view[received:]
        except BlockingIOError:
            pass
        return view

    def _wait(self, readers: Iterable[int], writers: Iterable[int], end: float) -> None:
        """Waits until one of the ranks is ready. Raises LostRankError at `end`."""
        poll = select.poll()
        events = dict.fromkeys(readers, select.POLLIN)
        for rank in writers:
            events[rank] = events.get(rank, 0) | select.POLLOUT
        for rank, wanted in events.items():
            poll.register(self._peer(rank), wanted)
        if not poll.poll(1000 * max(0.0, end - time.monotonic())):
            raise LostRankError(
                f"rank {', '.join(map(str, events))} of the group did not come in time"
            )


def _gone(rank: int) -> str:
    return f"rank {rank} of the group has gone"


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, or of a contiguous copy if it is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return memoryview(b"")
    memory: Any = flat.view(torch.uint8).numpy()
    return memoryview(memory)


# How they meet


def meet_in(folder: Path, name: str, rank: int, size: int) -> SocketGroup:
    """Connects the ranks that call this with the same `folder` and `name`. Raises LostRankError.

    The folder is made if it does not exist, for this user alone. Nothing of the group is left in
    it.
    """
    with together():
        folder.mkdir(mode=0o700, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        # A path of any length is a short one there.
        short = f"/proc/self/fd/{handle}" if sys.platform == "linux" else str(folder)
        try:
            with closing(_listen(f"{short}/{name}-{rank}", size)) as listener:
                found = _meet(listener, rank, size, lambda other: f"{short}/{name}-{other}")
                os.unlink(folder / f"{name}-{rank}")
        finally:
            os.close(handle)
    return SocketGroup(rank, size, found)


def meet_by(store: Any, rank: int, size: int) -> SocketGroup:
    """Connects the ranks of one machine that share `store`, of torch.distributed. Linux only.
    Raises LostRankError.

    The ranks' sockets have abstract addresses instead of files. Connections of other users'
    processes are closed: the kernel tells their user.
    """
    with together(), closing(_listen("", size)) as listener:
        store.set(f"near {rank}", listener.getsockname())
        found = _meet(listener, rank, size, lambda other: store.get(f"near {other}"))
    return SocketGroup(rank, size, found)


def _listen(address: str, size: int) -> socket.socket:
    """Makes a listening Unix socket. `address`: "" is a free one that the kernel chooses."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address)
        listener.listen(size)
    except BaseException:
        listener.close()
        raise
    return listener


def _meet(
    listener: socket.socket, rank: int, size: int, address: Callable[[int], str | bytes]
) -> dict[int, socket.socket]:
    """Connects to the lower ranks, and accepts the higher ones. Returns sockets by rank."""
    end = time.monotonic() + TIMEOUT
    found = {}
    try:
        for other in range(rank):
            found[other] = _reach(address(other), rank, end)
        while len(found) < size - 1:
            listener.settimeout(max(0.0, end - time.monotonic()))
            peer = listener.accept()[0]
            peer.settimeout(max(0.0, end - time.monotonic()))
            try:
                other = _rank_of(peer) if _is_ours(peer) else -1
            except BaseException:
                peer.close()
                raise
            if not rank < other < size or other in found:
                peer.close()
                continue
            found[other] = peer
    except BaseException:
        for peer in found.values():
            peer.close()
        raise
    return found


def _rank_of(peer: socket.socket) -> int:
    """Receives the rank that the peer sends first."""
    received = peer.recv(_RANK.size, socket.MSG_WAITALL)
    if len(received) < _RANK.size:
        raise LostRankError("a rank has gone before it said which one it is")
    number: int = _RANK.unpack(received)[0]
    return number


def _reach(address: str | bytes, rank: int, end: float) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.settimeout(max(0.0, end - time.monotonic()))
        while True:
            try:
                peer.connect(address)
                break
            except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
                if time.monotonic() >= end:
                    raise
                time.sleep(_LOOK)
        if not _is_ours(peer):
            raise LostRankError("another user listens in a rank's place")
        peer.sendall(_RANK.pack(rank))
    except BaseException:
        peer.close()
        raise
    return peer


def _is_ours(peer: socket.socket) -> bool:
    """Whether the process at the other end is this user's. Always true where the kernel does not
    tell: there the folder keeps others away."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = _CREDENTIALS.unpack(
        peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(user == os.geteuid())
