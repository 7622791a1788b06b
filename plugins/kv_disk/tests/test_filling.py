"""Blocks of the system's page cache are read straight into the device's memory, and checked."""

from __future__ import annotations

import errno
import os
import random
from types import SimpleNamespace

import pytest
from toolkit_lm_kv_disk import checksums, filling, segments
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


# Checksums

XXH3 = checksums.make_xxh3()


def test_without_the_package_checksums_are_crcs(tmp_path, monkeypatch):
    """They are found with and without it."""
    with monkeypatch.context() as patch:
        patch.setattr(segments, "_CHECKSUMS", {1: checksums.crc32_of})
        log = SegmentLog(tmp_path, bytes(32), 2**26, {0: SIZE}, writes=True)
        assert log.append(key(1), content(1))
        assert log.index[key(1)].kind == 1
    again = SegmentLog(tmp_path, bytes(32), 2**26, {0: SIZE}, writes=False)
    place = again.index[key(1)]
    assert place.segment.read(place) == content(1)


def test_checksums_of_the_package_are_misses_without_it(tmp_path, monkeypatch, caplog):
    def xxh3_of(parts):
        return sum(map(sum, parts)) & 0xFFFF_FFFF

    with monkeypatch.context() as patch:
        patch.setattr(segments, "_CHECKSUMS", {1: checksums.crc32_of, 3: xxh3_of})
        log = SegmentLog(tmp_path, bytes(32), 2**26, {0: SIZE}, writes=True)
        assert log.append(key(1), content(1))
        assert log.index[key(1)].kind == 3
    monkeypatch.setattr(segments, "_CHECKSUMS", {1: checksums.crc32_of})
    again = SegmentLog(tmp_path, bytes(32), 2**26, {0: SIZE}, writes=True)
    assert not again.index
    assert "need the package xxhash" in caplog.text
    assert again.append(key(1), content(1))


@pytest.mark.parametrize("checksum", [checksums.crc32_of, XXH3], ids=["crc32", "xxh3"])
def test_a_checksum_is_of_all_parts_in_their_order(checksum):
    if checksum is None:
        pytest.skip("the package xxhash is not installed")
    data = content(1)
    whole = checksum([data])
    assert 0 <= whole < 2**32
    assert checksum([data[:9], b"", memoryview(data)[9:]]) == whole
    others = {checksum([data[9:], data[:9]]), checksum([data[:-1]]), checksum([data, b"\0"])}
    for bit in range(0, 8 * SIZE, 97):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        others.add(checksum([changed]))
    assert whole not in others
