"""The workspace: every distribution is listed, builds, and works when it is installed from its wheel."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from toolkit_lm.plugin.discovery import AUTHOR
from toolkit_lm_cpu import library

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(p.parent for pattern in ("core", "plugins/*", "contrib_*/*") for p in ROOT.glob(f"{pattern}/pyproject.toml"))
LIBRARIES = ("async_llm", "media", "rotary")
"""Distributions that plugins use, and that register nothing themselves."""
SEVERAL = ("vendor_apis",)
"""Distributions of several plugins."""


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def run(*command: object, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_requirements_list_every_distribution():
    listed = set(re.findall(r"^-e (\S+)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE))
    assert listed == {".", *(f"./{folder.relative_to(ROOT)}" for folder in FOLDERS)}


def test_no_folder_is_without_a_distribution():
    folders = {p for pattern in ("plugins/*", "contrib_*/*") for p in ROOT.glob(pattern) if p.is_dir() and list(p.glob("src/*/*.py"))}
    assert folders == {f for f in FOLDERS if f.name != "core"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_a_distribution_declares_which_others_it_imports(folder):
    statements = [node for path in folder.glob("src/**/*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    modules = {node.module for node in statements if isinstance(node, ast.ImportFrom) and node.module}
    modules |= {alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names}
    packages = {module.partition(".")[0] for module in modules if module.startswith("toolkit_lm")}
    imported = {package.replace("_", "-") if package != "toolkit_lm" else "toolkit-lm-core" for package in packages}
    declared = {re.match(r"[\w-]+", dependency).group() for dependency in project(folder)["dependencies"]}
    assert imported
    assert imported - declared - {project(folder)["name"]} == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_distribution_is_well_formed(folder):
    data = project(folder)
    package = data["name"].replace("-", "_").replace("toolkit_lm_core", "toolkit_lm")
    assert (folder / "src" / package / "py.typed").exists()
    assert (folder / "README.md").read_text().startswith("# ")
    assert data["dynamic"] == ["version"] and data["license"] == "Apache-2.0"
    # It loads before third parties' by that.
    assert data["authors"] == [{"name": AUTHOR}]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    if folder.name != "core":
        assert "toolkit-lm-core>=0.1,<0.2" in data["dependencies"]
        modules = set(data.get("entry-points", {}).get("toolkit_lm", {}).values())
        if folder.name in SEVERAL:
            # Each plugin is a package of its own in the distribution's.
            assert len(modules) > 1 and {module.rpartition(".")[0] for module in modules} == {package}
        else:
            assert modules == (set() if folder.name in LIBRARIES else {package})


def test_the_meta_distribution_depends_on_all():
    extras = project(ROOT)["optional-dependencies"]
    needed = {re.match(r"[\w-]+", d).group() for d in [*project(ROOT)["dependencies"], *(d for extra in extras.values() for d in extra)]}
    assert needed == {project(folder)["name"] for folder in FOLDERS}


@pytest.mark.slow
def test_wheels_share_one_version(wheels):
    versions = {wheel.name.split("-")[1] for wheel in wheels.glob("*.whl")}
    assert len(versions) == 1 and len(list(wheels.glob("*.whl"))) == len(FOLDERS) + 1


@pytest.mark.slow
def test_wheels_say_whose_they_are(wheels):
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            names = {name.partition(".dist-info/")[2]: name for name in wheel.namelist() if ".dist-info/" in name}
            metadata = message_from_bytes(wheel.read(names["METADATA"]))
            assert wheel.read(names["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes(), path.name
        assert metadata["Name"].startswith("toolkit-lm") and metadata["License-Expression"] == "Apache-2.0", path.name
        assert metadata["Author"] and metadata["Summary"], path.name
        assert {url.partition(",")[0] for url in metadata.get_all("Project-URL")} >= {"Homepage", "Documentation", "Changelog", "Issues"}
        assert "Typing :: Typed" in metadata.get_all("Classifier"), path.name


@pytest.mark.slow
@pytest.mark.skipif(library._missing is not None, reason="needs what compiles the kernels")
def test_the_wheel_of_the_kernels_needs_no_compiler(wheels, tmp_path):
    """Torch is that of this environment; the .pth file does not bring what is editable here."""
    (wheel,) = wheels.glob("toolkit_lm_cpu-*.whl")
    assert re.search(r"-cp311-abi3-(manylinux_2_\d+|linux)_x86_64\.whl$", wheel.name)
    venv.create(tmp_path)
    python, (packages,) = tmp_path / "bin" / "python", tmp_path.glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    environ = {**os.environ, "CC": "/nonexistent"}
    run(*pip, "install", "--no-deps", "--no-index", wheel, *wheels.glob("toolkit_lm_core-*.whl"), env=environ)
    script = "from toolkit_lm_cpu import _kernels, library; print(_kernels.__file__, library.refusal())"
    found = run(python, "-c", script, env=environ, cwd=tmp_path)
    assert found == f"{packages / 'toolkit_lm_cpu' / '_kernels.abi3.so'} {library.refusal()}\n"


@pytest.mark.slow
@pytest.mark.timeout(900)  # All distributions and what they need are installed first.
def test_wheels_work_in_a_fresh_environment(fresh_environment, tmp_path):
    """Installed, not editable, with the dependencies that the wheels themselves name."""
    toolkit = fresh_environment / "bin" / "toolkit"
    plugins = json.loads(run(toolkit, "plugins", "list", "--json", cwd=tmp_path))
    assert {p["distribution"] for p in plugins} >= {project(folder)["name"] for folder in FOLDERS if folder.name not in LIBRARIES}
    assert {p["status"] for p in plugins} == {"ok"}
    assert all(str(fresh_environment) in p["file"] for p in plugins)
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}]}) + "\n")
    run(toolkit, "generate", "tiny", "--prompts", prompts, "--out", out, "--temperature", "0", "--max-tokens", "32", cwd=tmp_path)
    assert "Paris" in json.loads(out.read_text())["outputs"][0]["text"]
