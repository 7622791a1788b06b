"""From what was asked to what will run. Imports no torch."""

from toolkit_lm.resolution.checkpoint import choose_model, read_checkpoint, read_json
from toolkit_lm.resolution.resolution import (
    choose_executor,
    choose_renderer,
    resolve,
    resolve_configured,
    resolve_device,
)
from toolkit_lm.resolution.without_effect import NoEffect, without_effect

__all__ = [
    "NoEffect",
    "choose_executor",
    "choose_model",
    "choose_renderer",
    "read_checkpoint",
    "read_json",
    "resolve",
    "resolve_configured",
    "resolve_device",
    "without_effect",
]
