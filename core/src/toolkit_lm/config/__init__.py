"""VllmConfig and its sections. Every option is stated once, here. Flags, the YAML file and Python
keywords are derived from it."""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
