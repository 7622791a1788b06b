"""KServe's API of version 2, the Open Inference Protocol. This entry module only registers it; the
rest is imported when routes are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit_lm.plugin import hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_server.plugin_routes import OpenAIApi


# Optional: the distribution may be installed where the server's plugin is not in use.
@hookimpl(optionalhook=True)
def toolkit_register_routes(router: APIRouter, api: OpenAIApi) -> None:
    from toolkit_lm_vendor_apis.kserve.routes import add_routes

    add_routes(router, api)
