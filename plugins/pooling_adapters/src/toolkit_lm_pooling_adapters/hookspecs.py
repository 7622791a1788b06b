"""The hooks that this plugin brings, and the registries that they fill."""

from __future__ import annotations

from toolkit_lm.plugin import hookspec

from toolkit_lm_pooling_adapters.registry import PairRendererRegistry, ScoreTemplateRegistry


@hookspec
def toolkit_register_score_templates(templates: ScoreTemplateRegistry) -> None:
    """Registers score templates: the prompts in which rerankers made of language models read a
    query and a document.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


@hookspec
def toolkit_register_pair_renderers(renderers: PairRendererRegistry) -> None:
    """Registers what reads a query and a document as one text, for rerankers that are language
    models.

    Caller: the loader. Process: every one. Thread: main. Return: nothing; all implementations are
    called.
    """


REGISTRIES = {
    "toolkit_register_score_templates": ScoreTemplateRegistry,
    "toolkit_register_pair_renderers": PairRendererRegistry,
}
"""Registry that the loader fills for each hook."""
