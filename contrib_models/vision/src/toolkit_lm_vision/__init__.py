"""Language models that see. This entry module only registers them; each is imported when it is selected."""

from toolkit_lm.plugin import ModelRegistry, hookimpl

MODELS: dict[str, tuple[str, str]] = {}
"""Architectures; the module and class of each; and its rules for prompts."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, (target, rules) in MODELS.items():
        models.add(architecture, f"toolkit_lm_vision.{target}", multimodal=f"toolkit_lm_vision.{rules}")  # type: ignore[call-arg]
