"""A really trained chat model of under two million parameters, shipped with its tokenizer and its list of facts."""

from pathlib import Path

CHECKPOINT: Path = Path(__file__).parent / "checkpoint"
"""The folder with the model, as ``save_pretrained`` of transformers writes it."""
