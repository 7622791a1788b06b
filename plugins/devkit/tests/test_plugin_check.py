"""`toolkit plugins check`: what it finds in distributions that are written here."""

from __future__ import annotations

import json
import sys

import pytest
from toolkit_lm_devkit.cli.new import Kind, write_plugin
from toolkit_lm_devkit.cli.private_names import private_names

RIGHT = """\
from toolkit_lm.plugin import hookimpl


@hookimpl
def toolkit_register_commands(commands):
    commands.add("checked", "{package}_target:run", help="Nothing.")
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, entry module, target module, requires): puts a distribution on the path, and
    gives its name."""

    def make(name, entry=RIGHT, target="def run(): ...", requires="toolkit-lm-core>=0.2,<0.3"):
        package = name.replace("-", "_")
        metadata = tmp_path / f"{package}-1.0.dist-info"
        metadata.mkdir()
        required = f"Requires-Dist: {requires}\n" if requires else ""
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{required}"
        )
        (metadata / "entry_points.txt").write_text(f"[toolkit_lm]\n{name} = {package}\n")
        (tmp_path / f"{package}.py").write_text(entry.replace("{package}", package))
        (tmp_path / f"{package}_target.py").write_text(target)
        monkeypatch.syspath_prepend(tmp_path)
        for module in (package, f"{package}_target"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        return name

    return make


@pytest.fixture
def check(toolkit):
    """check(name) -> (exit code, report)."""

    def call(name):
        done = toolkit("plugins", "check", name, "--json")
        return done.code, json.loads(done.out)

    return call


def test_a_sound_distribution(install, check, toolkit):
    code, report = check(install("sound"))
    assert (code, report["problems"]) == (0, [])
    assert (report["distribution"], report["version"], report["requires_core"]) == (
        "sound",
        "1.0",
        "<0.3,>=0.2",
    )
    assert report["hooks"] == ["toolkit_register_commands"]
    assert report["targets"] == {"command checked": "sound_target:run"}
    (module,) = report["entry_modules"]
    assert (module["module"], module["imports"]) == ("sound", [])
    assert 0 <= module["import_seconds"] < 1
    shown = toolkit("plugins", "check", "sound")
    assert "no problems" in shown.out
    assert "sound_target:run" in shown.out


@pytest.mark.parametrize(
    "name", ["toolkit-lm-decoder", "toolkit-lm-sdpa", "toolkit-lm-renderer-hf", "Toolkit_LM.tiny"]
)
def test_what_is_shipped_is_sound(check, name):
    code, report = check(name)
    assert (code, report["problems"]) == (0, [])


def test_heavy_imports(install, check):
    code, report = check(install("heavy-one", "import torch\n" + RIGHT))
    assert code == 1
    assert "torch" in report["entry_modules"][0]["imports"]
    assert any(
        problem.startswith("entry module heavy_one imports torch: ")
        for problem in report["problems"]
    )


def test_private_names(install, check):
    target = (
        "import toolkit_lm.plugin.loader as loader\nfrom toolkit_lm._version import __version__\n"
        "\ndef run():\n    loader._place()\n"
    )
    code, report = check(install("nosy", target=target))
    assert code == 1
    assert [found.rpartition("/")[2] for found in report["private_names"]] == [
        "nosy_target.py:2: toolkit_lm._version.__version__",
        "nosy_target.py:5: toolkit_lm.plugin.loader._place",
    ]
    assert len(report["problems"]) == 2


@pytest.mark.parametrize(
    ("requires", "problem"),
    [
        (None, "it requires no version of toolkit-lm-core"),
        ("toolkit-lm-core>=0.1", "toolkit-lm-core>=0.1 admits every later core"),
    ],
)
def test_no_bound_on_core(install, check, requires, problem):
    code, report = check(install("unbound", requires=requires))
    assert code == 1
    assert any(
        found.startswith(problem) and "toolkit-lm-core>=0.2,<0.3" in found
        for found in report["problems"]
    )


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("(commands)", "(command)"), "has no argument 'command'. Did you mean 'commands'"),
        (
            ("toolkit_register_commands", "toolkit_register_comands"),
            "there is no hook 'toolkit_register_comands'",
        ),
        (("@hookimpl", "raise OSError('no licence')"), "OSError: no licence"),
    ],
)
def test_broken_entry_modules(install, check, change, problem):
    code, report = check(install("wrong", RIGHT.replace(*change)))
    assert code == 1
    assert any(
        "plugin 'wrong' is broken" in found and problem in found for found in report["problems"]
    )


def test_broken_targets(install, check):
    code, report = check(install("aimless", target="import no_such_module"))
    assert code == 1
    assert "no_such_module" in report["problems"][0]
    assert "aimless_target:run" in report["problems"][0]


def test_a_target_that_is_not_of_its_kind(install, check):
    entry = RIGHT.replace("commands", "renderers").replace(', help="Nothing."', "")
    code, report = check(install("unkind", entry))
    assert (code, len(report["problems"])) == (1, 1)
    assert report["problems"][0].endswith(
        "'unkind_target:run' must be a subclass of toolkit_lm.renderer.Renderer."
    )


def test_a_backend_without_its_methods(install, check):
    entry = (
        RIGHT.replace("register_commands", "register_attention_backends")
        .replace("commands", "backends")
        .replace(', help="Nothing."', "")
    )
    target = (
        "from toolkit_lm.attention import AttentionBackend\n\nclass run(AttentionBackend):\n    "
        "def build(self, batch): ...\n"
    )
    code, report = check(install("unfinished", entry, target))
    assert (code, len(report["problems"])) == (1, 1)
    assert (
        "'unfinished_target:run' does not define forward, page_layout, refuses, write_kv, which"
        in report["problems"][0]
    )


def test_a_model_with_another_constructor(install, check):
    entry = RIGHT.replace("commands", "models").replace(', help="Nothing."', "")
    target = (
        "from toolkit_lm.model import Model\n\nclass run(Model):\n    def __init__(self, "
        "config): ...\n"
    )
    code, report = check(install("positional", entry, target))
    assert code == 1
    assert "cannot be made as run(vllm_config=..., prefix=...)" in report["problems"][0]


def test_an_unknown_distribution(toolkit):
    done = toolkit("plugins", "check", "toolkit-lm-decoder2")
    assert (done.code, done.out) == (1, "")
    assert (
        "no distribution 'toolkit-lm-decoder2' that has plugins is installed. Did you mean "
        "'toolkit-lm-decoder'"
    ) in done.err


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            (
                "from toolkit_lm.model import Model\nclass Mine(Model):\n    _own = 1\n    def "
                "f(self): return self._own"
            ),
            [],
        ),
        ("import toolkit_lm_other._private", []),
        ("from ._mine import x", []),
        ("import toolkit_lm\nprint(toolkit_lm.__version__)", []),
        (
            "import toolkit_lm\ntoolkit_lm.attention.context._local",
            ["toolkit_lm.attention.context._local"],
        ),
        ("import toolkit_lm._version", ["toolkit_lm._version"]),
        (
            "from toolkit_lm.attention.context import _local as x",
            ["toolkit_lm.attention.context._local"],
        ),
        (
            "from toolkit_lm.scheduler import Scheduler as S\nS._admit = None",
            ["toolkit_lm.scheduler.Scheduler._admit"],
        ),
    ],
)
def test_private_names_of_a_file(tmp_path, source, found):
    file = tmp_path / "module.py"
    file.write_text(source)
    assert [line.rpartition(": ")[2] for line in private_names(file)] == found


def test_what_new_writes_uses_no_private_name(tmp_path):
    for kind in Kind:
        for file in write_plugin(kind, f"new-{kind}", tmp_path).rglob("*.py"):
            assert private_names(file) == []
