"""Renderers, and answer formats: what tells reasoning and tool calls from content."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin.registries.backends import AttentionBackendRegistry
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


class ParserRegistry(AttentionBackendRegistry):
    """Answer formats, by the names that the server's options tool_call_parser and reasoning_parser
    give."""

    noun = "answer parser"
    base = "toolkit_lm.renderer:AnswerFormat"

    def find_format(self, what: str, template: str, wanted: str = "auto") -> str | None:
        """The name of the format by which `what`, "tool_calls" or "reasoning", is found in answers
        to prompts of a template.

        `wanted`: a name, auto or none. None: it is found by none. Raises ConfigError for a name
        that no plugin has, or that finds no such thing, PluginError where a plugin fails.
        """
        if wanted == "none":
            return None
        if wanted == "auto":
            entries = sorted(self.entries(), key=lambda entry: -entry.priority)
            return next(
                (
                    e.key
                    for e in entries
                    if what in self.load(e.key).finds and self.ask(e.key, template) is None
                ),
                None,
            )
        if what not in self.load(wanted).finds:
            able = ", ".join(key for key in self if what in self.load(key).finds)
            raise ConfigError(
                f"answer parser {wanted!r} finds no {what.replace('_', ' ')}. Those that do: "
                f"{able}."
            )
        return wanted
