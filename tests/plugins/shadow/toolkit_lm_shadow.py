"""The entry module: it registers the drafter."""

from toolkit_lm.plugin import DrafterRegistry, hookimpl


@hookimpl
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    drafters.add("shadow", "toolkit_lm_shadow_drafter:ShadowDrafter")
