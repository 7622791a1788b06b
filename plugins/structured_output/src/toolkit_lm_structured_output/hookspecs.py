"""The hook that this plugin brings, and the registry that it fills."""

from __future__ import annotations

from toolkit_lm.plugin import hookspec

from toolkit_lm_structured_output.registry import StructuredOutputRegistry


@hookspec
def toolkit_register_structured_output(backends: StructuredOutputRegistry) -> None:
    """Registers what compiles the grammars of structured output.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


REGISTRIES = {"toolkit_register_structured_output": StructuredOutputRegistry}
"""Registry that the loader fills for each hook."""
