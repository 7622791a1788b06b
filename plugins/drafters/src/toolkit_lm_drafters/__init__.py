"""Drafters. This entry module only registers them; each is imported when an engine uses it."""

from toolkit_lm.plugin import DrafterRegistry, hookimpl

from toolkit_lm_drafters.options import Options as Options


@hookimpl
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    drafters.add("ngram", "toolkit_lm_drafters.ngram:NgramDrafter")
