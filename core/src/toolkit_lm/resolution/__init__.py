"""From what was asked to what will run. Imports no torch."""

from toolkit_lm.resolution.checkpoint import choose_model, read_checkpoint
from toolkit_lm.resolution.resolution import (
    choose_executor,
    choose_renderer,
    resolve,
    resolve_configured,
    resolve_device,
)

__all__ = [
    "choose_executor",
    "choose_model",
    "choose_renderer",
    "read_checkpoint",
    "resolve",
    "resolve_configured",
    "resolve_device",
]
