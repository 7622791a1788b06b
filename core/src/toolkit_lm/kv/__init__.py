"""The KV cache: the state that layers keep of sequences, its layout in blocks, and the owners of
the blocks.

Names are imported on first use. Only the memory itself needs torch.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
