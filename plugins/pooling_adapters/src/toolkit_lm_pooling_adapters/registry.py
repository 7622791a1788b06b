"""The registries that this plugin brings."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import Entry, PlainRegistry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTemplateEntry(Entry):
    """A score template."""

    architectures: tuple[str, ...] = ()
    """Reranker architectures that use this template by default."""


class ScoreTemplateRegistry(Registry[ScoreTemplateEntry]):
    """The prompts of rerankers, by the name that the option score_template gives."""

    noun = "score template"
    missing = ConfigError
    base = None

    def add(
        self, name: str, target: str, *, architectures: tuple[str, ...] = (), override: bool = False
    ) -> None:
        """Registers a ScoreTemplate. Its module must not import torch: the front, which has none,
        uses it.

        `architectures`: of language models that, where they have no trained classifier and are to
        classify, are rerankers of this kind.
        """
        self.add_entry(
            ScoreTemplateEntry,
            name,
            target,
            "module:NAME",
            architectures=tuple(architectures),
            override=override,
        )


class PairRendererRegistry(PlainRegistry):
    """Renderers of a query and a document as one text, by name.

    A target is a function (config, renderer, plugins) ->
    toolkit_lm_pooling_adapters.pair_renderer.PairRenderer | None. Its module imports no torch.
    `config` is the resolved config of a pooling engine; `plugins` is the loaded set. None: queries
    and documents stay pairs."""

    noun = "pair renderer"
