"""The renderer contract: all input preparation, and its inverse."""

from llm_toolkit.renderer.contract import DecodeStream, MultiModalFeatureSpec, Renderer

__all__ = ["DecodeStream", "MultiModalFeatureSpec", "Renderer"]
