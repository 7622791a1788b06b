"""Frames, addresses, and when a server is left alone: without a server."""

from __future__ import annotations

import random

import pytest
from redis.exceptions import AuthenticationError
from toolkit_lm_kv_redis.flags import translate_flags
from toolkit_lm_kv_redis.frames import FRAME_BYTES, FrameError, pack, unpack
from toolkit_lm_kv_redis.limits import PASSWORD, address_of
from toolkit_lm_kv_redis.link import Breaker

DATA = random.Random(1).randbytes(3000)


def test_a_frame_holds_a_block_of_its_key():
    frame = pack("key", DATA)
    assert len(frame) == len(DATA) + FRAME_BYTES
    assert bytes(unpack("key", frame)) == DATA
    for key, value in [("other", frame), ("key", frame + b"x"), ("key", 7), ("key", None)]:
        with pytest.raises(FrameError):
            unpack(key, value)
    with pytest.raises(KeyError):
        unpack("key", b"")


def test_each_changed_bit_of_a_header_and_cut_is_told():
    frame = pack("key", DATA[:64])
    for bit in range(8 * len(frame)):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FrameError):
            unpack("key", bytes(changed))
    for size in range(1, len(frame)):
        with pytest.raises(FrameError):
            unpack("key", frame[:size])


def test_a_server_is_left_alone_longer_each_time_and_told_once(caplog):
    now = [100.0]
    breaker = Breaker("it fails", lambda: now[0])
    pauses = []
    for _ in range(9):
        assert not breaker.is_open
        breaker.failed(AuthenticationError("no"))
        assert breaker.is_open
        pauses.append(breaker.wait)
        now[0] += breaker.wait
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert len(caplog.records) == 1
    assert PASSWORD in caplog.text
    breaker.worked()
    breaker.failed(OSError("no"))
    assert (breaker.wait, len(caplog.records)) == (1, 2)
    breaker.worked()
    breaker.failed(OSError("no"))
    # It comes and goes: not each time is told.
    assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", ("h", 6379, 0, None, False, None)),
        ("rediss://me@[::1]:7/3", ("::1", 7, 3, "me", True, None)),
        ("unix:///run/x.sock", ("", 0, 0, None, False, "/run/x.sock")),
    ],
)
def test_addresses(url, expected):
    assert tuple(address_of(url)) == expected


def test_flags_are_options():
    words = ["serve", "tiny", "--kv-cache-redis", "redis://h", "--kv-cache-redis-ttl=60"]
    assert translate_flags(words, ()) == [
        *("serve", "tiny", "--plugin-option", "kv_redis.url=redis://h"),
        *("--plugin-option", "kv_redis.ttl=60"),
    ]
