"""Options as other projects name them."""

from __future__ import annotations

from typing import Any

from toolkit_lm.plugin.registry import PlainRegistry


class OptionNamesRegistry(PlainRegistry):
    """Translators of options as other projects name them, by project.

    A target is a function (options: dict) -> dict: options in our names, and unchanged what it does
    not know. It raises ConfigError for what cannot be had here, and says what to use. It is asked
    only where an option is unknown, or has a value that it cannot have.
    """

    noun = "translator of options"

    def translate(self, options: dict[str, Any]) -> dict[str, Any]:
        """`options` after all translators. Raises ConfigError."""
        for name in self:
            options = self.make(name, options)
        return options
