"""The engine: the loop over tokens, and how a front reaches it.

The names are resolved when they are used: a front whose engine runs in another process needs no
torch.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
