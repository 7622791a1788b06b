"""A third party's load format: MODEL may be a GGUF file, with config, tokenizer and weights in
it."""

from toolkit_lm.plugin import LoaderRegistry, hookimpl


@hookimpl
def toolkit_register_loaders(loaders: LoaderRegistry) -> None:
    loaders.add("gguf", "toolkit_lm_gguf.loader:GGUFLoader", reads=("*.gguf",))
