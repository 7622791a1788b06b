"""The page at `/`, and the stream of its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi.routing import APIRoute
from toolkit_lm import __version__

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.event_stream import EventStream
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.ui.files import PAGE, add_files
from toolkit_lm_server.ui.log_tail import LogTail
from toolkit_lm_server.ui.watch import PERIOD, Watch

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

    from toolkit_lm_server.health import Readiness
    from toolkit_lm_server.watched import Watched

_MOST_ONLOOKERS = 8
_OF_ALL_TEMPLATES = {
    *("messages", "documents", "add_generation_prompt", "continue_final_message"),
    *("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"),
    *("raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner"),
    *("namespace", "loop"),
}
"""Names in chat templates that no client sets."""
_MOST_NAMES = 64


class Page:
    """A page with a chat and a live view of the engine. All may load it. Its events are behind the
    API key."""

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        # Where clients have keys of their own, they are strangers to each other.
        self._is_private = options.api_keys_file is None and len(options.own_keys) < 2
        self._needs_key = options.needs_key
        self.log = LogTail(options.own_keys)
        self.watch = Watch(metrics, shows_requests=self._is_private)

    def add_routes(
        self,
        router: APIRouter,
        kind: type[APIRoute],
        readiness: Readiness,
        engine: ServingEngine | None,
    ) -> None:
        """`kind`: class of the route that is behind the API key. `engine`: None while it is being
        made."""
        add_files(router, ("/", "index.html"), "/ui", PAGE)
        # A request may reach these routes while the engine's take their place.
        early = readiness.engine if engine is None else None

        async def events() -> Response:
            """Streams the page's content as it changes."""
            self._check_onlookers()
            stream = self._events(readiness, engine, early)
            return EventStream(stream, stream)

        router.add_api_route(
            "/ui/events",
            events,
            response_model=None,
            include_in_schema=False,
            route_class_override=kind,
        )

    def _check_onlookers(self) -> None:
        if self.watch.num_onlookers >= _MOST_ONLOOKERS:
            raise ApiError(
                429, f"{_MOST_ONLOOKERS} pages are open already.", code="rate_limit_exceeded"
            )

    async def _events(
        self, readiness: Readiness, engine: ServingEngine | None, early: Watched | None = None
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The page's events: a description whenever it may have changed, then views. They end when
        the engine is there, or the server is to end. `early`: what is watched while the engine is
        being made."""
        # Others may have come at the same time.
        self._check_onlookers()
        watched = early or readiness.engine
        described = ""
        last_line = 0
        last: dict[str, Any] = {}
        with self.watch.looking():
            while readiness.engine is watched and not readiness.draining:
                news = []
                view = self.watch.view(watched)
                if view["status"] != described:
                    described = view["status"]
                    head = {
                        "type": "server",
                        "version": __version__,
                        "ready": described == "ready",
                        "docs": not self._needs_key,
                    }
                    news.append({**head, **_described(engine)})
                lines = self.log.since(last_line) if self._is_private else []
                if lines:
                    last_line = lines[-1].number
                    news.append({"type": "log", "lines": [line._asdict() for line in lines]})
                if view is not last:
                    news.append(view)
                    last = view
                yield news
                await asyncio.sleep(PERIOD)


def _described(engine: ServingEngine | None) -> dict[str, Any]:
    """The served model, and its plugins."""
    if engine is None:
        return {"model": None, "plugins": []}
    config = engine.config
    rules = engine.renderer.rules
    checkpoint = config.checkpoint
    names = engine.renderer.template_names
    model = {
        "name": config.served_model_name,
        "architecture": None if checkpoint is None else checkpoint.architecture,
        "tasks": engine.tasks,
        "dtype": config.model.dtype,
        "device": config.device.device,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "block_size": config.cache.block_size,
        "takes_images": rules is not None and "image" in rules.modalities,
        "takes_audio": rules is not None and "audio" in rules.modalities,
        "template_reads": None
        if names is None
        else sorted(names - _OF_ALL_TEMPLATES)[:_MOST_NAMES],
    }
    # Why one is broken may name files: `toolkit plugins list` tells that.
    known = engine.plugins.infos
    plugins = [
        {
            "name": figure.name,
            "distribution": figure.distribution,
            "version": figure.version,
            "status": figure.status,
        }
        for figure in known
    ]
    return {"model": model, "plugins": plugins}
