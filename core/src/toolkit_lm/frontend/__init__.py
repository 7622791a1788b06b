"""The faces of an engine: `LLM` for lists of prompts, `AsyncLLM` for event loops, `LLMEngine` for
the caller's own loop.

Names are imported on first use.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
