"""The hook that this plugin brings, and the registry that it fills."""

from __future__ import annotations

from toolkit_lm.plugin import hookspec

from toolkit_lm_pooling_adapters.registry import ScoreTemplateRegistry


@hookspec
def toolkit_register_score_templates(templates: ScoreTemplateRegistry) -> None:
    """Registers score templates: the prompts in which rerankers made of language models read a query and a document.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are called.
    """


REGISTRIES = {"toolkit_register_score_templates": ScoreTemplateRegistry}
"""By hook: what the loader fills."""
