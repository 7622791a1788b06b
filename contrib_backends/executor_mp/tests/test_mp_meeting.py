"""How ranks meet, and what others can do to it."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import zmq
from toolkit_lm.config import VllmConfig
from toolkit_lm_executor_mp import groups, socket_group
from toolkit_lm_executor_mp.network import Master, shut, unshut
from toolkit_lm_executor_mp.nodes import Nodes
from toolkit_lm_executor_mp.socket_group import LostRankError, meet_by, meet_in
from toolkit_lm_executor_mp.store import OpenFileStore, SignedStore


def both(work, size=2):
    """Runs `work` for each rank in a thread of its own. Returns the results."""
    with ThreadPoolExecutor(size) as threads:
        return [one.result(30) for one in [threads.submit(work, rank) for rank in range(size)]]


def open_files(folder=None):
    """The sockets of this process, and what it has open of a folder, deleted or not. Other files
    may be opened by whatever else runs."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {one for one in found if one.startswith(("socket:", str(folder)))}


class TestStore:
    @pytest.mark.parametrize("value", ["", "x", b"\0\xff"])
    def test_values_come_back(self, value):
        store = SignedStore(dist.HashStore(), b"k" * 32)
        store.set("a", value)
        assert store.get("a") == (value.encode() if isinstance(value, str) else value)

    @pytest.mark.parametrize("value", ["", "x", "x" * 32, "/etc/passwd", "x" * 100])
    def test_what_no_rank_has_put_there_is_an_error(self, value):
        plain = dist.HashStore()
        plain.set("a", value)
        with pytest.raises(LostRankError, match="'a' that no rank of this launch"):
            SignedStore(plain, b"k" * 32).get("a")

    def test_nor_is_another_keys_value_or_another_launchs(self):
        plain = dist.HashStore()
        SignedStore(plain, b"k" * 32).set("a", "x")
        plain.set("b", plain.get("a"))
        with pytest.raises(LostRankError, match="'b'"):
            SignedStore(plain, b"k" * 32).get("b")
        with pytest.raises(LostRankError, match="'a'"):
            SignedStore(plain, b"l" * 32).get("a")

    def test_ranks_that_count_at_once(self):
        """No two of them get the same number, and strangers' numbers are an error."""
        plain = dist.HashStore()
        counted = both(
            lambda rank: [SignedStore(plain, b"k" * 32).add("n", 1) for _ in range(50)], 4
        )
        assert sorted(number for one in counted for number in one) == list(range(1, 201))
        assert SignedStore(plain, b"k" * 32).add("n", -3) == 197
        assert SignedStore(plain, b"k" * 32).get("n") == b"197"
        plain.set("n", "5")
        with pytest.raises(LostRankError, match="'n'"):
            SignedStore(plain, b"k" * 32).add("n", 1)

    def test_what_no_rank_has_put_there_is_not_there(self):
        plain = dist.HashStore()
        store = SignedStore(plain, b"k" * 32)
        plain.set("forged", "x")
        store.set("a", "x")
        assert [store.check(keys) for keys in (["a"], ["a", "b"], ["a", "forged"])] == [
            True,
            False,
            False,
        ]

    def test_libraries_reach_each_of_its_methods(self):
        """A store in C++ around it calls them, as process groups do."""
        store = SignedStore(dist.HashStore(), b"k" * 32)
        outer = dist.PrefixStore("x", store)
        outer.set("a", "y")
        outer.wait(["a"])
        inner = outer.clone()
        assert (
            outer.get("a"),
            inner.get("a"),
            outer.add("n", 2),
            outer.check(["a"]),
            outer.check(["b"]),
        ) == (b"y", b"y", 2, True, False)
        assert store.get("x/a") == b"y"

    @pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can")
    @pytest.mark.parametrize("where", ["one machine", "several machines"])
    def test_nccl_meets_when_the_folder_is_gone_and_nobody_else_holds_the_store(
        self, tmp_path, monkeypatch, where
    ):
        """NCCL's process group reads the store at the first collective; what stands for it here
        does, with the same part in C++."""
        plain = dist.HashStore()
        folder = tmp_path / "groups"
        device = torch.device("cpu")
        gc.collect()
        before = open_files(tmp_path)

        class Lazy(dist.ProcessGroup):
            class Options:
                pass

            def __init__(self, store, rank, size, options):
                super().__init__(rank, size)
                self.store = dist.PrefixStore("nccl", store)
                self.options = options

            def allreduce(self, tensors):
                self.store.set(f"{self.rank()}", str(tensors[0].item()))
                tensors[0].fill_(
                    sum(float(self.store.get(f"{rank}")) for rank in range(self.size()))
                )
                return self

            def wait(self, *timeout):
                return self.store.check(["0", "1"]) and self.store.clone().check(["1"])

        monkeypatch.setattr(dist, "ProcessGroupNCCL", Lazy, raising=False)

        def work(rank):
            if where == "one machine":
                return groups._nccl_here(folder, "stage 0", rank, 2, device)
            return groups._nccl(
                SignedStore(dist.PrefixStore("p", plain), b"k" * 32), rank, 2, device
            )

        made = both(work)
        gc.collect()
        shutil.rmtree(folder, ignore_errors=True)
        assert (
            both(lambda rank: made[rank].all_reduce(torch.ones(1) + rank).tolist()) == [[3.0]] * 2
        )
        for group in made:
            group.close()
        assert open_files(tmp_path) - before == set()

    @pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can")
    def test_a_file_that_is_deleted_is_read_on(self, tmp_path):
        one, other = (OpenFileStore(tmp_path / "store") for _ in range(2))
        (tmp_path / "store").unlink()
        one.set("a", b"\0x")
        assert other.get("a") == b"\0x" and not other.check(["b"])
        assert os.listdir(tmp_path) == []

    def test_gloo_meets_by_it_and_nobody_connects_afterwards(self):
        plain = dist.HashStore()
        before = groups._listeners()
        gc.collect()
        before_files = open_files()

        def work(rank):
            group = groups._gloo(
                SignedStore(dist.PrefixStore("p", plain), b"k" * 32),
                rank,
                2,
                torch.device("cpu"),
                "127.0.0.1",
            )
            return group, group.all_reduce(torch.ones(3)).tolist()

        made = both(work)
        assert [one for _, one in made] == [[2.0] * 3] * 2
        found = groups._listeners() - before
        assert len(found) == 2
        for descriptor in found:
            with socket.socket(fileno=os.dup(descriptor)) as listener, socket.socket() as stranger:
                stranger.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    stranger.connect(listener.getsockname())
        # Who is connected stays so.
        assert (
            both(lambda rank: made[rank][0].all_reduce(torch.ones(2)).tolist()) == [[2.0] * 2] * 2
        )
        assert open_files() - before_files
        for group, _ in made:
            group.close()
        assert open_files() - before_files == set()

    def test_gloo_does_not_meet_by_values_of_a_stranger(self):
        plain = dist.HashStore()
        stranger = SignedStore(plain, b"s" * 32)

        def work(rank):
            # Rank 1 is who does not know the key.
            store = SignedStore(plain, b"k" * 32) if rank == 0 else stranger
            with pytest.raises(LostRankError, match="no rank of this launch"):
                groups._gloo(store, rank, 2, torch.device("cpu"), "127.0.0.1")
            return True

        assert both(work) == [True, True]


class TestSockets:
    @pytest.mark.parametrize("size", [2, 4])
    def test_nothing_is_left_in_the_folder_and_nothing_listens(self, tmp_path, size):
        made = both(lambda rank: meet_in(tmp_path / "groups", "stage 0", rank, size), size)
        assert os.listdir(tmp_path / "groups") == []
        assert (tmp_path / "groups").stat().st_mode & 0o777 == 0o700
        assert all(
            not peer.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            for group in made
            for peer in group.peers.values()
        )
        for group in made:
            group.close()

    def test_a_folder_of_a_long_name(self, tmp_path):
        folder = tmp_path / ("x" * 100)
        folder.mkdir()
        for group in both(lambda rank: meet_in(folder / "groups", "stage 0", rank, 2)):
            group.close()

    def test_strangers_are_sent_away(self, monkeypatch):
        """Abstract addresses can be seen, and connected to, by any process."""
        store = dist.HashStore()
        strangers = []
        listened = threading.Event()

        def is_ours(peer, real=socket_group._is_ours):
            listened.set()
            return real(peer) and not any(
                one.getsockname() == peer.getpeername() for one in strangers
            )

        monkeypatch.setattr(socket_group, "_is_ours", is_ours)
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(meet_by, store, 0, 2)
            for _ in range(3):
                stranger = socket.socket(socket.AF_UNIX)
                stranger.bind("")
                strangers.append(stranger)
                stranger.connect(store.get("near 0"))
            groups_made = [threads.submit(meet_by, store, 1, 2).result(20), first.result(20)]
        assert all(stranger.recv(1) == b"" for stranger in strangers)
        for one in (*strangers, *groups_made):
            one.close()

    @pytest.mark.parametrize("said", [b"", b"\1"])
    def test_who_goes_before_it_has_said_its_rank_is_lost(self, said):
        store = dist.HashStore()
        with ThreadPoolExecutor(1) as threads, socket.socket(socket.AF_UNIX) as gone:
            first = threads.submit(meet_by, store, 0, 2)
            gone.connect(store.get("near 0"))
            gone.sendall(said)
            gone.close()
            with pytest.raises(
                LostRankError, match="a rank has gone before it said which one it is"
            ):
                first.result(20)

    @pytest.mark.parametrize("user", [0, 1000, 2**31, 2**32 - 2])
    def test_users_of_any_number(self, monkeypatch, user):
        class Peer:
            def getsockopt(self, level, option, size):
                return struct.pack("=iII", 1, user, user)[:size]

        monkeypatch.setattr(os, "geteuid", lambda: user)
        assert socket_group._is_ours(Peer())
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert not socket_group._is_ours(Peer())


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="Linux alone can")
class TestMeetings:
    """Meetings of nodes. Ranks may reconnect before an earlier attempt is over."""

    @pytest.fixture
    def nodes(self):
        config = VllmConfig.make(model="tiny", nodes=2, tensor_parallel_size=2)
        with zmq.Context() as context:
            made = Nodes(context, config, Master("127.0.0.1", 0), b"k" * 32, [0])
            yield made
            made.close("")

    @staticmethod
    def is_open(nodes):
        try:
            socket.create_connection(nodes._store_listener.getsockname(), 0.2).close()
        except TimeoutError:
            return False
        return True

    def test_the_store_is_open_until_the_last_has_ended(self, nodes):
        seen = [self.is_open(nodes)]
        for act in (
            lambda: nodes.meeting(""),
            lambda: nodes.meeting(""),
            nodes.end_meeting,
            nodes.end_meeting,
        ) * 2:
            act()
            seen.append(self.is_open(nodes))
        assert seen == [False, *[True, True, True, False] * 2]

    def test_each_has_a_key_of_its_own(self, nodes):
        assert nodes.meeting("").key != nodes.meeting("").key


@pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="Linux alone can")
def test_a_listener_that_is_shut():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname(), 5) as before:
            shut(listener)
            with pytest.raises(TimeoutError):
                socket.create_connection(listener.getsockname(), 0.3)
            accepted = listener.accept()[0]
            accepted.sendall(b"x")
            assert before.recv(1) == b"x"
            accepted.close()
        unshut(listener)
        socket.create_connection(listener.getsockname(), 5).close()
