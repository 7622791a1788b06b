"""Compiles the kernels where there is a C compiler for them. Without one the package installs all
the same, and its backend refuses."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLAGS = ("-std=gnu11", "-O3", "-Wall", "-Wextra", "-shared", "-fPIC", "-pthread")
LIBRARY = "_kernels.abi3.so"
"""One for all versions of Python from that on which module.c states."""
GLIBC = {b"libc.so.6", b"libm.so.6", b"libpthread.so.0", b"ld-linux-x86-64.so.2"}


class CompileHook(BuildHookInterface):
    """Called for wheels. An editable one finds the library beside its sources; others carry it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        package = Path(self.root, "src", "toolkit_lm_cpu")
        self.folder = tempfile.TemporaryDirectory(dir=package if version == "editable" else None)
        library = Path(self.folder.name, LIBRARY)
        reason = compile_kernels(package / "kernels" / "module.c", library)
        if reason is None:
            build_data["pure_python"] = False
            build_data["tag"] = f"cp311-abi3-{platform_tag(library)}"
        else:
            self.app.display_warning(f"toolkit-lm-cpu is installed without its kernels: {reason}")
        if version == "editable":
            replace_kernels(package, library)
        elif reason is None:
            build_data["force_include"][str(library)] = f"toolkit_lm_cpu/{LIBRARY}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        self.folder.cleanup()


def replace_kernels(package: Path, library: Path) -> None:
    """The kernels beside the sources: `library`, or none where it is not there."""
    if library.exists():
        # In one step: others may be importing it.
        library.replace(package / LIBRARY)
    else:
        (package / LIBRARY).unlink(missing_ok=True)
    # Python takes a library that is named after its version first.
    for stale in package.glob("_kernels.cpython-*.so"):
        stale.unlink()


def compile_kernels(source: Path, library: Path) -> str | None:
    """None, or why there is no library."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"they are for Linux on x86_64, not for {sys.platform} on {platform.machine()}"
    command = [
        *os.environ.get("CC", "cc").split(),
        *FLAGS,
        f"-I{sysconfig.get_path('include')}",
        str(source),
        "-lm",
        "-o",
        str(library),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        return f"there is no C compiler: {error}"
    return None if done.returncode == 0 else f"{' '.join(command)} failed:\n{done.stderr}"


def platform_tag(library: Path) -> str:
    """Names the oldest glibc that the library runs with; no glibc where it needs another library
    beside, or another libc."""
    content = library.read_bytes()
    needed = set(re.findall(rb"\0((?:lib|ld-)[\w.+-]*\.so[.\d]*)(?=\0)", content))
    versions = [int(minor) for minor in re.findall(rb"\0GLIBC_2\.(\d+)", content)]
    return f"manylinux_2_{max(versions)}_x86_64" if versions and needed <= GLIBC else "linux_x86_64"
