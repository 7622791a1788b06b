"""The plugin framework: hooks, discovery, registries, and the fingerprint of a plugin set.

A plugin is a distribution with an entry point in the group `toolkit_lm`. Its entry module is light
(no torch, no transformers). It names its targets as text, "module:attribute", which is imported
only on use:

    from toolkit_lm.plugin import ModelRegistry, hookimpl

    @hookimpl
    def toolkit_register_models(models: ModelRegistry) -> None:
        models.add("MyForCausalLM", "toolkit_lm_mine.model:MyForCausalLM")
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
