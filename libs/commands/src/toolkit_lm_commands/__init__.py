"""Commands of `toolkit`: their registry, and flags made from options. A library: it registers
nothing, and the plugin `cli` runs what others register.

A command that needs a config is made by `engine_command`:

    from toolkit_lm_commands import engine_command

    @engine_command()
    def measure(config: VllmConfig, plugins: Plugins, repeat: int = 3) -> None:
        ...

The names are resolved when they are used: importing this package imports no parser.
"""

import lazy_loader

# The names, and the modules that define them, stand in __init__.pyi. `dir()` does not list them, so
# that an entry module that imports this package as a whole loads none of them.
__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
