"""Compiles the kernels where there is a C compiler for them. Without one the package installs all the same, and its backend refuses."""

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

FLAGS = ("-std=c11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-fopenmp")


class CompileHook(BuildHookInterface):
    """Called for wheels. An editable one finds the library beside its sources; others carry it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package, name = Path(self.root, "src", "toolkit_lm_cpu"), f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
        self.folder = tempfile.TemporaryDirectory(dir=package if version == "editable" else None)
        library = Path(self.folder.name, name)
        if (reason := compile_kernels(package / "kernels" / "module.c", library)) is not None:
            self.app.display_warning(f"toolkit-lm-cpu is installed without its kernels: {reason}")
            if version == "editable":
                (package / name).unlink(missing_ok=True)
            return
        if version == "editable":
            # In one step: others may be importing it.
            library.replace(package / name)
        else:
            build_data["force_include"][str(library)] = f"toolkit_lm_cpu/{name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()


def compile_kernels(source: Path, library: Path) -> str | None:
    """None, or why there is no library."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"they are for Linux on x86_64, not for {sys.platform} on {platform.machine()}"
    command = [*os.environ.get("CC", "cc").split(), *FLAGS, f"-I{sysconfig.get_path('include')}", str(source), "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"there is no C compiler: {error}"
    return None if done.returncode == 0 else f"{' '.join(command)} failed:\n{done.stderr}"
