"""Renderers."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit_lm.plugin.registry import Entry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererEntry(Entry):
    """A renderer class."""

    reads: tuple[str, ...] = ()
    """File names; it can read a checkpoint folder that holds any of them. Empty: it is taken by its
    name only."""


class RendererRegistry(Registry[RendererEntry]):
    """Renderers, by name."""

    noun = "renderer"
    base = "toolkit_lm.renderer:Renderer"

    def add(
        self,
        name: str,
        target: str,
        *,
        reads: tuple[str, ...] = ("tokenizer.json",),
        priority: int = 0,
        override: bool = False,
    ) -> None:
        """Registers a renderer class. Of those that do not refuse a checkpoint, the one of the
        highest priority is chosen.

        `reads`: file names, any of which a folder must hold for the class to be asked.
        """
        self.add_entry(
            RendererEntry,
            name,
            target,
            "module:Class",
            reads=tuple(reads),
            priority=priority,
            override=override,
        )
