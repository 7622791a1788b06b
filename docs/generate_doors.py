"""Writes the table of what listens in docs/security.md. tests/test_doors.py compares it with what
listens.

usage: python docs/generate_doors.py
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parent / "security.md"
BEGIN = "<!-- written by docs/generate_doors.py -->\n"
END = "<!-- end of what is written by docs/generate_doors.py -->\n"

NOBODY = "nobody"
USER = "this user"
MACHINE = "all users of the machine"
"""Who can connect to a socket."""
TOPOLOGIES = {
    "one process": "`--no-engine-process`",
    "engine process": "the default",
    "tensor parallel": "`--tensor-parallel-size 2`",
    "pipeline parallel": "`--pipeline-parallel-size 2`",
    "data parallel": "`--data-parallel-size 2`",
    "nodes": "`--nodes 2`, and `toolkit worker`",
    "Ray": "`--executor ray`, with a local cluster",
    "KV events": "`--plugin-option kv_events.enabled=true`",
    "KV transfer": "`--kv-transfer-listen`",
    "remote renderer": "`--renderer-url`, and `toolkit render`",
    "router": "`toolkit route`, and its backends",
    "fronts": "`toolkit engine`, and `--plugin-option fronts.engine=...`",
}


class Door(NamedTuple):
    """A listening socket of a process once the server is ready."""

    process: str
    kind: str
    """tcp, udp or unix."""
    reach: str
    """NOBODY, USER or MACHINE; of tcp at the address that is given by default. MACHINE includes the
    network where `address` does."""
    address: str
    holds: str
    """Protection against everyone who can connect."""
    topologies: tuple[str, ...]


_WITH_ENGINE = tuple(name for name in TOPOLOGIES if name != "one process")
_WITH_RANKS = ("tensor parallel", "pipeline parallel", "nodes")
_KEY = "[the key](server.md#access), where there is one"
_GONE = "the name is deleted once both ends are connected; its folder had the mode 0700"
_TOKEN = "a token of the launch, which is in no file"  # nosec B105 # no secret
_STORE = "open while ranks connect; what they read has an HMAC"
_NONE = "nothing: they show figures"

DOORS = (
    Door("server", "tcp", MACHINE, "127.0.0.1, or `--host`; `--port`", _KEY, tuple(TOPOLOGIES)),
    Door(
        "render server",
        "tcp",
        MACHINE,
        "127.0.0.1, or `--host`; `--port`",
        _KEY,
        ("remote renderer",),
    ),
    Door("router", "tcp", MACHINE, "127.0.0.1, or `--host`; `--port`", _KEY, ("router",)),
    Door("engine", "unix", NOBODY, "none", _GONE, _WITH_ENGINE),
    Door(
        "shared engine",
        "unix",
        USER,
        "`--listen`; for each front another one, in a folder of the mode 0700",
        "the socket's mode 0600; both ends check that the other one is of their user",
        ("fronts",),
    ),
    Door("rank", "unix", NOBODY, "none", _GONE, (*_WITH_RANKS, "Ray")),
    Door(
        "engine",
        "tcp",
        MACHINE,
        "`--master`, and a free port for each node",
        "the launch key: CURVE",
        ("nodes",),
    ),
    Door("engine", "tcp", NOBODY, "that of `--master`: the store of the ranks", _STORE, ("nodes",)),
    Door(
        "rank",
        "tcp",
        NOBODY,
        "that of its node: gloo",
        "open while ranks connect; then the kernel drops what comes",
        ("nodes",),
    ),
    Door("node", "unix", NOBODY, "none", _GONE, ("nodes", "Ray")),
    Door(
        "engine",
        "tcp",
        MACHINE,
        "127.0.0.1, or `kv_events.endpoint` and `kv_events.replay_endpoint`",
        "nothing: [they show the tokens of prompts](#kv-cache-events)",
        ("KV events",),
    ),
    Door(
        "engine",
        "tcp",
        MACHINE,
        "`--kv-transfer-listen`; of ranks in processes of their own, the ports after it",
        "[the secret](#kv-transfer): CURVE",
        ("KV transfer",),
    ),
    Door(
        "engine",
        "tcp",
        MACHINE,
        "127.0.0.1: plans for Ray's actors; Ray's ports of a driver",
        f"CURVE by a key of the launch; {_TOKEN}",
        ("Ray",),
    ),
    Door("engine", "tcp", NOBODY, "127.0.0.1: the store of the ranks", _STORE, ("Ray",)),
    Door("node", "tcp", MACHINE, "127.0.0.1: Ray's port of an actor", _TOKEN, ("Ray",)),
    Door("Ray's gcs_server, raylet and workers", "tcp", MACHINE, "127.0.0.1", _TOKEN, ("Ray",)),
    Door("Ray's agents", "tcp", MACHINE, "127.0.0.1", f"{_TOKEN}; for figures none", ("Ray",)),
    Door("Ray's monitors", "tcp", MACHINE, "127.0.0.1", _NONE, ("Ray",)),
    Door(
        "Ray's gcs_server, raylet and workers",
        "unix",
        USER,
        "in a folder of the mode 0700, which ends with the engine",
        "the folder",
        ("Ray",),
    ),
)


def table() -> str:
    """All doors, in Markdown."""
    lines = [
        "| process | socket | address | who can connect | what holds | with |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for door in DOORS:
        shown = "all" if len(door.topologies) == len(TOPOLOGIES) else ", ".join(door.topologies)
        shown = "all but one process" if door.topologies == _WITH_ENGINE else shown
        kind = {"tcp": "TCP", "udp": "UDP", "unix": "Unix"}[door.kind]
        lines.append(
            f"| {door.process} | {kind} | {door.address} | {door.reach} | {door.holds} | {shown} |"
        )
    return "\n".join(lines) + "\n"


def page() -> str:
    """docs/security.md as it should be."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
