"""The files themselves: what was written is read, and anything else is not."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from zlib import crc32

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_kv_disk.flags import translate_flags
from toolkit_lm_kv_disk.folders import Lock, make_room
from toolkit_lm_kv_disk.log import SegmentLog
from toolkit_lm_kv_disk.segments import VERSION, DamageError

IDENTITY = bytes(range(32))
SIZE = 500


def key(number: int) -> tuple[int, bytes]:
    return number % 2, number.to_bytes(32, "big")


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def log_of(folder: Path, budget: int = 2**20, *, writes: bool = True) -> SegmentLog:
    folder.mkdir(exist_ok=True)
    return SegmentLog(folder, IDENTITY, budget, {0: SIZE, 1: SIZE}, writes=writes)


def read(log: SegmentLog, number: int) -> bytes | None:
    """Contents of a block; None: a miss."""
    if (place := log.index.get(key(number))) is None:
        return None
    try:
        return place.segment.read(place)
    except DamageError:
        return None


def test_what_is_written_is_read_by_another_process_too(tmp_path):
    log = log_of(tmp_path / "kv")
    for number in range(300):
        assert log.append(key(number), content(number))
    for number in range(0, 300, 3):
        log.drop(key(number))
    for again in (log, log_of(tmp_path / "kv", writes=False), log_of(tmp_path / "kv")):
        for number in range(300):
            assert read(again, number) == (None if number % 3 == 0 else content(number))


def test_old_blocks_make_room(tmp_path):
    """Blocks that are dropped leave their bytes to others, and those in use stay."""
    budget = 60 * 600
    log = log_of(tmp_path / "kv", budget)
    rng = random.Random(2)
    held: set[int] = set()
    for number in range(2000):
        if len(held) >= 40:
            gone = rng.choice(sorted(held))
            held.remove(gone)
            log.drop(key(gone))
        assert log.append(key(number), content(number))
        held.add(number)
        assert sum(path.stat().st_size for path in (tmp_path / "kv").iterdir()) <= budget
    assert {number for number in range(2000) if read(log, number)} == held
    # A dropped block may come back where the note of it was deleted first.
    again = log_of(tmp_path / "kv", budget)
    found = {number for number in range(2000) if read(again, number)}
    assert held <= found
    for each in (log, again):
        assert all(read(each, number) in (None, content(number)) for number in found)


def test_what_does_not_fit_is_not_written(tmp_path):
    log = log_of(tmp_path / "kv", 6000)
    kept = [number for number in range(30) if log.append(key(number), content(number))]
    assert 3 < len(kept) < 12
    assert all(read(log, number) == content(number) for number in kept)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The bytes as a fault of the disk, of another program, or of a crash leaves them."""
    changed = bytearray(data)
    how = rng.randrange(8)
    if how == 0:
        del changed[rng.randrange(len(changed)) :]
    elif how == 1:
        for _ in range(rng.randrange(1, 20)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif how == 2:
        start = rng.randrange(len(changed))
        end = min(len(changed), start + rng.randrange(1, 4096))
        changed[start:end] = bytes(end - start)
    elif how == 3:
        head = changed[:8] + (VERSION + rng.randrange(1, 9)).to_bytes(4, "little") + changed[12:44]
        changed[:48] = head + crc32(head).to_bytes(4, "little")
    elif how == 4:
        head = changed[:12] + rng.randbytes(32)
        changed[:48] = head + crc32(head).to_bytes(4, "little")
    elif how == 5:
        changed[:] = rng.randbytes(rng.randrange(2 * len(changed)))
    elif how == 6:
        start = rng.randrange(len(changed))
        changed[start:start] = rng.randbytes(rng.randrange(1, 200))
    else:
        # A record in the place of another one.
        a, b = sorted(rng.sample(range(len(changed) // 556), 2))
        record = changed[48 + a * 556 : 48 + (a + 1) * 556]
        changed[48 + b * 556 : 48 + b * 556 + len(record) // 2] = record[: len(record) // 2]
    return bytes(changed)


def test_200_damaged_files_hold_no_wrong_block(tmp_path, caplog):
    made = log_of(tmp_path / "made", 2**20)
    for number in range(20):
        made.append(key(number), content(number))
    [path] = (tmp_path / "made").glob("*.kv")
    data = path.read_bytes()
    assert len(data) == 48 + 20 * 556
    rng = random.Random(7)
    num_misses = 0
    for number in range(200):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        changed = damaged(data, rng)
        (folder / path.name).write_bytes(changed)
        caplog.clear()
        log = log_of(folder)
        found = [read(log, block) for block in range(20)]
        assert all(each in (None, content(block)) for block, each in enumerate(found))
        assert changed == data or None in found
        assert len(caplog.records) <= 1
        num_misses += found.count(None)
        # It can be written to afterwards.
        assert log.append(key(99), content(99))
        assert read(log_of(folder), 99) == content(99)
        shutil.rmtree(folder)
    assert num_misses > 1000


@pytest.mark.parametrize("what", ["folder", "link", "pipe", "unreadable name"])
def test_foreign_entries_stop_nobody(tmp_path, what):
    folder = tmp_path / "kv"
    folder.mkdir()
    path = folder / "segment-00000007.kv"
    if what == "folder":
        path.mkdir()
    elif what == "link":
        (tmp_path / "secret").write_bytes(b"x" * 100)
        path.symlink_to(tmp_path / "secret")
    elif what == "pipe":
        os.mkfifo(path)
    else:
        (folder / "segment-7.kv").write_bytes(b"")
    log = log_of(folder)
    assert log.append(key(1), content(1))
    assert read(log_of(folder), 1) == content(1)
    assert what != "link" or (tmp_path / "secret").read_bytes() == b"x" * 100


WRITER = """
import random, sys
from pathlib import Path
from toolkit_lm_kv_disk.log import SegmentLog
log = SegmentLog(Path(sys.argv[1]), bytes(range(32)), 60_000, {0: 500, 1: 500}, writes=True)
print("ready", flush=True)
number = 0
while True:
    number += 1
    log.append((number % 2, number.to_bytes(32, "big")), random.Random(number).randbytes(500))
    if number > 60:
        log.drop(((number - 60) % 2, (number - 60).to_bytes(32, "big")))
"""


def test_a_writer_that_is_killed_at_50_moments(tmp_path):
    """Never a wrong block, and never a failed start. What it had written is there."""
    folder = tmp_path / "kv"
    folder.mkdir()
    rng = random.Random(4)
    for _ in range(50):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        log = log_of(folder, 60_000, writes=False)
        for _, digest in log.index:
            number = int.from_bytes(digest, "big")
            assert read(log, number) == content(number)
    assert log.index


def test_other_identities_make_room(tmp_path):
    """The longest unused goes first, and none that is in use."""
    locks = []
    for number in range(4):
        folder = tmp_path / f"{number:032x}"
        lock = Lock(folder)
        (folder / "segment-00000001.kv").write_bytes(bytes(1000))
        os.utime(folder / "lock", (number, number))
        locks.append(lock)
    for lock in locks[1:]:
        lock.close()
    left = make_room(str(tmp_path), tmp_path / f"{3:032x}", 5000)
    assert sorted(path.name[-1] for path in tmp_path.iterdir()) == ["0", "2", "3"]
    assert 2900 <= left <= 3000


def test_a_lock_is_held_once(tmp_path):
    first = Lock(tmp_path / "a")
    second = Lock(tmp_path / "a")
    assert (first.is_held, second.is_held) == (True, False)
    first.close()
    assert Lock(tmp_path / "a").is_held


def test_flags_are_options():
    words = ["serve", "tiny", "--kv-cache-dir", "/x", "--kv-cache-disk=2GiB", "--port", "1"]
    assert translate_flags(words, ()) == [
        *("serve", "tiny", "--plugin-option", "kv_disk.dir=/x"),
        *("--plugin-option", "kv_disk.disk=2GiB", "--port", "1"),
    ]
    with pytest.raises(ConfigError, match="--kv-cache-host needs a value"):
        translate_flags(["--kv-cache-host"], ())
