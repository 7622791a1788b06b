"""A drafter that needs no model: what followed the last n-gram when it came before."""

from toolkit_lm.plugin import DrafterRegistry, hookimpl


@hookimpl
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    drafters.add("ngram", "ngram_drafter_target:NgramDrafter")
