"""Whisper. This entry module only registers it; the rest is imported when it is selected."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit_lm.param_spec import ProcessorParams
from toolkit_lm.plugin import LogitsProcessorRegistry, ModelRegistry, hookimpl
from toolkit_lm_commands import CommandRegistry

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm import AsyncLLM


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    target = "toolkit_lm_whisper.model:WhisperForConditionalGeneration"
    rules = "toolkit_lm_whisper.rules:WhisperRules"
    models.add(
        "WhisperForConditionalGeneration",
        target,
        model_type="whisper",
        length_keys=("max_target_positions",),
        encoder_decoder=rules,
    )


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    # Requests cannot ask for them: the model's rules do.
    processors.add(
        "whisper_suppress",
        "toolkit_lm_whisper.suppress:Suppress",
        params=ProcessorParams,
        priority=1,
    )
    processors.add(
        "whisper_timestamps", "toolkit_lm_whisper.timestamps:Timestamps", params=ProcessorParams
    )


# Optional, as routes are: models are served without these plugins, too.
@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "transcribe",
        "toolkit_lm_whisper.cli:transcribe",
        help="Transcribe recordings with a Whisper model, offline.",
    )


@hookimpl(optionalhook=True)
def toolkit_register_routes(router: APIRouter, engine: AsyncLLM) -> None:
    from toolkit_lm_whisper.routes import add_routes

    add_routes(router, engine)
