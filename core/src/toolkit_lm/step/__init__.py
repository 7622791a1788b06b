"""A step of a worker: its inputs, and the contract of its parts.

Names are imported on first use, so code that only describes parts needs no torch.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
