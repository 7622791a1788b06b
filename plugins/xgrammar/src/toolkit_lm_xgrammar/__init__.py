"""Structured output by xgrammar. This entry module only registers it; xgrammar, which imports
torch, is imported by the sampler."""

from toolkit_lm.plugin import hookimpl
from toolkit_lm_structured_output.registry import StructuredOutputRegistry


@hookimpl(optionalhook=True)
def toolkit_register_structured_output(backends: StructuredOutputRegistry) -> None:
    backends.add("xgrammar", "toolkit_lm_xgrammar.reader:XGrammarReader")
