"""The workspace: every distribution is listed and well formed. What its wheel installs is tested in
test_installed.py."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from toolkit_lm.plugin.discovery import AUTHOR

ROOT = Path(__file__).parents[1]
FOLDERS = sorted(
    p.parent
    for pattern in ("core", "libs/*", "plugins/*", "contrib_*/*")
    for p in ROOT.glob(f"{pattern}/pyproject.toml")
)
SEVERAL = ("vendor_apis",)
"""Distributions of several plugins."""


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def test_requirements_list_every_distribution():
    listed = set(
        re.findall(r"^-e (\S+)$", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    )
    assert listed == {".", *(f"./{folder.relative_to(ROOT)}" for folder in FOLDERS)}


NOT_ON_THE_FLOOR = {
    "flash-attn": "PyPI has no wheel of it, and building it takes CUDA's compiler",
    "flashinfer-python": "it does nothing without a GPU",
    "mistral-common": "requirements-renderers.txt has it, in an environment of its own",
    "openai-harmony": "requirements-renderers.txt has it, in an environment of its own",
}


def requirements_of_others() -> dict[str, dict[str, Requirement]]:
    """Requirements on third-party distributions, extras included: name, distribution,
    requirement."""
    found: dict[str, dict[str, Requirement]] = {}
    for data in map(project, (ROOT, *FOLDERS)):
        extras = data.get("optional-dependencies", {}).values()
        for text in (one for lines in (data["dependencies"], *extras) for one in lines):
            requirement = Requirement(text)
            if not requirement.name.startswith("toolkit-lm"):
                name = canonicalize_name(requirement.name)
                found.setdefault(name, {})[data["name"]] = requirement
    return found


def pinned(file: str) -> dict[str, Version]:
    lines = re.findall(r"^([\w-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in lines}


@pytest.mark.parametrize("name", sorted(requirements_of_others()))
def test_the_oldest_version_that_is_allowed_is_tested(name):
    """`make test-floor` has it, whichever distribution asks. All allow that of development, too."""
    floor = pinned("requirements-floor.txt")
    development = pinned("constraints.txt")
    for distribution, requirement in requirements_of_others()[name].items():
        oldest = {Version(x.version) for x in requirement.specifier if x.operator == ">="}
        assert len(oldest) == 1, f"{distribution} states no oldest version of {name}"
        if name not in NOT_ON_THE_FLOOR:
            assert oldest == {floor.get(name)}, f"{distribution}: {requirement}"
        assert name not in development or development[name] in requirement.specifier, requirement


def test_what_is_not_on_the_floor_is_required_and_is_not_there():
    assert set(NOT_ON_THE_FLOOR) <= set(requirements_of_others())
    assert not set(NOT_ON_THE_FLOOR) & set(pinned("requirements-floor.txt"))


def test_all_pins_take_the_oldest_python():
    """Debian 12 has 3.11.2. A pin that is not installed here is not looked at."""
    pins = pinned("constraints.txt")
    looked_at = 0
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if distribution.version != str(pins.get(name)):
            continue
        looked_at += 1
        allowed = SpecifierSet(distribution.metadata["Requires-Python"] or "")
        assert "3.11.0" in allowed, f"{name} {pins[name]} requires Python {allowed}"
    assert looked_at > len(pins) / 2


def test_python_313_runs_tests_of_each_distribution():
    """Two have an environment of their own: `make test-renderers`."""
    paths = (ROOT / "tests/python313.txt").read_text().splitlines()
    assert [path for path in paths if not (ROOT / path).exists()] == []
    tested = {path.partition("/tests")[0] for path in paths}
    with_tests = [folder for folder in FOLDERS if list(folder.glob("tests/test_*.py"))]
    folders = {str(folder.relative_to(ROOT)) for folder in with_tests}
    own = {"plugins/renderer_harmony", "plugins/renderer_mistral"}
    assert folders - tested == own


def test_no_folder_is_without_a_distribution():
    folders = {
        p
        for pattern in ("libs/*", "plugins/*", "contrib_*/*")
        for p in ROOT.glob(pattern)
        if p.is_dir() and list(p.glob("src/*/*.py"))
    }
    assert folders == {f for f in FOLDERS if f.name != "core"}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_a_distribution_declares_which_others_it_imports(folder):
    statements = [
        node
        for path in folder.glob("src/**/*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    ]
    modules = {
        node.module for node in statements if isinstance(node, ast.ImportFrom) and node.module
    }
    modules |= {
        alias.name for node in statements if isinstance(node, ast.Import) for alias in node.names
    }
    packages = {module.partition(".")[0] for module in modules if module.startswith("toolkit_lm")}
    imported = {
        package.replace("_", "-") if package != "toolkit_lm" else "toolkit-lm-core"
        for package in packages
    }
    declared = {
        re.match(r"[\w-]+", dependency).group() for dependency in project(folder)["dependencies"]
    }
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
        assert "toolkit-lm-core>=0.2,<0.3" in data["dependencies"]
        modules = set(data.get("entry-points", {}).get("toolkit_lm", {}).values())
        if folder.name in SEVERAL:
            # Each plugin is a package of its own in the distribution's.
            assert len(modules) > 1 and {module.rpartition(".")[0] for module in modules} == {
                package
            }
        else:
            is_library = folder.parent.name == "libs"
            assert modules == (set() if is_library else {package})


def test_the_import_contracts_hold_every_distribution_on_its_floor():
    """A plugin's floor is above models and backends, theirs above libraries, and core's below."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = {
        project(folder)["name"].replace("-", "_").replace("toolkit_lm_core", "toolkit_lm"): folder
        for folder in FOLDERS
    }
    assert sorted(linter["root_packages"]) == sorted(packages)
    [cycles] = [c for c in linter["contracts"] if c["type"] == "acyclic_siblings"]
    assert sorted(cycles["ancestors"]) == sorted(packages)
    [floors] = [c for c in linter["contracts"] if "toolkit_lm" in c.get("layers", ())]
    found = [set(re.findall(r"\w+", floor)) for floor in floors["layers"]]
    assert found == [
        {name for name, folder in packages.items() if folder.relative_to(ROOT).parts[0] in places}
        for places in (("plugins",), ("contrib_models", "contrib_backends"), ("libs",), ("core",))
    ]


def test_the_meta_distribution_depends_on_all():
    extras = project(ROOT)["optional-dependencies"]
    needed = {
        re.match(r"[\w-]+", d).group()
        for d in [*project(ROOT)["dependencies"], *(d for extra in extras.values() for d in extra)]
    }
    assert needed == {project(folder)["name"] for folder in FOLDERS}


def test_what_make_test_leaves_out_exists():
    """Else a file that was renamed would be part of `make test` again, or run as a whole by day."""
    lists = [(ROOT / "tests" / f"{name}.txt").read_text().split() for name in ("long", "matrices")]
    files = {test.partition("::")[0] for tests in lists for test in tests}
    named = re.findall(r'"(tests/test_\w+\.py)"', (ROOT / "conftest.py").read_text())
    assert (
        named and [file for file in sorted({*files, *named}) if not (ROOT / file).is_file()] == []
    )
