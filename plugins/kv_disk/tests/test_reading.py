"""Blocks are read whole, whatever lies beside them, and memory is used again only once nobody has
its bytes."""

from __future__ import annotations

import gc
import random
from concurrent.futures import CancelledError

import pytest
from toolkit_lm_kv_disk import reading
from toolkit_lm_kv_disk.log import SegmentLog
from toolkit_lm_kv_disk.reading import BlockReader
from toolkit_lm_kv_disk.segments import DamageError

PATIENCE = 60
SIZE = 3000
NUM_BLOCKS = 40


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


@pytest.fixture
def reader(monkeypatch):
    """A reader whose memory holds four blocks, and that keeps memory for sixteen."""
    monkeypatch.setattr(reading, "_RUN", 4 * (SIZE + 100))
    monkeypatch.setattr(reading, "_MOST_SPARE", 16 * (SIZE + 100))
    monkeypatch.setattr(reading, "_READY", 8 * (SIZE + 100))
    made = BlockReader(lambda name, data: data, SIZE)
    yield made
    made.close()


def ask(reader, log, numbers):
    return [reader.read(key(number), log.index[key(number)]) for number in numbers]


@pytest.mark.parametrize("order", ["as written", "backwards", "drawn"])
def test_blocks_in_any_order(reader, log, order):
    numbers = [*range(NUM_BLOCKS)]
    if order == "backwards":
        numbers.reverse()
    elif order == "drawn":
        numbers = random.Random(1).choices(numbers, k=200)
    for number, future in zip(numbers, ask(reader, log, numbers), strict=True):
        assert future.result(PATIENCE) == content(number)


def test_blocks_of_several_files(reader, tmp_path):
    log = SegmentLog(tmp_path, bytes(32), 16 * 5 * SIZE, {0: SIZE}, writes=True)
    for number in range(NUM_BLOCKS):
        assert log.append(key(number), content(number))
    assert len({log.index[key(number)].segment for number in range(NUM_BLOCKS)}) > 4
    for number, future in enumerate(ask(reader, log, range(NUM_BLOCKS))):
        assert future.result(PATIENCE) == content(number)


def test_memory_in_use_is_not_read_into(reader, log):
    kept = [(n, f.result(PATIENCE)) for n, f in enumerate(ask(reader, log, range(NUM_BLOCKS)))]
    for _ in range(20):
        for future in ask(reader, log, reversed(range(NUM_BLOCKS))):
            future.result(PATIENCE)
    assert all(data == content(number) for number, data in kept)


def test_memory_comes_back(reader, log):
    """Many times what the reader keeps is read while one block is in use."""
    [held] = ask(reader, log, [7])
    for _ in range(100):
        for number, future in enumerate(ask(reader, log, range(NUM_BLOCKS))):
            assert future.result(PATIENCE) == content(number)
    del future
    reader.close()
    gc.collect()
    assert held.result() == content(7)
    assert reader._num_rooms <= 4
    assert len(reader._spare) == reader._num_rooms - 1
    del held
    assert len(reader._spare) == reader._num_rooms


def test_a_damaged_block_is_missed_alone(reader, log):
    place = log.index[key(5)]
    data = bytearray(place.segment.path.read_bytes())
    data[place.offset + 17] ^= 1
    place.segment.path.write_bytes(data)
    for number, future in enumerate(ask(reader, log, range(NUM_BLOCKS))):
        if number == 5:
            with pytest.raises(DamageError, match="damaged"):
                future.result(PATIENCE)
        else:
            assert future.result(PATIENCE) == content(number)


@pytest.mark.parametrize("into", [0, 1, SIZE - 1, -20])
def test_what_a_cut_file_still_has_is_read(reader, log, into):
    """`into`: bytes of the block 6 that are left, or before it."""
    place = log.index[key(6)]
    data = place.segment.path.read_bytes()
    place.segment.path.write_bytes(data[: place.offset + into])
    for number, future in enumerate(ask(reader, log, range(NUM_BLOCKS))):
        if number < 6:
            assert future.result(PATIENCE) == content(number)
        else:
            with pytest.raises(DamageError, match="cut"):
                future.result(PATIENCE)


def test_a_block_that_cannot_be_opened_is_missed_alone(log):
    def open_(name, data):
        if name == key(3):
            raise ValueError("of another key")
        return bytes(data).upper()

    reader = BlockReader(open_, SIZE)
    for number, future in enumerate(ask(reader, log, range(NUM_BLOCKS))):
        if number == 3:
            with pytest.raises(ValueError, match="another key"):
                future.result(PATIENCE)
        else:
            assert future.result(PATIENCE) == content(number).upper()
    reader.close()


@pytest.mark.parametrize("most", [SIZE // 2, 2 * SIZE])
def test_a_block_greater_than_a_run(monkeypatch, tmp_path, most):
    """With memory of its own, or that is used again."""
    monkeypatch.setattr(reading, "_RUN", SIZE // 2)
    monkeypatch.setattr(reading, "_MOST_ROOM", most)
    log = SegmentLog(tmp_path, bytes(32), 2**26, {0: SIZE}, writes=True)
    reader = BlockReader(lambda name, data: data, SIZE)
    for number in range(5):
        log.append(key(number), content(number))
    for number, future in enumerate(ask(reader, log, range(5))):
        assert future.result(PATIENCE) == content(number)
    reader.close()


def test_what_nobody_has_read_at_the_end_is_cancelled(log):
    reader = BlockReader(lambda name, data: bytes(data), SIZE)
    futures = ask(reader, log, [*range(NUM_BLOCKS)] * 20)
    reader.close()
    for number, future in enumerate(futures):
        try:
            assert future.result(0) == content(number % NUM_BLOCKS)
        except CancelledError:
            assert future.cancelled()
