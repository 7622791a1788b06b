"""Registries of renderers, and of answer formats, which separate reasoning and tool calls from
content."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin.registries.backends import AttentionBackendRegistry
from toolkit_lm.plugin.registry import Entry, Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererEntry(Entry):
    """A renderer class."""

    reads: tuple[str, ...] = ()
    """File names. The renderer can read a checkpoint folder that holds any of them. Empty: it is
    selected only by name, or through `asks_servers`."""
    asks_servers: bool = False
    """The renderer asks servers, and is selected if the option renderer_url names some."""


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
        """Registers a renderer class. Among the classes that do not refuse a checkpoint, the one of
        the highest priority is selected.

        `reads`: file names; a folder must hold one of them for the class to be asked.
        `asks_servers`: the class is selected if the option renderer_url names servers.
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

    def find_format(self, kind: str, template: str, wanted: str = "auto") -> str | None:
        """Name of the format that finds `kind`, "tool_calls" or "reasoning", in answers to prompts
        of a template.

        `wanted`: a name, auto or none. None: no format finds it. Raises ConfigError for an unknown
        name, or a format that cannot find `kind`. Raises PluginError if a plugin fails.
        """
        if wanted == "none":
            return None
        if wanted == "auto":
            entries = sorted(self.entries(), key=lambda entry: -entry.priority)
            return next(
                (
                    e.key
                    for e in entries
                    if kind in self.load(e.key).finds and self.ask(e.key, template) is None
                ),
                None,
            )
        if kind not in self.load(wanted).finds:
            able = ", ".join(key for key in self if kind in self.load(key).finds)
            raise ConfigError(
                f"answer parser {wanted!r} finds no {kind.replace('_', ' ')}. Those that do: "
                f"{able}."
            )
        return wanted
