"""`python -m toolkit_lm`: runs the command `toolkit`, through the script of its distribution."""

from __future__ import annotations

import sys
from importlib import metadata


def main() -> None:
    """Raises SystemExit if no distribution has the command, with the way to install it."""
    for script in metadata.entry_points(group="console_scripts", name="toolkit"):
        # Other projects may have a command of this name.
        if script.value.startswith(f"{__package__}_"):
            script.load()()
            return
    from toolkit_lm.plugin.shipped import way_to_get

    sys.exit(f"error: the command line is not installed. {way_to_get('command', 'generate')}")


if __name__ == "__main__":
    main()
