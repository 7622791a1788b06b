"""Values of vLLM's options that say how a checkpoint's files are laid out."""

from __future__ import annotations

from typing import Any


def load_format(value: Any) -> dict[str, Any]:
    """The format of weights; "auto" and "hf" say nothing of it."""
    return {} if value in ("auto", "hf") else {"load_format": value}


def config_format(value: Any) -> dict[str, Any]:
    """Mistral's own layout, whose weights go with its config."""
    if value not in ("auto", "hf", "mistral"):
        raise ValueError("known: auto, hf, mistral.")
    return {"load_format": "mistral"} if value == "mistral" else {}
