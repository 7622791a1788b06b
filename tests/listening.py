"""Finds the listening sockets of a process and its descendants, and who can connect: read from
/proc, and tried."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_ACCEPTS = 0x10000
"""Flag of a unix socket that listens."""
NOBODY = "nobody"
USER = "this user"
MACHINE = "all users of the machine"
NETWORK = "the network"


class Listener(NamedTuple):
    """A socket that takes connections, or datagrams."""

    pid: int
    title: str
    kind: str
    """tcp, udp or unix."""
    address: str
    reach: str


def listeners(roots: list[psutil.Process]) -> list[Listener]:
    """Listening sockets of the processes and of all their descendants."""
    found = []
    for process in {one for root in roots for one in (root, *root.children(recursive=True))}:
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            found += [
                Listener(process.pid, title, *one) for one in (*_network(process), *_unix(process))
            ]
    return found


def shared_memory(roots: list[psutil.Process]) -> set[str]:
    """Names by which others could map memory that the processes or their descendants have open or
    mapped. Names that other programs have meanwhile are none of theirs."""
    found = set()
    for process in {one for root in roots for one in (root, *root.children(recursive=True))}:
        folder = Path(f"/proc/{process.pid}")
        with suppress(FileNotFoundError, ProcessLookupError):
            found |= {line.partition("/dev/shm/")[2] for line in _lines(folder / "maps")}
            for descriptor in (folder / "fd").iterdir():
                with suppress(FileNotFoundError):
                    found.add(os.readlink(descriptor).partition("/dev/shm/")[2])
    return {name for name in found if name and not name.endswith(" (deleted)")}


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines()


def _network(process: psutil.Process) -> list[tuple[str, str, str]]:
    found = []
    for one in process.net_connections("inet"):
        kind = "tcp" if one.type == socket.SOCK_STREAM else "udp"
        # A datagram socket with a peer takes nobody else's.
        if one.status == psutil.CONN_LISTEN or (kind == "udp" and not one.raddr):
            host, port = one.laddr
            found.append((kind, f"{host}:{port}", _reach(kind, host, port)))
    return found


def _reach(kind: str, host: str, port: int) -> str:
    address = ipaddress.ip_address(host)
    mapped = getattr(address, "ipv4_mapped", None)
    address = mapped or address
    if kind == "tcp":
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6) as stranger:
            stranger.settimeout(1)
            try:
                stranger.connect(
                    (
                        "127.0.0.1"
                        if address.is_unspecified and address.version == 4
                        else str(address),
                        port,
                    )
                )
            except TimeoutError:
                return NOBODY
    return MACHINE if address.is_loopback else NETWORK


def _unix(process: psutil.Process) -> list[tuple[str, str, str]]:
    inodes = set()
    for entry in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    found = []
    for line in Path(f"/proc/{process.pid}/net/unix").read_text().splitlines()[1:]:
        _, _, _, flags, _, _, inode, *path = line.split(maxsplit=7)
        if inode in inodes and int(flags, 16) & _ACCEPTS:
            found.append(("unix", path[0] if path else "", _reach_of_path(path[0] if path else "")))
    return found


def _reach_of_path(path: str) -> str:
    if path.startswith("@"):
        return MACHINE
    if not path or not os.path.exists(path):
        return NOBODY
    is_private = any(
        (status := folder.stat()).st_uid == os.getuid()
        and not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH)
        for folder in Path(path).parents
    )
    return USER if is_private else MACHINE
