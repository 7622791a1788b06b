"""Exchange of ranks on one machine over shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import combinations, product
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm_executor_mp import groups, memory
from toolkit_lm_executor_mp.socket_group import LostRankError, SocketGroup

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (3, 129), (32, 128), (1000, 1001)]
"""The last one takes several turns."""
CONTEXT = multiprocessing.get_context("forkserver")
"""Ranks are forks of a process that has imported torch once, for all tests of this file."""
SPECIALS = [float("inf"), float("-inf"), float("nan"), -0.0, 1e-7, 65504.0]


@pytest.fixture(scope="module", autouse=True)
def server():
    """What forks ranks. It ends with this file's tests."""
    CONTEXT.set_forkserver_preload(["toolkit_lm_executor_mp.groups", "pytest"])
    yield
    forkserver._forkserver._stop()


def _enter(work, path, size, rank, results):
    torch.set_num_threads(1)
    made = groups.connect(
        VllmConfig.default(tensor_parallel_size=size).with_rank(rank).parallel,
        path,
        torch.device("cpu"),
    )
    try:
        results.put((rank, work(made.tensor)))
    finally:
        made.close()


def run(tmp_path, work, size):
    """Runs `work` on each rank with its group. Returns the results, as numbers and bytes only:
    tensors would be shared."""
    results = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=_enter, args=(work, tmp_path / "meeting", size, rank, results))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = dict(results.get(timeout=100) for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(size)]


def part(rank, shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).mul(3).to(dtype)


def _sums(group):
    assert isinstance(group, memory.MemoryGroup)
    return [
        group.all_reduce(part(group.rank, shape, dtype)).view(torch.uint8).numpy().tobytes()
        for dtype in DTYPES
        for shape in SHAPES
    ]


def _specials(group):
    found = [
        group.all_reduce(torch.tensor(SPECIALS, dtype=dtype)).float().tolist() for dtype in DTYPES
    ]
    return repr(found), group.all_reduce(torch.tensor([2**60 + 1])).tolist()


def _gathered(group):
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape, dim in (((4, 6), 0), ((4, 6), 1), ((4, 6), -1), ((300, 5, 401), 1), ((0, 3), 0)):
            tensor = part(group.rank, shape, torch.float32).mul(100).to(dtype)
            expected = torch.cat(
                [part(rank, shape, torch.float32).mul(100).to(dtype) for rank in range(group.size)],
                dim,
            )
            found.append(torch.equal(group.all_gather(tensor, dim), expected))
    # A tensor that is not contiguous.
    tensor = part(group.rank, (6, 4), torch.float32).T
    expected = torch.cat([part(rank, (6, 4), torch.float32).T for rank in range(group.size)], 1)
    return [*found, torch.equal(group.all_gather(tensor, 1), expected)]


def _messages(number):
    return [
        {
            "hidden": part(number, (7, 16), torch.bfloat16),
            "count": torch.tensor(number),
            "none": torch.empty(0, 4),
        },
        {},
        # More than has room.
        {"hidden": part(number, (1500, 1000), torch.float32)},
    ][number % 3]


def _sent(group):
    if group.rank == 0:
        for number in range(12):
            group.send(_messages(number), 1)
        group.flush()
        return True
    time.sleep(0.2)
    received = [group.recv(0) for _ in range(12)]
    return all(
        one.keys() == _messages(number).keys()
        and all(torch.equal(one[name], tensor) for name, tensor in _messages(number).items())
        for number, one in enumerate(received)
    )


def _everything(group):
    return {
        "sums": _sums(group),
        "specials": _specials(group),
        "gathered": _gathered(group),
        "sent": group.rank > 1 or _sent(group),
    }


@pytest.fixture(scope="module", params=[2, 3])
def found(request, tmp_path_factory):
    """The results of `_everything` by rank."""
    return run(tmp_path_factory.mktemp("ranks"), _everything, request.param)


def in_order(size, shape, dtype):
    """The sum of all ranks' parts."""
    expected = part(0, shape, dtype).float()
    for other in range(1, size):
        expected = expected + part(other, shape, dtype).float()
    return expected.to(dtype)


def test_sums_are_those_of_float32_in_the_order_of_ranks(found):
    cases = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
    for rank, one in enumerate(found):
        for (dtype, shape), result in zip(cases, one["sums"], strict=True):
            expected = in_order(len(found), shape, dtype)
            assert result == expected.view(torch.uint8).numpy().tobytes(), (
                rank,
                dtype,
                shape,
            )


def test_sums_over_sockets_are_those_of_float32_in_the_order_of_ranks():
    """Of three ranks: those of two are the same in any order."""
    peers = [{}, {}, {}]
    for one, other in combinations(range(3), 2):
        peers[one][other], peers[other][one] = socket.socketpair()
    ranks = [SocketGroup(rank, 3, peers[rank]) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        for dtype, shape in product(DTYPES, SHAPES[:-1]):
            parts = [part(rank, shape, dtype) for rank in range(3)]
            for found in threads.map(SocketGroup.all_reduce, ranks, parts):
                assert torch.equal(found, in_order(3, shape, dtype)), (dtype, shape)
    for group in ranks:
        group.close()


def test_what_is_no_plain_number_is_added_too_and_other_dtypes(found):
    expected = []
    for dtype in DTYPES:
        one = torch.tensor(SPECIALS, dtype=dtype).float()
        total = one
        for _ in found[1:]:
            total = total + one
        expected.append(total.to(dtype).float().tolist())
    for one in found:
        assert one["specials"] == (repr(expected), [len(found) * (2**60 + 1)])


def test_gathered_tensors_are_in_the_order_of_ranks(found):
    assert [one["gathered"] for one in found] == [[True] * 16] * len(found)


def test_messages_arrive_in_order_also_when_more_are_on_their_way_than_there_is_room_for(found):
    assert [one["sent"] for one in found] == [True] * len(found)


def _left(how, group):
    if group.rank == 1:
        time.sleep(0.5)
        return 0.0
    start = time.monotonic()
    with pytest.raises(LostRankError, match="rank 1 of the group has gone"):
        group.all_reduce(torch.ones(3)) if how == "sum" else group.recv(1)
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["sum", "recv"])
def test_who_waits_for_a_rank_that_leaves_hears_of_it(tmp_path, how):
    assert run(tmp_path, partial(_left, how), 2)[0] < 30


def _late(told, group):
    group._place = (*group._place[:3], 0.2)
    if group.rank == 1:
        end = time.monotonic() + 60
        while not told.exists() and time.monotonic() < end:
            time.sleep(0.02)
        return told.exists()
    with pytest.raises(LostRankError, match="rank 1 of the group did not come in time"):
        group.all_reduce(torch.ones(3))
    told.touch()
    return True


def test_no_rank_waits_for_ever(tmp_path):
    assert run(tmp_path, partial(_late, tmp_path / "told"), 2) == [True, True]


def _closed(group):
    group.close()
    with pytest.raises(LostRankError, match="left"):
        group.all_reduce(torch.ones(3))
    return True


def test_a_group_that_was_left_is_of_no_use(tmp_path):
    assert run(tmp_path, _closed, 2) == [True, True]


def _fallback(group):
    return type(group) is SocketGroup, group.all_reduce(torch.ones(3)).tolist()


def _enter_without(path, rank, results):
    memory._is_compiled = rank == 0
    _enter(_fallback, path, 2, rank, results)


def test_where_one_rank_cannot_map_it_all_use_sockets(tmp_path):
    results = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=_enter_without, args=(tmp_path / "meeting", rank, results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    assert [results.get(timeout=100)[1] for _ in processes] == [(True, [2.0] * 3)] * 2
    for process in processes:
        process.join()


def _everything_over_sockets(path, rank, results):
    memory._is_compiled = False
    _enter(_over_sockets, path, 3, rank, results)


def _over_sockets(group):
    sums = [
        group.all_reduce(part(group.rank, shape, dtype)).view(torch.uint8).numpy().tobytes()
        for dtype in DTYPES
        for shape in SHAPES
    ]
    return {
        "sums": sums,
        "specials": _specials(group),
        "gathered": _gathered(group),
        "sent": group.rank > 1 or _sent(group),
    }


def test_sockets_give_what_memory_gives(tmp_path):
    """To the last bit."""
    results = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=_everything_over_sockets, args=(tmp_path / "meeting", rank, results))
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    plain = [results.get(timeout=100)[1] for _ in processes]
    for process in processes:
        process.join()
    test_sums_are_those_of_float32_in_the_order_of_ranks(plain)
    test_what_is_no_plain_number_is_added_too_and_other_dtypes(plain)
    test_gathered_tensors_are_in_the_order_of_ranks(plain)
    test_messages_arrive_in_order_also_when_more_are_on_their_way_than_there_is_room_for(plain)


def _endless(group):
    while True:
        group.all_reduce(torch.ones(5000))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_nothing_is_left_of_ranks_that_are_killed(tmp_path):
    before = set(os.listdir("/dev/shm"))
    results = CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=_enter, args=(_endless, tmp_path / "meeting", 2, rank, results))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 60
    while (
        not all(
            "memfd:toolkit_lm-ranks" in Path(f"/proc/{one.pid}/maps").read_text()
            for one in processes
        )
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    assert time.monotonic() < end
    time.sleep(0.2)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert not [one for one in set(os.listdir("/dev/shm")) - before if "toolkit_lm" in one]


def test_a_wheel_without_a_compiler_is_for_any_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    folder = Path(__file__).parents[1]
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path,
        folder,
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
