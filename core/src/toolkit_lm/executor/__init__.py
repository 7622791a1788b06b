"""Executors: how the engine reaches its workers.

Names are imported on first use. A machine without an engine can read the workers' messages without
torch.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
