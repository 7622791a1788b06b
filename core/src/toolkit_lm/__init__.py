"""toolkit-lm: LLM inference and serving built as a plugin framework.

The public names are resolved when they are used: importing this package imports no torch and looks for no plugin.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
