"""Rotary position embeddings: what checkpoints say of them, and the tables of angles. A library for
models: it registers nothing."""

from toolkit_lm_rotary.embedding import RotaryEmbedding
from toolkit_lm_rotary.scaling import RopeParameters

__all__ = ["RopeParameters", "RotaryEmbedding"]
