"""For those who write plugins: the conformance kit, and the commands `toolkit plugins new` and
`toolkit plugins check`.

The kit says what a plugin must do, as test classes. Subclass one, name what it tests, and run
pytest:

    from toolkit_lm_devkit import AttentionBackendConformance
    from toolkit_lm_mine.backend import MineBackend

    class TestMine(AttentionBackendConformance):
        backend = MineBackend

The names are resolved when they are used: importing this package imports neither torch nor the
engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import lazy_loader
from toolkit_lm.plugin import hookimpl

if TYPE_CHECKING:
    # Every run of pytest loads this package.
    from toolkit_lm_commands import CommandRegistry

# The names, and the modules that define them, stand in __init__.pyi. `dir()` does not list them:
# the loader of plugins looks at all that it lists in an entry module, which this module is too.
__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "plugins new",
        "toolkit_lm_devkit.cli.new:new_plugin",
        help="Write a new plugin, with tests that it passes.",
    )
    commands.add(
        "plugins check",
        "toolkit_lm_devkit.cli.check:check_plugin",
        help="Show what a plugin's distribution should change.",
    )
