"""What models are made of: the contract, sharded layers and their linear methods, norms, and weight
loading.

The names are resolved when they are used: what reads checkpoints without their weights needs no
torch.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
