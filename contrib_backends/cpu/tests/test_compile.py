"""The build: kernels where there is a compiler for them, and a package without them where there is
none."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def hook():
    spec = importlib.util.spec_from_file_location("compile_hook", FOLDER / "compile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compile_kernels(hook):
    return hook.compile_kernels


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64",
    reason="kernels are for Linux on x86-64",
)
@pytest.mark.skipif(
    shutil.which(os.environ.get("CC", "cc").split()[0]) is None, reason="needs a C compiler"
)
def test_where_there_is_a_compiler_the_kernels_are_there() -> None:
    """The other tests of the kernels skip without them."""
    from toolkit_lm_cpu import library

    assert library._missing is None


def test_without_a_compiler_it_says_so(compile_kernels, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "there is no C compiler" in compile_kernels(
        tmp_path / "module.c", tmp_path / "library.so"
    )


def test_what_the_compiler_says_is_passed_on(compile_kernels, tmp_path) -> None:
    (tmp_path / "module.c").write_text("this is no C")
    assert "module.c" in compile_kernels(tmp_path / "module.c", tmp_path / "library.so")
    assert not (tmp_path / "library.so").exists()


def test_other_processors_are_named(compile_kernels, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert compile_kernels(tmp_path / "module.c", tmp_path / "library.so").endswith(
        "not for linux on aarch64"
    )


@pytest.mark.parametrize(
    ("names", "tag"),
    [
        ((b"libc.so.6", b"GLIBC_2.2.5", b"GLIBC_2.34", b"GLIBC_2.17"), "manylinux_2_34_x86_64"),
        ((b"libc.so.6", b"GLIBC_2.34", b"libgomp.so.1"), "linux_x86_64"),
        ((b"libc.so",), "linux_x86_64"),
    ],
)
def test_the_tag_names_what_the_library_needs(hook, tmp_path, names, tag) -> None:
    library = tmp_path / hook.LIBRARY
    library.write_bytes(b"\0".join([b"\x7fELF", *names, b""]))
    assert hook.platform_tag(library) == tag


@pytest.mark.parametrize("is_compiled", [True, False])
def test_no_older_library_is_left_beside_the_sources(hook, tmp_path, is_compiled) -> None:
    package = tmp_path / "package"
    library = tmp_path / hook.LIBRARY
    package.mkdir()
    for name in (hook.LIBRARY, "_kernels.cpython-311-x86_64-linux-gnu.so"):
        (package / name).write_text("old")
    if is_compiled:
        library.write_text("new")
    hook.replace_kernels(package, library)
    assert {path.name: path.read_text() for path in package.iterdir()} == (
        {hook.LIBRARY: "new"} if is_compiled else {}
    )


def test_a_wheel_without_kernels_is_for_any_machine(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path,
        FOLDER,
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
