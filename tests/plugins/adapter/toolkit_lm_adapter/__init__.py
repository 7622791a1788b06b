"""A Llama whose requests may name an adapter: a field that changes the forward pass, and that no
logits processor reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import LogitsProcessorRegistry, ModelRegistry, hookimpl


class AdapterParams(ProcessorParams):
    """Request parameters of the adapter."""

    style: Annotated[str | None, param("Name of the adapter.", max_length=64)] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        return None if self.style is None else {"style": self.style}


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add("AdapterLlamaForCausalLM", "toolkit_lm_adapter.model:AdapterLlamaForCausalLM")


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("adapter", None, params=AdapterParams)
