"""vLLM's names: of options, flags and classes. A script of vLLM's imports from here what it
imported from vllm:

    from toolkit_lm_vllm_names import LLM, EngineArgs, SamplingParams

This entry module only registers them; each is imported when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader
from toolkit_lm.plugin import (
    LogitsProcessorRegistry,
    OptionNamesRegistry,
    PartRegistry,
    hookimpl,
)
from toolkit_lm_commands import CommandRegistry, FlagNamesRegistry

from toolkit_lm_vllm_names.arguments import (
    EmbedsArguments,
    Options as Options,
    ProcessorArguments,
    TraceArguments,
)

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_server.plugin_routes import OpenAIApi

# The names, and the modules that define them, stand in __init__.pyi. `dir()` does not list them:
# the loader of plugins looks at all that it lists in an entry module.
__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)


@hookimpl
def toolkit_register_option_names(option_names: OptionNamesRegistry) -> None:
    option_names.add("vllm", "toolkit_lm_vllm_names.table:translate")


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    target = "toolkit_lm_vllm_names.vllm_processors:VllmProcessors"
    processors.add("vllm_processors", target, params=ProcessorArguments)
    target = "toolkit_lm_vllm_names.trace_replay:TraceReplay"
    processors.add("trace_replay", target, params=TraceArguments)
    processors.add("prompt_embeds", None, params=EmbedsArguments)


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "prompt_embeds",
        request="toolkit_lm_vllm_names.prompt_embeds:EmbedsRequests",
        worker="toolkit_lm_vllm_names.embeds_part:EmbedsPart",
        for_model="toolkit_lm_vllm_names.prompt_embeds:is_enabled",
    )


# Optional: what else it brings works without the command line, too.
@hookimpl(optionalhook=True)
def toolkit_register_flag_names(flag_names: FlagNamesRegistry) -> None:
    flag_names.add("vllm", "toolkit_lm_vllm_names.flags:translate_flags")


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "migrate-vllm",
        "toolkit_lm_vllm_names.migrate:migrate_vllm",
        help="Translate a `vllm serve` line.",
    )


@hookimpl(optionalhook=True)
def toolkit_register_routes(router: APIRouter, api: OpenAIApi) -> None:
    from toolkit_lm_vllm_names.token_routes import add_routes

    add_routes(router, api)
