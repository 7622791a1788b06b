"""The registry of translators for other projects' option names."""

from __future__ import annotations

from typing import Any

from toolkit_lm.plugin.registry import PlainRegistry


class OptionNamesRegistry(PlainRegistry):
    """Translators of other projects' options, by project.

    A target is a function (options: dict) -> dict. It returns options in this project's names, and
    leaves unknown ones unchanged. For an option that is not supported it raises ConfigError, with
    the one to use instead. It is called only if an option is unknown, or has an invalid value.
    """

    noun = "translator of options"

    def translate(self, options: dict[str, Any]) -> dict[str, Any]:
        """Returns `options` after all translators. Raises ConfigError."""
        for name in self:
            options = self.make(name, options)
        return options
