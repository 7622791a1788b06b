"""Text renderer for checkpoints in Hugging Face layout: `tokenizers` and sandboxed Jinja, without torch or transformers."""

from toolkit_lm.plugin import RendererRegistry, hookimpl

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@hookimpl
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    renderers.add("hf", "toolkit_lm_renderer_hf.renderer:HfRenderer", reads=TOKENIZER_FILES)
