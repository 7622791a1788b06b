"""Reward models. This entry module only registers them; each is imported when it is selected."""

from toolkit_lm.plugin import ModelRegistry, hookimpl

MODELS = {
    "InternLM2ForRewardModel": "internlm2",
    "Qwen2ForProcessRewardModel": "qwen2",
    "Qwen2ForRewardModel": "qwen2",
}
"""Architectures, and the modules that hold a class of that name."""


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    for architecture, module in MODELS.items():
        models.add(architecture, f"toolkit_lm_reward.{module}:{architecture}", runner="pooling")
