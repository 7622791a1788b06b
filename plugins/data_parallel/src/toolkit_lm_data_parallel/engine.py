"""One of several engines: its process, and the requests sent to it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence

from toolkit_lm.config import VllmConfig
from toolkit_lm.engine import EngineInfo, EngineState, ProcessClient
from toolkit_lm.errors import ToolkitError
from toolkit_lm.params import FinishReason
from toolkit_lm.plugin import Plugins

from toolkit_lm_data_parallel.in_flight import InFlight
from toolkit_lm_data_parallel.placement import launch
from toolkit_lm_data_parallel.routing import Choice, PrefixMirror

_MOST_BLOCKS = 2**16
"""Blocks of prompts that are remembered for an engine."""
_MOST_KEYS = 2**14
"""Keys of requests that are remembered for an engine."""
KEY = "prompt_cache_key"
"""Key of a request's context. Requests with the same value go to the same engine, unless that is
much fuller."""
AFFINITY = 1024
"""Cached tokens that a key stands for at least."""


class Engine:
    """An engine by its number. Its process dies and is started anew; number and counts stay."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.client: ProcessClient | None = None
        """None: its process is dead."""
        self.info: EngineInfo | None = None
        """Set while it is ready."""
        self.error: ToolkitError | None = None
        """Error that its process died of."""
        self.num_restarts = 0
        self.requests: dict[str, InFlight] = {}
        """Requests by id, in order of arrival."""
        self.num_tokens = 0
        """In flight: of all of these."""
        self.ending: dict[str, tuple[InFlight, FinishReason]] = {}
        """Requests that were ended from outside, by id, until the engine tells of it. Only where
        somebody watches."""
        self._prefixes = PrefixMirror(_MOST_BLOCKS)
        self._keys: OrderedDict[str, None] = OrderedDict()
        """The keys of the requests that it was sent last."""
        self._busy_since = 0.0

    def start(self, config: VllmConfig, plugins: Plugins) -> None:
        """Starts its process, which loads. Raises ToolkitError."""
        process = launch(config, self.number)
        try:
            self.client = ProcessClient(config, plugins, process)
        except BaseException:
            process.end()
            raise

    def set_ready(self, info: EngineInfo) -> None:
        self.info = info
        self.error = None
        # It holds no more.
        self._prefixes.max_blocks = min(
            _MOST_BLOCKS, sum(pool.num_blocks for pool in info.kv_cache.pools)
        )

    def end(self, error: ToolkitError | None = None) -> list[InFlight]:
        """Its process is ended, if it has not died of `error`. Returns the requests that it had."""
        if self.client is not None:
            self.client.shutdown()
        left = list(self.requests.values())
        self.client = None
        self.info = None
        self.error = error
        self.requests = {}
        self.num_tokens = 0
        self.ending = {}
        self._prefixes.clear()
        self._keys.clear()
        return left

    @property
    def progress_time(self) -> float | None:
        """time.monotonic() of its last sign of life, or of its first work after idling. None: no
        request waits for it."""
        if self.client is None or self.info is None or not self.requests:
            return None
        return max(self.client.progress_time, self._busy_since)

    @property
    def state(self) -> EngineState:
        """From any thread."""
        client = self.client
        info = self.info
        error = self.error
        reason = ""
        if info is not None:
            status = "ready"
        elif client is None:
            status = "dead"
            reason = str(error or "")
        else:
            status = "restarting" if self.num_restarts else "starting"
            reason = client.phase
        pid = None if client is None else client.process.pid
        return EngineState(
            status,  # type: ignore[arg-type]
            reason,
            pid,
            len(self.requests),
            self.num_tokens,
            self.num_restarts,
        )

    def choice(self, request: InFlight, block_size: int) -> Choice:
        """Load and cached tokens of this engine, to choose one for a request."""
        if not request.request.reads_prefix_cache:
            return Choice(self.num_tokens, 0)
        num_cached = self._prefixes.num_cached(request.hashes) * block_size
        if (key := request.request.context.get(KEY)) is not None and key in self._keys:
            num_cached = max(num_cached, AFFINITY)
        return Choice(self.num_tokens, num_cached)

    def add(self, request: InFlight) -> None:
        """It is to get a request."""
        if not self.requests:
            self._busy_since = time.monotonic()
        request.engine = self.number
        self.requests[request.request.request_id] = request
        self.num_tokens += request.num_tokens
        self._prefixes.add(request.hashes)
        if (key := request.request.context.get(KEY)) is not None:
            self._keys[key] = None
            self._keys.move_to_end(key)
            if len(self._keys) > _MOST_KEYS:
                self._keys.popitem(last=False)

    def remove(self, request: InFlight) -> None:
        """The request has ended, or goes elsewhere."""
        del self.requests[request.request.request_id]
        self.num_tokens -= request.num_tokens

    def send(self, requests: Sequence[InFlight]) -> None:
        """Sends the added requests. Raises RequestError, and the error that its process died of."""
        if self.client is not None:
            self.client.add([request.message() for request in requests])

    def forget_prefixes(self) -> None:
        self._prefixes.clear()
        self._keys.clear()
