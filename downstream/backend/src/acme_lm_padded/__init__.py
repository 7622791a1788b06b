"""Registers the attention backend "padded"."""

from toolkit_lm.plugin import AttentionBackendRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    # Below the reference backend, whose priority is 0: used when it is asked for by name.
    backends.add("padded", "acme_lm_padded.backend:PaddedBackend", priority=-1)
