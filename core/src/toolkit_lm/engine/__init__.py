"""The engine: the loop over tokens, and the clients through which a front reaches it.

Names are imported on first use. A front whose engine runs in another process needs no torch.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
