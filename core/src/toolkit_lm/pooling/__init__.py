"""The contracts of poolers, and of readers of the texts of pooling requests.

Names are imported on first use, so a front that reads texts needs no torch.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
