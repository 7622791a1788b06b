"""Executors: how the engine reaches its workers.

The names are imported when they are used: a machine without an engine reads what its workers say,
and computes nothing.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
