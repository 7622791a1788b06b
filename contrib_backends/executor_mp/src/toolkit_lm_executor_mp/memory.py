"""Groups of ranks on one machine that exchange tensors over shared memory."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from toolkit_lm_executor_mp.socket_group import TIMEOUT, LostRankError, SocketGroup, together

try:
    from toolkit_lm_executor_mp import _memory as _memory
except ImportError:
    _is_compiled = False
else:
    _is_compiled = True

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes that the C extension adds, with their numbers in module.c."""
_LETTER = 4 << 20
"""Bytes of a message's place in shared memory. A larger message goes over a socket."""
_LETTERS = 4
"""Messages from one rank to another that may be on their way. A further one waits."""
_HEADER = 1024
"""Bytes at the start of a message, before its tensors. They hold the header's length and the
header."""
_LENGTH = 8
"""Bytes that hold the header's length. A length of 0: the tensors go over a socket."""
_MOST = 2**32 - 1
"""The largest value of a counter."""
_ALIGNED = 64
"""Alignment in bytes of the tensors in a message."""
_MOST_WRITERS = 8
"""Most ranks of a group that has places for messages."""
_decode = msgspec.msgpack.Decoder(dict[str, tuple[str, tuple[int, ...], int]]).decode


class MemoryGroup(SocketGroup):
    """A group that exchanges tensors over shared memory.

    Sums are in float32, in the order of ranks: all ranks get the same bits. Other dtypes, and
    messages of more than 4 MiB, go over sockets.
    """

    def __init__(self, group: SocketGroup, memory: mmap.mmap) -> None:
        """Takes over the sockets of `group`. `memory`: the result of `share_memory` on each of its
        ranks."""
        super().__init__(group.rank, group.size, group.peers)
        self._memory = memory
        self._bytes: Tensor | None = torch.frombuffer(memory, dtype=torch.uint8)
        self._place = (self._bytes.data_ptr(), self.rank, self.size, TIMEOUT)
        self._num_sent = [0] * self.size
        self._num_taken = [0] * self.size
        """Messages received so far, by the sender's rank."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        number = _TYPES.get(tensor.dtype)
        if number is None or (number == 2 and not _memory.HAS_FLOAT16):
            return super().all_reduce(tensor)
        self._check_open()
        tensor = tensor.contiguous()
        with together():
            _memory.all_reduce(self._place, number, tensor.data_ptr(), tensor.numel())
        return tensor

    def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
        self._check_open()
        tensor = tensor.contiguous()
        shape = list(tensor.shape)
        dim %= len(shape)
        inner = math.prod(shape[dim:]) * tensor.element_size()
        shape[dim] *= self.size
        out = tensor.new_empty(shape)
        with together():
            _memory.all_gather(self._place, tensor.data_ptr(), out.data_ptr(), tensor.nbytes, inner)
        return out

    def send(self, tensors: Mapping[str, Tensor], rank: int) -> None:
        """Returns before the tensors have arrived, unless four messages are on their way."""
        if self.size > _MOST_WRITERS:
            super().send(tensors, rank)
            return
        described = {}
        offset = _HEADER
        for name, tensor in tensors.items():
            described[name] = (str(tensor.dtype).removeprefix("torch."), tensor.shape, offset)
            offset += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        header = msgspec.msgpack.encode(described)
        is_apart = offset > _LETTER or len(header) > _HEADER - _LENGTH
        number, place, counters = self._letter(self.rank, rank, self._num_sent)
        with together():
            _memory.wait(self._place, counters + 1, (number - _LETTERS) & _MOST, rank)
            if is_apart:
                header = b""
            else:
                for tensor, (_, _, start) in zip(tensors.values(), described.values(), strict=True):
                    self._read(place + start, tensor.dtype, tensor.shape).copy_(tensor)
            self._memory[place : place + _LENGTH + len(header)] = (
                len(header).to_bytes(_LENGTH, "little") + header
            )
            _memory.post(self._place, counters)
        if is_apart:
            super().send(tensors, rank)

    def recv(self, rank: int) -> dict[str, Tensor]:
        if self.size > _MOST_WRITERS:
            return super().recv(rank)
        number, place, counters = self._letter(rank, self.rank, self._num_taken)
        with together():
            _memory.wait(self._place, counters, number & _MOST, rank)
            length = int.from_bytes(self._memory[place : place + _LENGTH], "little")
            header = self._memory[place + _LENGTH : place + _LENGTH + length]
            described = _decode(header) if length else {}
            # The receiver copies what has arrived: the place is free for the next message.
            tensors = {
                name: self._read(place + start, getattr(torch, dtype), shape).clone()
                for name, (dtype, shape, start) in described.items()
            }
            _memory.post(self._place, counters + 1)
        return tensors if length else super().recv(rank)

    def _letter(self, sender: int, receiver: int, numbers: list[int]) -> tuple[int, int, int]:
        """The next message's number, its place, and the index of its first counter.

        The first counter counts the messages that were sent, the next one those received.
        """
        self._check_open()
        other = receiver if sender == self.rank else sender
        pair = sender * self.size + receiver
        place = (
            _memory.COUNTERS
            + 2 * self.size * _memory.BUFFER
            + (pair * _LETTERS + numbers[other] % _LETTERS) * _LETTER
        )
        numbers[other] += 1
        return numbers[other], place, 2 * pair

    def _read(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        assert self._bytes is not None, "the group is open"
        return (
            self._bytes[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        )

    def _check_open(self) -> None:
        if self._bytes is None:
            raise LostRankError("the group has been left")

    def close(self) -> None:
        if self._bytes is not None:
            _memory.leave(self._place)
            self._bytes = None
        super().close()


def share_memory(group: SocketGroup) -> mmap.mmap | None:
    """Maps memory that all ranks of the group share. Returns None on all ranks if one cannot.

    The memory has no name, so only the ranks reach it. It ends with them, whatever ends them.
    """
    size = group.size
    if not _agree(
        group, _is_compiled and size <= _memory.MOST_RANKS and hasattr(os, "memfd_create")
    ):
        return None
    letters = size * size * _LETTERS * _LETTER if size <= _MOST_WRITERS else 0
    length = _memory.COUNTERS + 2 * size * _memory.BUFFER + letters
    descriptor = _make_file(length) if group.rank == 0 else group.receive_file(0)
    memory = None
    try:
        if group.rank == 0:
            group.share_file(descriptor)
        if descriptor >= 0:
            memory = mmap.mmap(descriptor, length)
    except (OSError, ValueError):
        # No room for it here: then all send it over sockets.
        pass
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return memory if _agree(group, memory is not None) else None


def _make_file(length: int) -> int:
    """Makes a memfd of `length` bytes. Returns its descriptor, or -1 if the kernel makes none."""
    try:
        descriptor = os.memfd_create("toolkit_lm-ranks")
        # Nobody has memory for pages that nobody writes.
        os.ftruncate(descriptor, length)
    except OSError:
        return -1
    return descriptor


def _agree(group: SocketGroup, is_so: bool) -> bool:
    """Whether `is_so` holds on all ranks. Waits for them."""
    return bool(group.all_gather(torch.tensor([is_so]), 0).all())
