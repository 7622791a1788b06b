"""Recordings to text by models that hear: `toolkit transcribe`, and OpenAI's routes of audio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit_lm.plugin import hookimpl
from toolkit_lm_commands import CommandRegistry

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


# Optional: each is of use without the other.
@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "transcribe",
        "toolkit_lm_transcription.cli:transcribe",
        help="Transcribe recordings with a model that hears, offline.",
    )


@hookimpl(optionalhook=True)
def toolkit_register_routes(router: APIRouter, engine: ServingEngine, api: OpenAIApi) -> None:
    from toolkit_lm_transcription.routes import add_routes

    add_routes(router, engine, api.engines)
