"""Structured output: what requests ask for, and what holds their tokens to it. Other plugins bring
what compiles grammars."""

from types import ModuleType

from msgspec import Struct
from toolkit_lm.plugin import LogitsProcessorRegistry, hookimpl

from toolkit_lm_structured_output import hookspecs
from toolkit_lm_structured_output.params import StructuredOutputs


class Options(Struct, frozen=True):
    """`--plugin-option structured_output.NAME=...`"""

    backend: str = "auto"
    """Grammar compiler: llguidance, xgrammar, or another plugin's. auto: llguidance if it is
    installed, else the first that is."""


@hookimpl
def toolkit_register_hookspecs() -> ModuleType:
    return hookspecs


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    target = "toolkit_lm_structured_output.processor:StructuredOutput"
    # It has the last word: what the grammar rules out must not come back, and at its end one token
    # must be left.
    processors.add("structured_outputs", target, params=StructuredOutputs, priority=-10_000)
