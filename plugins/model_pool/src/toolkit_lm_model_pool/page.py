"""The page at `/` of a pool: a chat with one of the models, their states, and their memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from toolkit_lm import __version__
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.ui.page import Page
from toolkit_lm_server.ui.watch import PERIOD

from toolkit_lm_model_pool.model import PooledModel
from toolkit_lm_model_pool.names import may_use
from toolkit_lm_model_pool.pool import Pool

if TYPE_CHECKING:
    from toolkit_lm_server.health import Readiness
    from toolkit_lm_server.watched import Watched
    from toolkit_lm_serving.engine import ServingEngine


class PoolPage(Page):
    """The page of several models. A key sees those that it may use."""

    def __init__(self, pool: Pool, options: ServerOptions, metrics: Metrics) -> None:
        super().__init__(options, metrics)
        self._pool = pool
        self._manages = options.admin_routes

    async def _events(
        self, readiness: Readiness, engine: ServingEngine | None, early: Watched | None = None
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The page's events: the models whenever they have changed, and lines of the log."""
        self._check_onlookers()
        last: dict[str, Any] = {}
        last_line = 0
        with self.watch.looking():
            while not readiness.draining:
                view = self._view()
                news = [] if view == last else [view]
                if not last:
                    news.append(self._described())
                last = view
                lines = self.log.since(last_line) if self._is_private else []
                if lines:
                    last_line = lines[-1].number
                    news.append({"type": "log", "lines": [line._asdict() for line in lines]})
                yield news
                await asyncio.sleep(PERIOD)

    def _seen(self) -> list[PooledModel]:
        return [model for model in self._pool.models.values() if may_use(model)]

    def _view(self) -> dict[str, Any]:
        """The models as they are now."""
        now = time.monotonic()
        models = [
            {
                "name": model.name,
                "state": model.state,
                "reason": model.reason,
                "progress": model.progress(now),
                "bytes": model.charge,
                "holds": model.holds,
                "in_flight": model.in_flight,
                "waiting": len(model.waiters),
                "loads": model.num_loads,
                "pinned": model.entry.pin,
                "generates": _generates(model),
            }
            for model in self._seen()
        ]
        return {
            "type": "pool",
            "budget": self._pool.budget,
            "used": sum(model["holds"] for model in models),
            "manages": self._manages,
            "models": models,
        }

    def _described(self) -> dict[str, Any]:
        """The server, and the model that is chosen at first."""
        seen = self._seen()
        able = [model for model in seen if _generates(model)]
        first = next(iter(able or seen), None)
        others = len(seen) - 1
        model = first and {
            "name": first.name,
            "architecture": f"and {others} other model{'s' if others > 1 else ''}"
            if others
            else "",
            "tasks": ["generate"] if able else [],
            "dtype": None,
            "device": "auto",
            "max_model_len": None if first.resolved is None else first.resolved.max_model_len,
            # The model tells where it takes none: it may not be loaded yet.
            "takes_images": True,
            "takes_audio": True,
            "template_reads": None,
        }
        return {
            "type": "server",
            "version": __version__,
            "ready": True,
            "docs": not self._needs_key,
            "model": model,
            "plugins": [],
        }


def _generates(model: PooledModel) -> bool:
    """Whether the model may generate text. True where its checkpoint could not be read."""
    return model.resolved is None or model.resolved.model.runner != "pooling"
