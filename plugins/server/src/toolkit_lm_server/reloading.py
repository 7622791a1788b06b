"""Certificates and API keys, which are read again when their files change, and on SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable

from toolkit_lm.errors import ConfigError

from toolkit_lm_server.keys import Keys, keys_of
from toolkit_lm_server.limits.connections import Connections
from toolkit_lm_server.listening import tls_context
from toolkit_lm_server.log import Clock
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.supervisor import Supervisor

logger = logging.getLogger(__name__)

_INTERVAL = 5.0
"""Seconds from one look at the files to the next."""
State = list[tuple[int, int, int] | None]
"""Inode, size and time of change of each file. None for a file that cannot be found."""


class Reloading:
    """Keeps a server's certificates and keys as their files have them. Files with a fault change
    nothing, and are logged."""

    def __init__(
        self,
        options: ServerOptions,
        keys: Keys | None,
        connections: Connections,
        supervisor: Supervisor,
        seconds: float = _INTERVAL,
    ) -> None:
        self._options = options
        self._keys = keys
        self._connections = connections
        self._supervisor = supervisor
        certificates = (options.ssl_certfile, options.ssl_keyfile, options.ssl_ca_certs)
        self._files = [path for path in (*certificates, options.api_keys_file) if path is not None]
        self._clock = Clock(seconds)
        self._state = state_of(self._files)
        self._is_asked = False

    def ask(self) -> None:
        """Has the files read at the next call of `tend`."""
        self._is_asked = True

    async def tend(self, status: str) -> None:
        """Reads the files where they have changed, or where it was asked for. Call it often.
        `status`: the server's, for the supervisor."""
        is_asked = self._is_asked
        if not is_asked and (not self._files or self._clock.elapsed() is None):
            return
        self._is_asked = False
        state = await asyncio.to_thread(state_of, self._files)
        if not is_asked and state == self._state:
            return
        self._state = state
        if is_asked:
            self._supervisor.reloading()
        await self._read("SIGHUP" if is_asked else "a file has changed")
        if is_asked:
            self._supervisor.ready(status)

    async def _read(self, why: str) -> None:
        done = []
        try:
            if self._options.ssl_certfile is not None:
                self._connections.context = await asyncio.to_thread(tls_context, self._options)
                done.append("the certificate")
            if self._keys is not None and self._options.api_keys_file is not None:
                self._keys.replace(await asyncio.to_thread(keys_of, self._options))
                done.append(f"{len(self._keys.accounts)} API keys")
        except ConfigError as error:
            logger.error("Reloading (%s): what was read before stays: %s", why, error)
        if done or not self._files:
            shown = " and ".join(done) or "nothing: there are no certificates and no file of keys"
            logger.info("Reloaded %s (%s)", shown, why)


def state_of(files: Iterable[str]) -> State:
    """The state of files, by which a change is seen."""
    return [_state(path) for path in files]


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
