"""The command `toolkit serve`, for one model or several."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, ToolkitError
from toolkit_lm.plugin import Plugins
from toolkit_lm_cli import early_process
from toolkit_lm_commands import engine_command
from toolkit_lm_server.cli import FIRST, run, serve_engine
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.plugin_routes import check_names as check_routes

from toolkit_lm_model_pool.options import PoolOptions

if TYPE_CHECKING:
    from fastapi import FastAPI
    from toolkit_lm_server.health import Readiness
    from toolkit_lm_server.keys import Keys

    from toolkit_lm_model_pool.entries import Entry
    from toolkit_lm_model_pool.model import PooledModel
    from toolkit_lm_model_pool.pool import Pool

logger = logging.getLogger(__name__)


@engine_command(ServerOptions, PoolOptions, first=FIRST)
def serve(
    config: VllmConfig,
    options: ServerOptions,
    pool: PoolOptions,
    plugins: Plugins,
    ctx: typer.Context,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL...", help="More models to serve.")
    ] = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API; or several that share a memory budget."""
    model: str | None = ctx.params.get("model")
    words = [word for word in (model, *(more or ())) if word]
    if len(words) < 2 and pool.models is None and pool.models_dir is None:
        serve_engine(config, options, plugins)
        return
    _check(words, config, options, pool)
    check_routes(plugins, options.routes)
    serve_pool(_reader(words, config, options, pool), options, pool)


def _check(words: list[str], config: VllmConfig, options: ServerOptions, pool: PoolOptions) -> None:
    """Raises ConfigError for options that several models cannot have."""
    sources = [bool(words), pool.models is not None, pool.models_dir is not None]
    if sum(sources) > 1:
        raise ConfigError("give one of: words MODEL, models, models_dir.")
    if config.model.served_model_name:
        raise ConfigError(
            "served_model_name is for one model. Of several each has a name, and aliases, in the "
            "file that models names."
        )
    if config.engine.engine_process is False:
        raise ConfigError("engine_process must be on: each model has a process of its own.")
    if options.max_stored_responses:
        raise ConfigError(
            "max_stored_responses is for one model: what is kept would end with the model's place."
        )


def _reader(
    words: list[str], config: VllmConfig, options: ServerOptions, pool: PoolOptions
) -> Callable[[], list[PooledModel]]:
    """A function that reads the models. It raises ConfigError."""

    def read() -> list[PooledModel]:
        from toolkit_lm_model_pool.model import PooledModel, settings_of

        return [
            PooledModel(entry, settings_of(entry, config, options, pool.keep_alive))
            for entry in _entries(words, pool)
        ]

    return read


def _entries(words: list[str], pool: PoolOptions) -> list[Entry]:
    from toolkit_lm_model_pool.entries import check_names, made_entry, read_entries, read_folder

    if pool.models is not None:
        return read_entries(pool.models)
    entries = (
        list(map(made_entry, words)) if pool.models_dir is None else read_folder(pool.models_dir)
    )
    check_names(entries, [f"MODEL {number + 1}" for number in range(len(entries))])
    return entries


def serve_pool(
    read: Callable[[], list[PooledModel]], options: ServerOptions, pool_options: PoolOptions
) -> None:
    """Serves models that `read` returns, until a signal ends it. Raises ConfigError."""
    from toolkit_lm_model_pool.need import budget_bytes

    # Faults in the file are told before anything is started.
    models = read()
    budget = budget_bytes(pool_options.models_memory)
    process = early_process()

    def make() -> Pool:
        from toolkit_lm_model_pool.pool import Pool

        return Pool(
            models,
            budget,
            turn=pool_options.models_turn,
            timeout=pool_options.models_timeout,
            process=process,
        )

    def make_app(pool: Pool, metrics: Metrics, readiness: Readiness, keys: Keys | None) -> FastAPI:
        from toolkit_lm_model_pool.app import make_pool_app

        pool.ask_reload = _reloader(pool, read)
        return make_pool_app(pool, options, metrics, readiness, keys, read)

    metrics = Metrics(model_name="pool")
    # A model has its own time to start; the server is there at once.
    run("serve", make, make_app, options, metrics, pool_options.models_timeout)


def _reloader(pool: Pool, read: Callable[[], list[PooledModel]]) -> Callable[[], None]:
    """A function that has the models read anew. It is called in the event loop's thread."""
    from toolkit_lm_model_pool.app import reload

    tasks: set[asyncio.Task[None]] = set()

    async def again() -> None:
        try:
            logger.info("models are read anew: %s", await reload(pool, read))
        except ToolkitError as error:
            logger.error("models stay as they are: %s", error)

    def start() -> None:
        task = asyncio.get_running_loop().create_task(again())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    return start
