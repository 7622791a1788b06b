"""Poolers: from the hidden states of a prompt's tokens to an embedding, classes or scores.

The names are resolved when they are used: who reads `details` needs no torch.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
