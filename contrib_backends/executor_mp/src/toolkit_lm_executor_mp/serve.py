"""The main loop of a worker process: it authenticates itself, then takes commands and sends
reports."""

from __future__ import annotations

import itertools
import os
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import zmq
from msgspec.structs import replace
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import parallel_groups
from toolkit_lm.errors import PluginError
from toolkit_lm.executor import Failure, call_worker
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.messages import StepResult
from toolkit_lm.plugin import Plugins
from toolkit_lm.runner import ModelRunner, free_memory, profile, warm_up

from toolkit_lm_executor_mp import wire
from toolkit_lm_executor_mp.groups import Groups, MasterStore, connect
from toolkit_lm_executor_mp.socket_group import LostRankError

_LAST_WORDS = 1000
"""Milliseconds that the last report gets to be sent."""


def serve(
    rank: int, folder: str, key: bytes, master: str, die_with_engine: Callable[[bool], None]
) -> None:
    """Connects to the engine in `folder`, and executes its commands until the process dies.

    `master`: the address of the engine's machine if ranks are on several machines, else "".
    `die_with_engine` is called with whether the kernel may kill the process when the engine ends.
    It may not while the process has a folder to remove.
    """
    context = zmq.Context()
    commands = wire.make_socket(context, zmq.PULL)
    reports = wire.make_socket(context, zmq.PUSH)
    commands.bind(f"ipc://{folder}/{rank}")
    reports.connect(f"ipc://{folder}/reports")
    nonce = os.urandom(wire.KEY_BYTES)
    reports.send(wire.encode(wire.Hello(rank, nonce)))
    challenge = wire.decode_command(commands.recv())
    if not isinstance(challenge, wire.Challenge) or challenge.proof != wire.prove(
        key, "engine", rank, nonce
    ):
        raise PermissionError(
            "who answers at the engine's socket does not know the key of the launch"
        )
    reports.send(wire.encode(wire.Proof(rank, wire.prove(key, "worker", rank, challenge.nonce))))
    start = wire.decode_command(commands.recv())
    assert isinstance(start, wire.Start), "the engine's first call"
    try:
        worker = _make_worker(start, rank, master)
    except Exception as error:
        reports.send(wire.encode(wire.Failed(rank, 0, Failure.of(error, repr), is_victim=False)))
        reports.close(linger=_LAST_WORDS)
        context.term()
        return
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"toolkit-lm worker {rank} {start.config.served_model_name}")
    reports.send(wire.encode(wire.Done(rank, 0)))
    meeting = ""
    dies = False
    for call in itertools.count(1):
        # Large arrays among a plan are views of the message.
        command = wire.decode_command(commands.recv(copy=False).buffer)
        if isinstance(command, wire.Connect):
            # Where ranks are on several machines, nobody meets in the engine's folder.
            meeting = folder if master else command.folder
            die_with_engine(dies := False)
        elif meeting and not dies and not os.path.exists(meeting):
            die_with_engine(dies := True)
        if (report := worker.handle(call, command)) is not None:
            if isinstance(report, wire.Failed):
                # The engine makes a new folder when it hears that.
                meeting = ""
                die_with_engine(dies := False)
            reports.send(wire.encode(report), copy=False)
        if isinstance(report, wire.Failed):
            # Now that the engine can know who was the first, the others may fail as well.
            worker.leave()


def _make_worker(start: wire.Start, rank: int, master: str) -> Worker:
    with warnings.catch_warnings():
        # The front has warned.
        warnings.simplefilter("ignore")
        plugins = Plugins.load(start.config.plugins)
    if difference := start.fingerprint.difference(plugins.fingerprint()):
        raise PluginError(
            "the worker has other plugins than its engine ('here': the engine; 'there': the "
            f"worker):\n{difference}"
        )
    config = start.config.with_rank(rank)
    if config.device.device.startswith("cuda"):
        number = rank % config.parallel.ranks_per_node
        config = replace(config, device=replace(config.device, device=f"cuda:{number}"))
        torch.cuda.set_device(number)
    return Worker(config, plugins, master)


class Worker:
    """A rank: its model runner and its groups."""

    def __init__(self, config: VllmConfig, plugins: Plugins, master: str) -> None:
        self.config = config
        self.plugins = plugins
        self.runner = ModelRunner(config, plugins)
        self._master = master
        self._groups: Groups | None = None
        self._step_memory = 0

    def handle(self, call: int, command: wire.Command) -> wire.Report | None:
        """Executes the command of number `call`. Returns its report, or None if other ranks
        answer."""
        rank = self.config.parallel.rank
        if isinstance(command, wire.CallMethod):
            # Without the groups: it may not use them.
            answer = call_worker(self.runner, command.method, command.payload)
            return wire.Done(rank, call, answer=answer)
        try:
            if isinstance(command, wire.Connect):
                self.leave()
                meeting = (
                    MasterStore(self._master, command.store_port, call, command.key)
                    if self._master
                    else Path(command.folder, "groups")
                )
                self._groups = connect(self.config.parallel, meeting, self.runner.device)
                return wire.Done(rank, call)
            if self._groups is None:
                raise LostRankError("the step before has failed")
            with parallel_groups(tensor=self._groups.tensor, pipeline=self._groups.pipeline):
                if not isinstance(command, wire.Step):
                    return wire.Done(rank, call, description=self._call(command))
                result: StepResult = self.runner.execute(command.plan)
                return (
                    wire.Done(rank, call, result)
                    if rank == wire.answering_rank(self.config.parallel)
                    else None
                )
        except Exception as error:
            failure = Failure.of(_without_own_frames(error), self.plugins.failure)
            failed = wire.Failed(rank, call, failure, isinstance(error, LostRankError))
            # Objects in its frames would keep connections of the groups open.
            traceback.clear_frames(error.__traceback__)
            return failed

    def _call(self, command: wire.Command) -> wire.Description | None:
        try:
            if isinstance(command, wire.Load):
                self.runner.load()
                self._step_memory = profile(self.runner)
            elif isinstance(command, wire.Describe):
                return self._describe()
            elif isinstance(command, wire.InitKVCache):
                mine = command.kv_caches[self.config.parallel.rank]
                self.runner.init_kv_cache(KVCacheConfig.decode(mine, self.plugins.kv_kinds))
            else:
                assert isinstance(command, wire.WarmUp), f"{command} is no call"
                warm_up(self.runner)
        except LostRankError:
            # No plugin's fault.
            raise
        except Exception as error:
            self.plugins.boundary.check(_without_own_frames(error))
            raise
        return None

    def _describe(self) -> wire.Description:
        return wire.Description(
            specs={
                layer: msgspec.Raw(wire.encode(spec))
                for layer, spec in self.runner.kv_cache_specs().items()
            },
            backends={layer: selection.name for layer, selection in self.runner.selections.items()},
            parts=self.runner.parts.facts(),
            step_memory=self._step_memory,
            free_memory=free_memory(self.runner.device),
            free_host_memory=free_memory(torch.device("cpu")),
        )

    def leave(self) -> None:
        """Leaves the groups. Ranks that wait for this one then fail."""
        if self._groups is not None:
            self._groups.close()
            self._groups = None


def _without_own_frames(error: Exception) -> Exception:
    """Drops this module's frames from the traceback, so that this plugin is not blamed for what it
    calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next
    return error.with_traceback(trace)
