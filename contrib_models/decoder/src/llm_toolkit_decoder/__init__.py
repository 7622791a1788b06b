"""Decoder-only language models. This entry module only registers them; each is imported when it is selected."""

from llm_toolkit.plugin import ModelRegistry, hookimpl


@hookimpl
def toolkit_register_models(models: ModelRegistry) -> None:
    models.add("LlamaForCausalLM", "llm_toolkit_decoder.llama:LlamaForCausalLM")
