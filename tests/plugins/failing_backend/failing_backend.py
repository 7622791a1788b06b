"""Brings an attention backend that raises in `refuses` or, where FAILS_LATER is set, in its first
step."""

from toolkit_lm.plugin import hookimpl


@hookimpl
def toolkit_register_attention_backends(backends):
    backends.add("failing", "failing_backend_target:FailingBackend", priority=100)
