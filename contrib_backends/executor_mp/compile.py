"""Compiles what ranks of one machine exchange tensors with. Without a C compiler the package
installs all the same, and uses sockets."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC")
LIBRARY = "_memory.abi3.so"


class CompileHook(BuildHookInterface):
    """Called for wheels. An editable one finds the library beside its sources; others carry it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root, "src", "toolkit_lm_executor_mp")
        is_editable = version == "editable"
        self.folder = tempfile.TemporaryDirectory(dir=package if is_editable else None)
        library = Path(self.folder.name, LIBRARY)
        if reason := compile_library(package / "kernels" / "module.c", library):
            self.app.display_warning(
                f"toolkit-lm-executor-mp is installed without shared memory: {reason}"
            )
            if is_editable:
                (package / LIBRARY).unlink(missing_ok=True)
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-linux_{platform.machine()}"
        if is_editable:
            # In one step: others may be importing it.
            library.replace(package / LIBRARY)
        else:
            build_data["force_include"][str(library)] = f"toolkit_lm_executor_mp/{LIBRARY}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()


def compile_library(source: Path, library: Path) -> str | None:
    """None, or why there is none."""
    if sys.platform != "linux":
        return f"it is for Linux, not for {sys.platform}"
    command = [
        *os.environ.get("CC", "cc").split(),
        *FLAGS,
        f"-I{sysconfig.get_path('include')}",
        str(source),
        "-o",
        str(library),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"there is no C compiler: {error}"
    return None if done.returncode == 0 else f"{' '.join(command)} failed:\n{done.stderr}"
