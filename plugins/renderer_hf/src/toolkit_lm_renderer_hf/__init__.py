"""Renderers for checkpoints in Hugging Face layout, without torch or transformers: `tokenizers` and
sandboxed Jinja, or token ids alone."""

from toolkit_lm.plugin import RendererRegistry, hookimpl

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


@hookimpl
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    renderers.add("hf", "toolkit_lm_renderer_hf.renderer:HfRenderer", reads=TOKENIZER_FILES)
    renderers.add("tokens", "toolkit_lm_renderer_hf.tokens:TokenRenderer", reads=())
