"""Renderers."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit_lm.plugin.registry import Entry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererEntry(Entry):
    """A renderer class."""

    reads: tuple[str, ...] = ()
    """File names; it can read a checkpoint folder that holds any of them. Empty: it is taken by its
    name only, or where `asks_servers`."""
    asks_servers: bool = False
    """It asks servers, and is taken where the option renderer_url names some."""


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
        asks_servers: bool = False,
        priority: int = 0,
        override: bool = False,
    ) -> None:
        """Registers a renderer class. Of those that do not refuse a checkpoint, the one of the
        highest priority is chosen.

        `reads`: file names, any of which a folder must hold for the class to be asked.
        `asks_servers`: it is taken where the option renderer_url names servers.
        """
        self.add_entry(
            RendererEntry,
            name,
            target,
            "module:Class",
            reads=tuple(reads),
            asks_servers=asks_servers,
            priority=priority,
            override=override,
        )
