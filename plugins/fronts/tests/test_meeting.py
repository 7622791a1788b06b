"""Who is let in, and which fronts fit an engine."""

from __future__ import annotations

import os
import socket

import pytest
from toolkit_lm import VllmConfig
from toolkit_lm_fronts.hub import differences
from toolkit_lm_fronts.meeting import check_peer, read_line


def test_another_user_is_not_let_in(monkeypatch):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        check_peer(ours)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(PermissionError, match=f"is of user {user}"):
            check_peer(ours)


@pytest.mark.parametrize("sent", [b"", b"x", b"x" * 5000])
def test_a_welcome_without_an_end_is_an_error(sent):
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(sent)
        theirs.close()
        with pytest.raises(ConnectionError):
            read_line(ours)


@pytest.mark.parametrize(
    ("front", "engine", "names"),
    [
        ({}, {}, []),
        ({}, {"scheduling_policy": "fair"}, []),
        ({"scheduling_policy": "fcfs"}, {"scheduling_policy": "fair"}, ["scheduling_policy"]),
        ({"max_num_seqs": 3}, {"dtype": "float32"}, ["dtype", "max_num_seqs"]),
        # Each front has these for itself.
        ({"max_queued_requests": 3, "start_timeout": 5, "renderer": "hf"}, {}, []),
    ],
)
def test_a_front_asks_for_the_engine_that_there_is(front, engine, names):
    found = differences(VllmConfig.make(**front), VllmConfig.make(**engine))
    assert [text.split()[0] for text in found] == names
