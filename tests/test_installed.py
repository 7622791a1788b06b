"""What pip installs from wheels: all distributions, the tutorials' plugins, and those that `toolkit
plugins new` writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
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
"""Those of the other kinds are written down in the tutorials."""


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


BUILD = """
import os, sys
from hatchling.build import build_wheel

for folder in sys.argv[2:]:
    os.chdir(folder)
    build_wheel(sys.argv[1])
"""
"""What pip calls to build a wheel, for all in one process."""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """A folder with the wheels of all distributions of this repository."""
    target = tmp_path_factory.mktemp("wheels")
    run(sys.executable, "-c", BUILD, target, ROOT, *FOLDERS)
    return target


@pytest.fixture(scope="module")
def fresh_environment(wheels, tmp_path_factory) -> Path:
    """A virtual environment of its own with the wheels installed, and with what the tutorials need
    to be built and tested."""
    environment = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(environment, with_pip=True)
    pip = [
        environment / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    ]
    subprocess.run([*pip, "hatchling", "pytest", *wheels.glob("*.whl")], check=True)
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
    """Of an environment in which all of them are installed, beside the wheels of this
    repository."""
    folder = fresh_environment / "bin"
    pip = [
        folder / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run([*pip, *sources.values()], check=True)
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
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    environ = {**os.environ, "CC": "/nonexistent"}
    run(
        *pip,
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
@pytest.mark.timeout(900)  # All distributions and what they need are installed first.
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES.values(), *GENERATED.values()])
def test_it_passes_its_own_tests(sources, bin_folder, name):
    command = [
        bin_folder / "python",
        "-m",
        "pytest",
        "-q",
        "-W",
        "error",
        "-p",
        "no:cacheprovider",
        "tests",
    ]
    done = subprocess.run(
        command, cwd=sources[name], env=ENVIRON, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert re.search(r"^\d+ passed in ", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES.values(), *GENERATED.values()])
def test_it_passes_the_check(bin_folder, name):
    command = [bin_folder / "toolkit", "plugins", "check", f"toolkit-lm-{name}", "--json"]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["targets"]


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
