"""The tutorials, and what `toolkit plugins new` writes: built, installed by pip, and passing the conformance kit and `plugins check`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
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


def files(page: str) -> dict[str, str]:
    """The files that a tutorial writes down."""
    text = (TUTORIALS / f"{page}.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^`([\w/.-]+)`:\n\n^```\w+\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """Plugin -> the folder of its distribution."""
    home, found = tmp_path_factory.mktemp("distributions"), {}
    for page, name in NAMES.items():
        found[name] = home / f"toolkit-lm-{name}"
        for file, text in files(page).items():
            path = found[name] / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return found | {name: write_plugin(kind, name, home) for kind, name in GENERATED.items()}


@pytest.fixture(scope="module")
def bin_folder(sources, fresh_environment) -> Path:
    """Of an environment in which all of them are installed, beside the wheels of this repository."""
    folder = fresh_environment / "bin"
    pip = [folder / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, *sources.values()], check=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES.values(), *GENERATED.values()])
def test_it_passes_its_own_tests(sources, bin_folder, name):
    command = [bin_folder / "python", "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=sources[name], env=ENVIRON, capture_output=True, text=True, timeout=280)
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


@pytest.mark.parametrize(("page", "kind"), [("attention_backend", Kind.ATTENTION_BACKEND), ("renderer", Kind.RENDERER)])
def test_the_tutorial_shows_what_is_written(tmp_path, page, kind):
    home = write_plugin(kind, NAMES[page], tmp_path)
    written = {str(path.relative_to(home)): path.read_text() for path in home.rglob("*") if path.is_file() and path.name != "py.typed"}
    assert files(page) == written


@pytest.mark.parametrize(("page", "most"), [("model", 40), ("attention_backend", 120)])
def test_a_distribution_is_short(page, most):
    """README and tests aside."""
    counted = {file: text for file, text in files(page).items() if file.endswith((".py", ".toml")) and not file.startswith("tests/")}
    assert len(counted) == 3
    assert sum(len(text.splitlines()) for text in counted.values()) <= most
