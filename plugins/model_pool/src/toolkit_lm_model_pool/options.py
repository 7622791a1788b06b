"""The options of a server of several models."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct
from toolkit_lm.config import option, parse_memory
from toolkit_lm.errors import ConfigError

from toolkit_lm_model_pool.durations import parse_seconds


class PoolOptions(Struct, frozen=True, kw_only=True):
    """Options of a server of several models: which ones, and the memory that they share."""

    models: Annotated[
        str | None, option("YAML file of the models to serve, in place of MODEL.", none="no file")
    ] = None
    models_dir: Annotated[
        str | None,
        option("Folder whose subfolders with a config.json are served.", none="no folder"),
    ] = None
    models_memory: Annotated[
        str,
        option(
            "Memory that the loaded models together may take: bytes ('8GiB') or a fraction of the "
            "machine's, or the control group's ('0.8')."
        ),
    ] = "0.7"
    models_keep_alive: Annotated[
        str,
        option(
            "Time after which an idle model is unloaded ('5m', '300'). -1: when another needs its "
            "place; 0: at once."
        ),
    ] = "-1"
    models_turn: Annotated[
        float,
        option(
            "Seconds that a loaded model keeps its place while another waits for it.",
            ge=0,
        ),
    ] = 2.0
    models_timeout: Annotated[
        float, option("Seconds that a request waits for its model to be loaded.", ge=0)
    ] = 120.0

    def __post_init__(self) -> None:
        try:
            parse_memory(self.models_memory)
        except ConfigError as error:
            raise ConfigError(f"models_memory: {error}") from None
        try:
            parse_seconds(self.models_keep_alive)
        except ValueError as error:
            raise ConfigError(f"models_keep_alive: {error}") from None

    @property
    def keep_alive(self) -> float | None:
        """Seconds after which an idle model is unloaded. None: it stays."""
        return parse_seconds(self.models_keep_alive)
