"""Measures seconds to the first token where two models take turns, one request each, and one of
them is in memory at a time: `toolkit serve --models` beside the router of llama.cpp's server.

usage: python benchmarks/model_swap.py [--peer LLAMA_SERVER] [--models m1,m2] [--rounds 10]
                                       [--folder FOLDER] [--json FILE]

The models are m1, a Llama of 153 M random parameters, and m2, a Qwen3 of 473 M, in bf16. The peer
has the same weights in GGUF files, which `toolkit quantize` writes, and `--models-max 1`. Both
servers run all the time, and are asked in turn. Ours swaps in three ways: the other model sleeps at
level 2, sleeps at level 1, which keeps its weights in memory, or is unloaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
from checkpoints import make_llama_160m, make_qwen3_600m
from server_process import ServerProcess

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ports import free_port

MAKERS = {"m1": make_llama_160m, "m2": make_qwen3_600m}
WAYS: dict[str, dict[str, object]] = {
    "asleep, level 2": {"idle": "sleep", "sleep_level": 2},
    "asleep, level 1": {"idle": "sleep", "sleep_level": 1},
    "unloaded": {},
}
OPTIONS = {"max_num_seqs": 4, "max_model_len": 256, "dtype": "bfloat16"}
BODY = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "stream": True}
PEER = "llama.cpp's router"


def first_token(client: httpx.Client, model: str) -> float:
    """Seconds to the first event of a stream with a token."""
    begun = time.perf_counter()
    seconds: float | None = None
    with client.stream("POST", "/v1/completions", json={"model": model, **BODY}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if seconds is None and line.startswith("data: {"):
                seconds = time.perf_counter() - begun
                assert "error" not in line, line
    assert seconds is not None, "the stream has no event"
    return seconds


@contextmanager
def ours(folder: Path, checkpoints: dict[str, Path], way: str) -> Iterator[httpx.Client]:
    """A pool in which one model is awake at a time."""
    folder.mkdir()
    entries = [
        {"name": name, "checkpoint": str(path), "options": OPTIONS, **WAYS[way]}
        for name, path in checkpoints.items()
    ]
    groups = {"both": {"members": [*checkpoints], "swap": True}}
    file = folder / "models.yaml"
    file.write_text(json.dumps({"models": entries, "groups": groups}), encoding="utf-8")
    server = ServerProcess(folder, "--models", str(file), "--models-turn", "0")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=300) as client:
            yield client
    finally:
        server.stop()


@contextmanager
def theirs(folder: Path, binary: str) -> Iterator[httpx.Client]:
    """A router of llama.cpp's that has one model at a time."""
    port = free_port()
    words = ["--models-dir", str(folder), "--models-max", "1", "--ctx-size", "256", "--parallel"]
    command = [binary, *words, "4", "--port", str(port), "--host", "127.0.0.1"]
    log = folder.parent / "peer.log"
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300) as client:
                wait_for(client)
                yield client
        finally:
            process.terminate()


def wait_for(client: httpx.Client) -> None:
    for _ in range(600):
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the peer does not start")


def write_gguf(folder: Path, checkpoints: dict[str, Path]) -> None:
    """Files that llama.cpp reads, by the models' names."""
    folder.mkdir(exist_ok=True)
    for name, path in checkpoints.items():
        if not (folder / f"{name}.gguf").exists():
            words = ["quantize", str(path), "--quantization", "none", "--format", "gguf"]
            code = "from toolkit_lm_cli import main; main()"
            out = str(folder / f"{name}.gguf")
            subprocess.run([sys.executable, "-c", code, *words, "--out", out], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--peer", help="llama.cpp's llama-server")
    parser.add_argument("--models", default="m1,m2")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="folder that keeps the checkpoints")
    parser.add_argument("--json", type=Path, help="file for the seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        root = Path(temporary)
        kept = args.folder or root / "kept"
        kept.mkdir(exist_ok=True)
        checkpoints = {name: kept / name for name in args.models.split(",")}
        for name, path in checkpoints.items():
            if not path.exists():
                MAKERS[name](path)
        clients = {
            way: stack.enter_context(ours(root / f"pool{number}", checkpoints, way))
            for number, way in enumerate(WAYS)
        }
        if args.peer is not None:
            write_gguf(kept / "gguf", checkpoints)
            clients[PEER] = stack.enter_context(theirs(kept / "gguf", args.peer))
        found: dict[str, list[float]] = {}
        # The first sleep writes the weights, and the first start measures the machine.
        for round_ in range(-2, args.rounds):
            for name in checkpoints:
                for way, client in clients.items():
                    seconds = first_token(client, name)
                    if round_ >= 0:
                        found.setdefault(f"{way}: {name}", []).append(seconds)
    report(found, [*checkpoints])
    if args.json is not None:
        args.json.write_text(json.dumps(found), encoding="utf-8")


def report(found: dict[str, list[float]], names: list[str]) -> None:
    print("| the other model | model | seconds to the first token | least | most | of the peer |")
    print("|---|---|---|---|---|---|")
    for way in (*WAYS, PEER):
        for name in names:
            if (seconds := found.get(f"{way}: {name}")) is None:
                continue
            middle = statistics.median(seconds)
            peer = found.get(f"{PEER}: {name}")
            ratio = f"{middle / statistics.median(peer):.2f}" if peer else ""
            print(
                f"| {way} | {name} | {middle:.3f} | {min(seconds):.3f} | {max(seconds):.3f} | "
                f"{ratio} |"
            )


if __name__ == "__main__":
    main()
