"""`toolkit pull`, `list` and `rm`, against a stub of the hub."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import pytest
from huggingface_hub import scan_cache_dir

WEIGHTS = bytes(range(256)) * 8192
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b"{}",
    "README.md": b"# A model",
    "pytorch_model.bin": b"a pickle",
}
OLD = {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": WEIGHTS[:1000]}
MAIN = "a" * 40
TAG = "b" * 40
REPOS = {
    "acme/good": {"main": (MAIN, FILES), "v1": (TAG, OLD)},
    "acme/pickles": {"main": ("c" * 40, {"config.json": b"{}", "pytorch_model.bin": b"\x80"})},
    "acme/empty": {"main": ("d" * 40, {"config.json": b"{}"})},
}


class Stub(BaseHTTPRequestHandler):
    """The routes of the hub that huggingface_hub asks for a snapshot."""

    protocol_version = "HTTP/1.1"
    asked: list[str] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        Stub.asked.append(f"{self.command} {path}")
        words = path.removeprefix("api/models/").split("/")
        revisions = REPOS.get("/".join(words[:2]), {})
        revision = words[3] if len(words) > 3 else "main"
        found = revisions.get(revision) or next(
            (one for one in revisions.values() if one[0] == revision), None
        )
        if found is None:
            code = "RevisionNotFound" if revisions else "RepoNotFound"
            self.answer(404, b"{}", {"X-Error-Code": code})
            return
        commit, files = found
        kind = words[2] if len(words) > 2 else "revision"
        if kind == "resolve":
            self.file(commit, files.get("/".join(words[4:])))
        elif kind == "tree":
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": digest(data)}
                for name, data in files.items()
            ]
            self.answer(200, json.dumps(tree).encode())
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            body = {"id": "/".join(words[:2]), "sha": commit, "siblings": siblings}
            self.answer(200, json.dumps(body).encode())

    def file(self, commit: str, data: bytes | None) -> None:
        if data is None:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest(data)}"'}
        self.answer(200, data, headers)

    def answer(
        self, status: int, body: bytes, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(hub, tmp_path):
    """Runs `toolkit` with a cache of its own, in an empty folder."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))
    }
    environ = {**inherited, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home")}
    here = tmp_path / "here"
    here.mkdir()
    Stub.asked.clear()

    def call(*arguments: str, input: str = "", **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "from toolkit_lm_cli import main; main()", *arguments],
            input=input,
            capture_output=True,
            text=True,
            check=False,
            cwd=here,
            env={**environ, **more},
        )

    return call


def test_a_model_is_fetched_listed_and_deleted(run, tmp_path):
    done = run("list")
    assert (done.returncode, done.stdout.split()[0]) == (0, "MODEL")
    done = run("pull", "acme/good")
    assert done.returncode == 0, done.stderr
    # Progress is told, as what is fetched.
    assert "acme/good: 2.0 MiB of weights" in done.stderr
    assert "100%" in done.stderr
    folder = Path(done.stdout.strip())
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    # Again: nothing is fetched.
    Stub.asked.clear()
    assert run("pull", "acme/good").stdout.strip() == str(folder)
    assert [asked for asked in Stub.asked if asked.startswith("GET acme")] == []
    done = run("pull", "acme/good", "--revision", "v1")
    assert (Path(done.stdout.strip()) / "config.json").read_bytes() == OLD["config.json"]
    [row] = [line for line in run("list").stdout.splitlines() if line.startswith("acme/good")]
    assert "main, v1" in row and "2.0 MiB" in row
    # It asks before it deletes.
    done = run("rm", "acme/good", "--revision", "v1", input="n\n")
    assert done.returncode == 1 and "acme/good (bbbbbbbb)" in done.stderr
    assert "main, v1" in run("list").stdout
    done = run("rm", "acme/good", "--revision", "v1", input="y\n")
    assert done.returncode == 0 and "Deleted acme/good" in done.stdout
    assert folder.is_dir() and "v1" not in run("list").stdout
    done = run("rm", "acme/good", "-y")
    assert done.returncode == 0 and "2.0 MiB are free again" in done.stdout
    assert not folder.exists()
    assert scan_cache_dir(tmp_path / "home" / "hub").repos == frozenset()


FAULTS = {
    "pickles": (("pull", "acme/pickles"), 1, ("pickles only (pytorch_model.bin)", "safetensors")),
    "no weights": (("pull", "acme/empty"), 1, ("has no weights",)),
    "unknown": (("pull", "acme/nothing"), 1, ("'acme/nothing'", "RepositoryNotFound")),
    "revision": (("pull", "acme/good", "--revision", "v9"), 1, ("RevisionNotFound",)),
    "no id": (("pull", "good"), 2, ("'good' is not a hub id", "owner/name")),
    "id of a path": (("pull", "../x/y"), 2, ("is not a hub id",)),
    "rm of nothing": (("rm", "acme/good", "-y"), 2, ("'acme/good' is not in the cache",)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_told(run, tmp_path, name):
    arguments, code, words = FAULTS[name]
    done = run(*arguments)
    assert done.returncode == code, done.stderr
    for text in words:
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    # Nothing of the weights was fetched.
    assert [asked for asked in Stub.asked if "resolve" in asked] == []
    assert not any((tmp_path / "home").rglob("pytorch_model.bin"))


def test_a_folder_of_the_name_is_not_replaced(run, tmp_path):
    (tmp_path / "here" / "acme" / "good").mkdir(parents=True)
    done = run("pull", "acme/good")
    assert done.returncode == 2 and "is here already" in done.stderr
    assert Stub.asked == []


def test_an_unreachable_hub_is_told(run):
    done = run("pull", "acme/good", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1, done.stderr
    assert "the hub does not tell of 'acme/good'" in done.stderr and "Traceback" not in done.stderr
