"""`toolkit serve` as a process of its own, with a plugin that fails on demand: for the tests of
what goes wrong around a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from ports import free_port

RAISES = 1530
NANS = 1531
HANGS = 1532
DIES = 1533
"""Tokens on which the plugin's model fails, where one comes twice in a row."""
ENTRY = """
from typing import Annotated, Literal
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import hookimpl

class FaultyParams(ProcessorParams):
    faulty_how: Annotated[
        Literal["add", "raise", "shape", "nan", "after_draw", "prepare"] | None,
        param("How it fails."),
    ] = None

    def prepare(self, renderer):
        if self.faulty_how == "prepare":
            raise RuntimeError("this processor cannot prepare")
        return {"how": self.faulty_how}

@hookimpl
def toolkit_register_models(models):
    models.add("LlamaForCausalLM", "faulty_targets:Faulty", override=True)

@hookimpl
def toolkit_register_logits_processors(processors):
    processors.add("faulty", "faulty_targets:FaultyProcessor", params=FaultyParams)
"""
TARGETS = f"""
import os, signal, time
from toolkit_lm.sampling import LogitsProcessor
from toolkit_lm_decoder.llama import LlamaForCausalLM

class Faulty(LlamaForCausalLM):
    def __init__(self, **options):
        time.sleep(float(os.environ.get("FAULTY_LOADING", 0)))
        if "FAULTY_START" in os.environ:
            raise MemoryError("no room for faulty weights")
        super().__init__(**options)

    def forward(self, input_ids, positions, **options):
        twice = input_ids * (input_ids == input_ids.roll(1)) * (len(input_ids) > 1)
        if (twice == {RAISES}).any():
            raise RuntimeError("the model cannot stand this token")
        if (twice == {HANGS}).any():
            time.sleep(3600)
        if (twice == {DIES}).any():
            os.kill(os.getpid(), signal.SIGKILL)
        hidden = super().forward(input_ids, positions, **options)
        return hidden.masked_fill((twice == {NANS})[:, None], float("nan"))

class FaultyProcessor(LogitsProcessor):
    stage = "logits"
    how = dict()

    def add(self, row, arguments, state):
        self.how[row.key] = arguments["how"]
        if arguments["how"] == "add":
            raise RuntimeError("this processor takes nobody")

    def remove(self, key):
        self.how.pop(key)

    def apply(self, values, rows):
        hows = [self.how[row.key] for row in rows]
        if "raise" in hows:
            raise RuntimeError("this processor does nothing")
        if "nan" in hows:
            values[hows.index("nan")] = float("nan")
        return values[:, :1] if "shape" in hows else values

    def after_draw(self, row, token_id, prob):
        if self.how[row.key] == "after_draw":
            raise RuntimeError("this processor takes no tokens")
"""
FLAGS = [
    "tiny",
    "--dtype",
    "float32",
    "--device",
    "cpu",
    "--no-access-log",
    "--log-level",
    "warning",
]
PROGRAM = ["-c", "from toolkit_lm_cli import main; main()"]


def install(folder: Path) -> None:
    """Puts the plugin into a folder, installed as pip would."""
    (folder / "faulty.py").write_text(ENTRY)
    (folder / "faulty_targets.py").write_text(TARGETS)
    info = folder / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\nRequires-Dist: "
        "toolkit-lm-core>=0.2,<0.3\n"
    )
    (info / "entry_points.txt").write_text("[toolkit_lm]\nfaulty = faulty\n")
    (info / "RECORD").write_text(
        "faulty.py,,\nfaulty_targets.py,,\nfaulty-1.0.dist-info/METADATA,,\n"
    )


class Server:
    """`toolkit serve`, whose temporary files are all in `folder`."""

    def __init__(
        self,
        plugin: Path,
        folder: Path,
        *arguments: str,
        program: Sequence[str | Path] = PROGRAM,
        before: Callable[[], None] | None = None,
        cwd: Path | None = None,
        **environ: str,
    ) -> None:
        """`program`: what runs `toolkit`. `before`: called in the new process before that."""
        self.folder = folder
        self.log = folder / "server.log"
        (folder / "tmp").mkdir(parents=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # A process is found by its environment, whoever its parent is.
        path = os.pathsep.join(filter(None, [str(plugin), os.environ.get("PYTHONPATH")]))
        mark = {
            "FAULTS_MARK": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, "serve", *FLAGS, "--port", str(self.port), *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **mark, **environ},
                preexec_fn=before,
                cwd=cwd,
            )

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30)

    def post(self, body, path: str = "/v1/completions") -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def status(self, path: str = "/ready") -> int | None:
        """None: nobody answers."""
        try:
            return self.get(path).status_code
        except httpx.TransportError:
            return None

    def wait_ready(self) -> Server:
        wait_for(lambda: self.status() == 200 or self.process.poll() is not None, 120)
        assert self.process.poll() is None, self.log.read_text()
        return self

    def stream(self, prompt="Once upon a time"):
        """The lines of a stream that lasts."""
        body = {"prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        return httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60)

    def figures(self) -> dict[str, float]:
        """Metrics by name, with the labels except the model's."""
        text = (
            self.get("/metrics")
            .text.replace('model_name="tiny",', "")
            .replace('{model_name="tiny"}', "")
        )
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("toolkit_lm_"): float(value) for name, value in lines}

    def is_idle(self) -> bool:
        figures = self.figures()
        return not any(
            figures[name]
            for name in ("num_sequences_running", "num_requests_waiting", "kv_cache_usage_ratio")
        )

    def pids(self) -> list[int]:
        """Its processes that are alive."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"FAULTS_MARK={self.folder}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def has_left_nothing(self) -> bool:
        return not self.pids() and not list((self.folder / "tmp").iterdir())

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it wrote."""
        code = self.process.wait(90)
        return code, self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


def wait_for(condition, seconds=30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def good(server: Server, number: int) -> list[str]:
    body = {
        "prompt": f"{number} times {number % 7} is",
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    response = server.post(body)
    assert response.status_code == 200, response.text
    tokens: list[str] = response.json()["choices"][0]["logprobs"]["tokens"]
    return tokens
