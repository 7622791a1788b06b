"""Blocks of the system's page cache are read straight into the device's memory, and checked."""

from __future__ import annotations

import errno
import os
import random
from types import SimpleNamespace

import pytest
from toolkit_lm_kv_disk import filling, segments
from toolkit_lm_kv_disk.filling import Filler, Target
from toolkit_lm_kv_disk.log import SegmentLog

PAGES = [700, 800, 1500]
SIZE = sum(PAGES)
NUM_BLOCKS = 24
RWF_NOWAIT = os.RWF_NOWAIT


def key(number: int) -> tuple[int, bytes]:
    return 0, number.to_bytes(32, "big")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


@pytest.fixture
def log(tmp_path):
    found = SegmentLog(tmp_path, bytes(32), 2**26, {0: SIZE}, writes=True)
    for number in range(NUM_BLOCKS):
        assert found.append(key(number), content(number))
    return found


@pytest.fixture(params=["one thread", "two threads"])
def filler(request, monkeypatch):
    if request.param == "two threads":
        monkeypatch.setattr(filling, "_ALONE", 2 * SIZE)
    made = Filler()
    yield made
    made.close()


def block(sizes=PAGES):
    return SimpleNamespace(memory=[bytearray(size) for size in sizes])


def targets(log, numbers=range(NUM_BLOCKS)):
    return [Target(log.index[key(number)], block()) for number in numbers]


def found(target) -> bytes:
    return b"".join(target.block.memory)


@pytest.mark.parametrize("count", [0, 1, 2, 3, NUM_BLOCKS])
def test_blocks_fill_their_pages(log, filler, count):
    numbers = random.Random(count).sample(range(NUM_BLOCKS), count)
    given = targets(log, numbers)
    assert filler.fill(given) == count
    assert [found(target) for target in given] == [content(number) for number in numbers]


@pytest.mark.parametrize("damaged", [{0}, {5}, {12}, {23}, {5, 20}, {13, 20}])
@pytest.mark.parametrize("how", ["damaged", "cut"])
def test_blocks_before_the_first_wrong_one_count(log, filler, damaged, how):
    place = log.index[key(min(damaged))]
    path = place.segment.path
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: place.offset + SIZE - 1]
    for number in damaged if how == "damaged" else ():
        data[log.index[key(number)].offset + 17] ^= 1
    path.write_bytes(data)
    given = targets(log)
    assert filler.fill(given) == min(damaged)
    for number, target in enumerate(given[: min(damaged)]):
        assert found(target) == content(number)


@pytest.mark.parametrize("first", [0, 7, 12, 19])
@pytest.mark.parametrize("answer", ["nothing", "a part", "unsupported"])
def test_what_the_page_cache_lacks_is_left_out(log, filler, first, answer, monkeypatch):
    read = os.preadv
    offset = log.index[key(first)].offset

    def preadv(fd, buffers, at, flags=0):
        assert flags == RWF_NOWAIT, "a step must not wait for the disk"
        if at == offset and answer == "a part":
            return read(fd, buffers[:1], at, flags)
        if at == offset:
            raise OSError(errno.EAGAIN if answer == "nothing" else errno.EOPNOTSUPP, answer)
        return read(fd, buffers, at, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    assert filler.fill(targets(log)) == first


def test_memory_of_another_size_is_not_filled(log, filler):
    """Such as none at all: that of a GPU."""
    [target] = targets(log, [3])
    for sizes in ([], PAGES[:2], [*PAGES, 1]):
        assert filler.fill([target._replace(block=block(sizes))]) == 0


def test_a_checksum_is_of_all_parts_in_their_order():
    data = content(1)
    whole = segments.checksum_of([data])
    assert 0 <= whole < 2**32
    assert segments.checksum_of([data[:9], b"", memoryview(data)[9:]]) == whole
    others = {
        segments.checksum_of([data[9:], data[:9]]),
        segments.checksum_of([data[:-1]]),
        segments.checksum_of([data, b"\0"]),
    }
    for bit in range(0, 8 * SIZE, 97):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        others.add(segments.checksum_of([changed]))
    assert whole not in others
