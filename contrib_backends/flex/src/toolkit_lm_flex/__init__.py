"""Attention by torch's FlexAttention: masks and biases are functions of positions."""

from __future__ import annotations

from toolkit_lm.plugin import AttentionBackendRegistry, hookimpl


@hookimpl
def toolkit_register_attention_backends(backends: AttentionBackendRegistry) -> None:
    # Below the reference: it is for those who ask for it by name.
    backends.add("flex", "toolkit_lm_flex.backend:FlexBackend", priority=-10)
