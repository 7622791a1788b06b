"""Seals, blocks that wait, and which are worth writing."""

from __future__ import annotations

import os
import random

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_kv_tiers.pending import Pending
from toolkit_lm_kv_tiers.sealing import KeyedSeal, Seal, SealError, check_key, make_seal
from toolkit_lm_kv_tiers.writing import SeenTwice

IDENTITY = bytes(range(32))
KEY = bytes(range(32, 64))
DATA = random.Random(1).randbytes(4096)


def test_what_is_sealed_is_opened_by_its_key_and_place_alone():
    seal = KeyedSeal(IDENTITY, KEY)
    sealed = seal.close(DATA, b"place")
    assert len(sealed) == len(DATA) + seal.overhead
    assert DATA[:16] not in sealed
    assert KeyedSeal(IDENTITY, KEY).open(sealed, b"place") == DATA
    assert seal.close(DATA, b"place") != sealed
    others = (KeyedSeal(IDENTITY, DATA[:32]), KeyedSeal(DATA[:32], KEY))
    for other, about in [(seal, b"other"), *((one, b"place") for one in others)]:
        with pytest.raises(SealError):
            other.open(sealed, about)


def test_200_damaged_seals_are_not_opened():
    seal = KeyedSeal(IDENTITY, KEY)
    sealed = seal.close(DATA, b"place")
    rng = random.Random(2)
    for number in range(200):
        changed = bytearray(sealed)
        if number % 4 == 0:
            del changed[rng.randrange(len(changed)) :]
        else:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        with pytest.raises(SealError):
            seal.open(bytes(changed), b"place")


def test_names_tell_nothing_without_the_key():
    """Neither of a block nor of a model."""
    digest = DATA[:32]
    seal = KeyedSeal(IDENTITY, KEY)
    other = KeyedSeal(IDENTITY, DATA[32:64])
    assert len({seal.name(digest), other.name(digest), digest}) == 3
    assert len({seal.identity, other.identity, IDENTITY}) == 3
    assert seal.name(digest) == KeyedSeal(IDENTITY, KEY).name(digest)
    plain = Seal(IDENTITY)
    assert (plain.name(digest), plain.identity) == (digest, IDENTITY)
    assert plain.open(plain.close(DATA, b"a"), b"b") == DATA


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (31, "31 bytes"), (33, "more bytes"), (None, "be read")]
)
def test_a_file_that_holds_no_key_is_refused(tmp_path, size, text):
    if size is not None:
        (tmp_path / "key").write_bytes(bytes(size))
    with pytest.raises(ConfigError, match=text):
        make_seal(IDENTITY, str(tmp_path / "key"))


@pytest.mark.parametrize(("mode", "warns"), [(0o600, 0), (0o640, 1), (0o604, 1), (0o400, 0)])
def test_a_key_that_others_may_read_is_told(tmp_path, caplog, mode, warns):
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32))
    path.chmod(mode)
    check_key(str(path))
    assert len(caplog.records) == warns


def test_blocks_are_worth_writing_once_they_were_seen_twice(monkeypatch):
    seen = SeenTwice()
    key = (0, b"a")
    assert [seen.computed(key), key in seen, seen.computed(key), seen.computed(key)] == [
        *(False, False, True, True)
    ]
    seen.found((1, b"a"))
    assert seen.computed((1, b"a"))
    monkeypatch.setattr("toolkit_lm_kv_tiers.writing._MOST", 3)
    for number in range(9):
        seen.computed((2, bytes([number])))
    assert [seen.computed((2, bytes([number]))) for number in (8, 0)] == [True, False]


class Bytes:
    """A block of the device."""

    def __init__(self, data):
        self.data = data
        self.num_bytes = len(data)

    def read_into(self, target):
        target[:] = self.data


def test_a_block_is_found_while_it_waits():
    """A copy of it, so that its memory can be used again once it was written."""
    pending = Pending()
    name = (0, b"a")
    data = pending.add(name, Bytes(DATA))
    assert (data, len(pending), pending.find(name)) == (DATA, 1, DATA)
    assert pending.is_wanted(name, data)
    found = pending.find(name)
    pending.done(name, data)
    assert (len(pending), pending.find(name)) == (0, None)
    assert pending.add((0, b"b"), Bytes(DATA[::-1])) is data
    assert found == DATA


def test_a_block_that_was_dropped_or_stored_again_is_not_written():
    pending = Pending()
    name = (0, b"a")
    first = pending.add(name, Bytes(DATA))
    second = pending.add(name, Bytes(DATA[::-1]))
    assert [pending.is_wanted(name, data) for data in (first, second)] == [False, True]
    pending.done(name, first)
    assert pending.find(name) == DATA[::-1]
    pending.drop(name)
    assert not pending.is_wanted(name, second)


def test_what_waits_and_what_is_kept_for_later_is_bounded(monkeypatch):
    monkeypatch.setattr("toolkit_lm_kv_tiers.pending._MOST", 3 * len(DATA))
    monkeypatch.setattr("toolkit_lm_kv_tiers.pending._MOST_SPARE", len(DATA))
    pending = Pending()
    names = [(0, bytes([number])) for number in range(4)]
    copies = [pending.add(name, Bytes(DATA)) for name in names]
    assert [data is None for data in copies] == [False, False, False, True]
    # Dropped ones wait until they are done with.
    pending.drop(names[0])
    assert pending.add(names[3], Bytes(DATA)) is None
    for name, data in zip(names, copies[:3], strict=False):
        pending.done(name, data)
    again = [pending.add(name, Bytes(DATA)) for name in names[:3]]
    kept = [data for data in again if any(data is each for each in copies)]
    assert len(kept) == 1
