"""Registers the drafter "lookup"."""

from toolkit_lm.plugin import DrafterRegistry, hookimpl


@hookimpl
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    drafters.add("lookup", "acme_lm_lookup.drafter:LookupDrafter")
