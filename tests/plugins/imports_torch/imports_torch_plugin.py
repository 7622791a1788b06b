"""Its entry module imports torch, and its distribution pins no version of core."""

import torch
from toolkit_lm.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    assert torch.__version__
    models.add("HeavyForCausalLM", "nowhere:Heavy")
