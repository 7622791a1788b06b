"""Between users and the engine: prompts become requests in tokens, and the engine's tokens become
outputs. Needs no torch.

Names are imported on first use.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
