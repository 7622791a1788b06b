"""The building blocks of models: the contract, sharded layers and their linear methods, norms, and
weight loading.

Names are imported on first use, so code that reads checkpoints without their weights needs no
torch.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
