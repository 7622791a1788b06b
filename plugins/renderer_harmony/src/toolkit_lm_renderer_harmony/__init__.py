"""A renderer for gpt-oss, which reads and writes the harmony format, through openai-harmony: no
class of Hugging Face, no torch."""

from toolkit_lm.plugin import RendererRegistry, hookimpl


@hookimpl
def toolkit_register_renderers(renderers: RendererRegistry) -> None:
    # A checkpoint with a tokenizer.json stays with hf, unless this one is asked for by name.
    renderers.add(
        "harmony",
        "toolkit_lm_renderer_harmony.renderer:HarmonyRenderer",
        reads=("o200k_base.tiktoken",),
    )
