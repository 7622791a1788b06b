"""Wheels that pip installs: all distributions, the tutorials' plugins, and those that `toolkit
plugins new` writes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_workspace import FOLDERS, ROOT, project
from toolkit_lm_cpu import library
from toolkit_lm_devkit.cli.new import Kind, write_plugin

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
NAMES = {"model": "seed", "attention_backend": "naive", "renderer": "bytes"}
"""Page -> the plugin that it makes."""
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
GENERATED = {
    Kind.MODEL: "new-model",
    Kind.KV_KIND: "new-kind",
    Kind.DRAFTER: "new-drafter",
    Kind.EXECUTOR: "new-executor",
    Kind.QUANTIZATION: "new-quantization",
    Kind.CHECKPOINT_LOADER: "new-loader",
    Kind.LOGITS_PROCESSOR: "new-processor",
    Kind.SCHEDULING_POLICY: "new-policy",
    Kind.COMMAND: "new-command",
}
"""Kinds of new plugins. The other kinds are written down in the tutorials."""


def run(*command: object, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def files(page: str) -> dict[str, str]:
    """The files that a tutorial writes down."""
    text = (TUTORIALS / f"{page}.md").read_text(encoding="utf-8")
    return dict(
        re.findall(r"^`([\w/.-]+)`:\n\n^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    )


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """A folder with the wheels of all distributions of this repository.

    The same build hook has compiled the kernels for this environment, which takes half a minute:
    where it did, the compiler is a script that gives them once more.
    """
    target = tmp_path_factory.mktemp("wheels")
    environ = dict(os.environ)
    if library._missing is None:
        compiler = tmp_path_factory.mktemp("compiler") / "cc"
        made = Path(library._kernels.__file__)
        compiler.write_text(f'#!/bin/sh\nfor library; do :; done\ncp "{made}" "$library"\n')
        compiler.chmod(0o755)
        environ["CC"] = str(compiler)
    run(sys.executable, ROOT / "deploy" / "distributions.py", "--to", target, env=environ)
    return target


def pip_of(folder: Path) -> list[object]:
    """pip of this environment, for that of a folder with a `python`."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    return [*command, "--python", folder / "python"]


def needed(names: Iterable[str], places: list[str]) -> dict[str, Distribution]:
    """The distributions of these names, and all that they name, each from the first of some places
    that has it."""
    found: dict[str, Distribution] = {}
    seen = set()
    left = [Requirement(name) for name in names]
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        if (name, *sorted(one.extras)) in seen:
            continue
        seen.add((name, *sorted(one.extras)))
        found[name] = next(iter(distributions(name=name, path=places)))
        left += [
            further
            for further in map(Requirement, found[name].requires or ())
            if further.marker is None
            or any(further.marker.evaluate({"extra": extra}) for extra in ("", *one.extras))
        ]
    return found


@pytest.fixture(scope="module")
def fresh_environment(wheels, tmp_path_factory) -> Path:
    """A virtual environment of its own with the wheels installed, and with what the tutorials need
    to be built and tested.

    What the wheels name, and nothing else, comes from this environment: that pip finds it in an
    index was shown when this one was made.
    """
    environment = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(environment)
    pip = pip_of(environment / "bin")
    files = sorted(wheels.glob("*.whl"))
    run(*pip, "install", "--no-compile", "--no-deps", "--no-index", *files)
    (packages,) = environment.glob("lib/python*/site-packages")
    names = [file.name.partition("-")[0] for file in files]
    # Not sys.path: other tests' plugins are there, and what Ray brings along.
    places = [str(packages), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for distribution in needed(["hatchling", "pytest", *names], places).values():
        for file in distribution.files or ():
            source = Path(distribution.locate_file(file))
            target = packages / file
            if ".." in file.parts or file.suffix == ".pyc" or target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError:
                # It is on another disk.
                shutil.copy2(source, target)
    run(*pip, "check")
    return environment


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Plugin -> the folder of its distribution."""
    home = tmp_path_factory.mktemp("distributions")
    found = {}
    for page, name in NAMES.items():
        found[name] = home / f"toolkit-lm-{name}"
        for file, text in files(page).items():
            path = found[name] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return found | {name: write_plugin(kind, name, home) for kind, name in GENERATED.items()}


@pytest.fixture(scope="module")
def bin_folder(sources, fresh_environment) -> Path:
    """Environment in which all of them are installed, and this repository's wheels."""
    folder = fresh_environment / "bin"
    run(*pip_of(folder), "install", "--no-deps", "--no-build-isolation", *sources.values())
    return folder


@pytest.mark.slow
def test_wheels_share_one_version(wheels):
    versions = {wheel.name.split("-")[1] for wheel in wheels.glob("*.whl")}
    assert len(versions) == 1 and len(list(wheels.glob("*.whl"))) == len(FOLDERS) + 1


@pytest.mark.slow
def test_wheels_say_whose_they_are(wheels):
    for path in wheels.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            names = {
                name.partition(".dist-info/")[2]: name
                for name in wheel.namelist()
                if ".dist-info/" in name
            }
            metadata = message_from_bytes(wheel.read(names["METADATA"]))
            assert wheel.read(names["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes(), (
                path.name
            )
        assert (
            metadata["Name"].startswith("toolkit-lm")
            and metadata["License-Expression"] == "Apache-2.0"
        ), path.name
        assert metadata["Author"] and metadata["Summary"], path.name
        assert {url.partition(",")[0] for url in metadata.get_all("Project-URL")} >= {
            "Homepage",
            "Documentation",
            "Changelog",
            "Issues",
        }
        assert "Typing :: Typed" in metadata.get_all("Classifier"), path.name


@pytest.mark.slow
@pytest.mark.skipif(library._missing is not None, reason="needs what compiles the kernels")
def test_the_wheel_of_the_kernels_needs_no_compiler(wheels, tmp_path):
    """Torch is that of this environment; the .pth file does not bring what is editable here."""
    (wheel,) = wheels.glob("toolkit_lm_cpu-*.whl")
    assert re.search(r"-cp311-abi3-(manylinux_2_\d+|linux)_x86_64\.whl$", wheel.name)
    venv.create(tmp_path)
    python = tmp_path / "bin" / "python"
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "outer.pth").write_text(sysconfig.get_path("purelib"))
    environ = {**os.environ, "CC": "/nonexistent"}
    run(
        *pip_of(python.parent),
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        *wheels.glob("toolkit_lm_core-*.whl"),
        env=environ,
    )
    script = (
        "from toolkit_lm_cpu import _kernels, library; print(_kernels.__file__, library.refusal())"
    )
    found = run(python, "-c", script, env=environ, cwd=tmp_path)
    assert found == f"{packages / 'toolkit_lm_cpu' / '_kernels.abi3.so'} {library.refusal()}\n"


@pytest.mark.slow
def test_wheels_work_in_a_fresh_environment(fresh_environment, tmp_path):
    """Installed, not editable, with the dependencies that the wheels themselves name."""
    toolkit = fresh_environment / "bin" / "toolkit"
    plugins = json.loads(run(toolkit, "plugins", "list", "--json", cwd=tmp_path))
    assert {p["distribution"] for p in plugins} >= {
        project(folder)["name"] for folder in FOLDERS if folder.parent.name != "libs"
    }
    assert {p["status"] for p in plugins} == {"ok"}
    assert all(str(fresh_environment) in p["file"] for p in plugins)
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    prompts.write_text(
        json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}]})
        + "\n"
    )
    run(
        toolkit,
        "generate",
        "tiny",
        "--prompts",
        prompts,
        "--out",
        out,
        "--temperature",
        "0",
        "--max-tokens",
        "32",
        cwd=tmp_path,
    )
    assert "Paris" in json.loads(out.read_text())["outputs"][0]["text"]


CHECK = """
import json, sys
from dataclasses import asdict
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit.cli.check import check

plugins = Plugins.load()
print(json.dumps({name: asdict(check(f"toolkit-lm-{name}", plugins)) for name in sys.argv[1:]}))
"""
"""What `toolkit plugins check` finds, for several in one process."""


@pytest.fixture(scope="module")
def outcomes(sources, bin_folder) -> str:
    """What pytest says of each test of all distributions, run in one process."""
    home = sources["seed"].parent
    assert {folder.parent for folder in sources.values()} == {home}
    options = ["-q", "-rA", "-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib"]
    # Else the first folder with a pyproject.toml would be the root, for all.
    options += ["-c", os.devnull, "--rootdir", home]
    tests = sorted(folder / "tests" for folder in sources.values())
    done = subprocess.run(
        [bin_folder / "python", "-m", "pytest", *options, *tests],
        cwd=home,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode in (0, 1), done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
    return done.stdout


@pytest.fixture(scope="module")
def reports(sources, bin_folder) -> dict[str, dict]:
    command = [bin_folder / "python", "-c", CHECK, *sources]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*NAMES.values(), *GENERATED.values()])
def test_it_passes_its_own_tests(outcomes, name):
    found = re.findall(rf"^(\w+) toolkit-lm-{name}/tests/", outcomes, re.MULTILINE)
    assert found and set(found) == {"PASSED"}, outcomes[-5000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES.values(), *GENERATED.values()])
def test_it_passes_the_check(reports, name):
    assert reports[name]["problems"] == []
    assert reports[name]["targets"]


@pytest.mark.slow
def test_the_command_says_what_the_check_finds(bin_folder, reports):
    command = [bin_folder / "toolkit", "plugins", "check", "toolkit-lm-seed", "--json"]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    seconds = {"entry_modules": None}
    assert json.loads(done.stdout) | seconds == reports["seed"] | seconds


@pytest.mark.parametrize(
    ("page", "kind"), [("attention_backend", Kind.ATTENTION_BACKEND), ("renderer", Kind.RENDERER)]
)
def test_the_tutorial_shows_what_is_written(tmp_path, page, kind):
    home = write_plugin(kind, NAMES[page], tmp_path)
    written = {
        str(path.relative_to(home)): path.read_text()
        for path in home.rglob("*")
        if path.is_file() and path.name != "py.typed"
    }
    assert files(page) == written


@pytest.mark.parametrize(("page", "most"), [("model", 40), ("attention_backend", 120)])
def test_a_distribution_is_short(page, most):
    """README and tests aside."""
    counted = {
        file: text
        for file, text in files(page).items()
        if file.endswith((".py", ".toml")) and not file.startswith("tests/")
    }
    assert len(counted) == 3
    assert sum(len(text.splitlines()) for text in counted.values()) <= most
