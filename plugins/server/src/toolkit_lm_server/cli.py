"""The commands `toolkit serve` and `toolkit render`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli import early_process
from toolkit_lm_commands import engine_command

from toolkit_lm_server.listening import listen, tls_context
from toolkit_lm_server.log import ACCESS, configure
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.plugin_routes import check_names
from toolkit_lm_server.standard_streams import logging_in_threads, open_closed_streams
from toolkit_lm_server.supervisor import Supervisor
from toolkit_lm_server.threads import CLOSING, SharedThreads, close, in_thread
from toolkit_lm_server.title import set_title

if TYPE_CHECKING:
    from fastapi import FastAPI
    from toolkit_lm import AsyncLLM

    from toolkit_lm_server.health import Readiness
    from toolkit_lm_server.keys import Keys
    from toolkit_lm_server.lifecycle import MakeApp, ServableT
    from toolkit_lm_server.rendering import Rendering
    from toolkit_lm_server.ui.page import Page


_WAITING = 64
"""Threads of a server whose threads mostly wait for render servers."""
FIRST = (
    "host",
    "port",
    "api_key",
    "api_keys_file",
    "served_model_name",
    "dtype",
    "quantization",
    "device",
    "tensor_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_memory",
)
"""Options that `toolkit serve --help` explains first."""
_ALONE = 0.5
"""Seconds that the making of the engine has the interpreter to itself. The engine's process waits
for what it is to load."""


@engine_command(ServerOptions, first=FIRST)
def serve(config: VllmConfig, options: ServerOptions, plugins: Plugins) -> None:
    """Serve a model over HTTP, with OpenAI's API."""
    serve_engine(config, options, plugins)


class EngineParts(NamedTuple):
    """The parts of a Lifecycle that serves one engine."""

    make: Callable[[], AsyncLLM]
    make_app: MakeApp[AsyncLLM]
    metrics: Metrics
    threads: SharedThreads | None
    make_page: Callable[[], Page | None]


def serve_engine(config: VllmConfig, options: ServerOptions, plugins: Plugins) -> None:
    """Serves an engine until a signal ends it. Raises ToolkitError."""
    make, make_app, metrics, threads, make_page = engine_parts(config, options, plugins)
    run("serve", make, make_app, options, metrics, config.engine.start_timeout, threads, make_page)


def engine_parts(config: VllmConfig, options: ServerOptions, plugins: Plugins) -> EngineParts:
    """The parts that serve an engine. Raises ConfigError for an option that is known to be wrong
    before the engine starts."""
    if config.scheduler.scheduling_policy is None:
        config = config.replace(scheduling_policy="fair")
    metrics = Metrics(model_name=config.served_model_name)
    plugins.add_listener(metrics.name, metrics.toolkit_event)
    check_names(plugins, options.routes)
    process = early_process()

    def make() -> AsyncLLM:
        from toolkit_lm import AsyncLLM

        return AsyncLLM(config, plugins=plugins, wait=False, process=process)

    @cache
    def make_page() -> Page | None:
        from toolkit_lm_server.ui.page import Page

        return Page(options, metrics) if options.ui else None

    def make_app(
        engine: AsyncLLM, metrics: Metrics, readiness: Readiness, keys: Keys | None
    ) -> FastAPI:
        from toolkit_lm_server.app import create_app

        return create_app(
            engine, options, metrics=metrics, readiness=readiness, page=make_page(), keys=keys
        )

    # The words of sampling parameters that are rendered elsewhere are waited for.
    threads = SharedThreads(_WAITING, waiting=True) if config.renderer.renderer_url else None
    return EngineParts(make, make_app, metrics, threads, make_page)


@engine_command(ServerOptions)
def render(config: VllmConfig, options: ServerOptions, plugins: Plugins) -> None:
    """Serve a model's renderer over HTTP: prompts and conversations to tokens, and tokens to text.
    No engine runs."""
    if options.routes:
        raise ConfigError("routes of plugins need an engine: leave --routes to toolkit serve.")

    def make() -> Rendering:
        from toolkit_lm_server.rendering import Rendering

        return Rendering(config, plugins)

    def make_app(
        rendering: Rendering, metrics: Metrics, readiness: Readiness, keys: Keys | None
    ) -> FastAPI:
        from toolkit_lm_server.rendering import create_render_app

        return create_render_app(
            rendering, options, metrics=metrics, readiness=readiness, keys=keys
        )

    metrics = Metrics(model_name=config.served_model_name)
    run("render", make, make_app, options, metrics, config.engine.start_timeout)


def _end_at_once(uds: str | None, *_: object) -> None:
    """Ends this process, and the engine with it. No request is under way yet."""
    if uds is not None:
        with suppress(OSError):
            os.unlink(uds)
    os._exit(0)


def run(
    command: str,
    make: Callable[[], ServableT],
    make_app: MakeApp[ServableT],
    options: ServerOptions,
    metrics: Metrics,
    start_timeout: float,
    threads: SharedThreads | None = None,
    make_page: Callable[[], Page | None] = lambda: None,
) -> None:
    """Serves while `make` runs, and then what it made, until a signal ends it."""
    open_closed_streams()
    supervisor = Supervisor.of_environ(os.environ)
    # A tokenizer whose regular expression takes too many steps panics, in Rust: its report has 3
    # lines, and 60 with a stack.
    if os.environ.get("RUST_BACKTRACE") != "full":
        os.environ["RUST_BACKTRACE"] = "0"
    configure(options)
    # A fault in them is reported before the engine starts.
    context = tls_context(options)
    if options.middleware:
        from toolkit_lm_server.around import load_middleware

        load_middleware(options.middleware)
    with listen(options) as listener:
        set_title(f"toolkit-lm {command} {metrics.model_name}")
        # Until the lifecycle handles them: a KeyboardInterrupt in the middle of an import can keep
        # a lock that the thread's imports need.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, partial(_end_at_once, options.uds))
        # Plugins and files may keep it for long, while the server answers already.
        making = in_thread(make)
        try:
            wait([making], _ALONE)
            from toolkit_lm_server.lifecycle import Lifecycle

            lifecycle = Lifecycle(
                making,
                make_app,
                options,
                metrics,
                listener,
                threads,
                make_page(),
                start_timeout,
                context,
                supervisor,
            )
            with logging_in_threads("", ACCESS):
                asyncio.run(lifecycle.run())
        finally:
            wait([close(making)], CLOSING)
