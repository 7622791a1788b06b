"""Text renderer for checkpoints in Hugging Face layout: `tokenizers` and sandboxed Jinja, without torch or transformers."""

from llm_toolkit.plugin import RendererRegistry, hookimpl

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@hookimpl
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    renderers.add("hf", "llm_toolkit_renderer_hf.renderer:HfRenderer", reads=TOKENIZER_FILES)
