"""OpenAI's `/v1/moderations` over a model that classifies. This entry module only registers it; the
rest is imported when routes are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_server.plugin_routes import OpenAIApi


class Options(Struct, frozen=True):
    """`--plugin-option moderations.NAME=...`"""

    threshold: float = 0.5
    """Probability from which a label is a category that flags an input."""
    safe_labels: list[str] | None = None
    """Labels of texts with nothing to flag. None: those with a name such as "safe" or "neutral".
    Empty: none, so each label is a category."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise ConfigError(
                "moderations.threshold must be a probability above 0, at most 1, not "
                f"{self.threshold}."
            )


# Optional: the distribution may be installed where the server's plugin is not in use.
@hookimpl(optionalhook=True)
def toolkit_register_routes(router: APIRouter, options: Options, api: OpenAIApi) -> None:
    from toolkit_lm_vendor_apis.moderations.routes import add_routes

    add_routes(router, options, api)
