"""Installed plugins: really built, pip-installed into folders of their own, and loaded by `toolkit`
in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toolkit_lm.plugin import API_VERSION

SOURCES = Path(__file__).parent / "plugins"
SHIPPED = [
    "anthropic",
    "audio",
    "batches",
    "bench",
    "cli",
    "cohere",
    "compile",
    "core",
    "cpu",
    "data_parallel",
    "decoder",
    "deepseek",
    "devkit",
    "drafters",
    "encdec",
    "encoder",
    "executor_mp",
    "executor_ray",
    "flash_attn",
    "flashinfer",
    "flex",
    "gguf",
    "hybrid",
    "kserve",
    "kv_disk",
    "kv_events",
    "kv_redis",
    "kv_transfer",
    "llama_cpp",
    "llguidance",
    "loaders",
    "lora",
    "mcp",
    "model_pool",
    "moderations",
    "moe",
    "ollama",
    "opentelemetry",
    "parsers",
    "pooling_adapters",
    "prefix_retention",
    "quantization_formats",
    "quantize",
    "renderer_harmony",
    "renderer_hf",
    "renderer_mistral",
    "renderer_remote",
    "reward",
    "rl",
    "fronts",
    "ray_serve",
    "router",
    "sampling_extra",
    "sdpa",
    "sentence_transformers",
    "sglang",
    "server",
    "structured_output",
    "tei",
    "tiny",
    "transcription",
    "transformers",
    "triton",
    "vision",
    "vllm_names",
    "whisper",
    "xformers",
    "xgrammar",
]


BUILD = """
import os, sys
from hatchling.build import build_wheel

for folder in sys.argv[2:]:
    os.chdir(folder)
    build_wheel(sys.argv[1])
"""
"""Builder that pip calls for a wheel, for all in one process."""
INSTALL = """
import json, sys
from pip._internal.cli.main import main

options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile"]
for target, wheel in json.loads(sys.argv[1]):
    assert main(["install", *options, "--target", target, wheel]) == 0
"""
"""pip, for all in one process."""


@pytest.fixture(scope="session")
def installed(tmp_path_factory):
    """Folder -> where its distribution is installed. All are built at once."""
    home = tmp_path_factory.mktemp("installed")
    names = sorted(path.name for path in SOURCES.iterdir() if path.is_dir())
    distributions = {}
    for name in names:
        text = (SOURCES / name / "pyproject.toml").read_text()
        distributions[name] = re.search('^name = "(.*)"', text, re.MULTILINE)[1]
    wheels = home / "wheels"
    folders = [str(SOURCES / name) for name in names]
    subprocess.run([sys.executable, "-c", BUILD, wheels, *folders], check=True)
    arguments = [
        [str(home / name), *map(str, wheels.glob(f"{distribution.replace('-', '_')}-*.whl"))]
        for name, distribution in distributions.items()
    ]
    subprocess.run([sys.executable, "-c", INSTALL, json.dumps(arguments)], check=True)
    return {name: home / name for name in names}


@pytest.fixture
def toolkit(installed):
    """Runs `toolkit` with some of the distributions installed."""

    def run(*arguments, plugins=(), **environ):
        path = os.pathsep.join(str(installed[name]) for name in plugins)
        environ = {
            **os.environ,
            "PYTHONPATH": path,
            "COLUMNS": "200",
            "OMP_NUM_THREADS": "1",
            **environ,
        }
        code = "from toolkit_lm_cli import main; main()"
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def rows(done):
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_what_is_shipped_works(toolkit):
    done = toolkit("plugins", "list", "--json")
    assert {name: row["status"] for name, row in rows(done).items()} == dict.fromkeys(SHIPPED, "ok")
    assert done.stderr == ""


def test_a_good_plugin_of_a_third_party(toolkit, installed):
    row = rows(toolkit("plugins", "list", "--json", plugins=["good"]))["good"]
    assert (row["status"], row["distribution"], row["version"]) == ("ok", "good-model", "1.2.3")
    assert row["file"] == str(installed["good"] / "good_model.py")
    assert sorted(row["hooks"]) == ["toolkit_register_commands", "toolkit_register_models"]
    shown = json.loads(toolkit("plugins", "show", "good", "--json", plugins=["good"]).stdout)
    assert shown["entries"] == {
        "models": {"GoodForCausalLM": "good_model_target:GoodForCausalLM"},
        "commands": {"greet": "good_model_target:greet"},
    }
    assert shown["options"] == {"greeting": "str = 'hello'. Word to say.", "times": "int = 1"}
    table = toolkit("plugins", "show", "good", plugins=["good"]).stdout
    assert "greeting: str = 'hello'. Word to say." in table


def test_a_scheduling_policy_of_a_third_party(toolkit):
    shown = json.loads(
        toolkit("plugins", "show", "shortest_first", "--json", plugins=["shortest_first"]).stdout
    )
    assert shown["entries"] == {
        "scheduling_policies": {"shortest_first": "shortest_first_policy:shortest_first"}
    }
    assert (
        shown["status"] == "ok"
        and toolkit("plugins", "check", "shortest-first", plugins=["shortest_first"]).returncode
        == 0
    )


def test_a_quantization_of_a_third_party(toolkit):
    shown = json.loads(toolkit("plugins", "show", "int8", "--json", plugins=["int8"]).stdout)
    targets = {"absmax8": "toolkit_lm_int8.int8:Int8"}
    assert (shown["status"], shown["entries"]) == ("ok", {"quantization": targets})
    done = toolkit("plugins", "check", "toolkit-lm-int8", plugins=["int8"])
    assert done.returncode == 0, done.stdout
    done = toolkit(
        "explain", "tiny", "--quantization", "absmax8", "--device", "cpu", plugins=["int8"]
    )
    assert "safetensors, quantization: absmax8" in done.stdout, done.stderr


def test_an_executor_of_a_third_party(toolkit, tmp_path):
    done = toolkit("plugins", "check", "toolkit-lm-threads", plugins=["threads"])
    assert done.returncode == 0, done.stdout
    done = toolkit(
        "explain",
        "tiny",
        "--pipeline-parallel-size",
        "2",
        "--device",
        "cpu",
        "--json",
        plugins=["threads"],
    )
    assert json.loads(done.stdout)["executors"] == [
        ["in_process", "2 workers are needed, and it supports at most 1"],
        ["mp", None],
        ["external_launcher", None],
        ["ray", None],
        ["threads", None],
    ], done.stderr
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.jsonl"
    prompts.write_text(
        json.dumps({"messages": [{"role": "user", "content": "What is the capital of France?"}]})
        + "\n"
    )
    asked = [
        "--prompts",
        str(prompts),
        "--out",
        str(out),
        "--temperature",
        "0",
        "--max-tokens",
        "32",
        "--tensor-parallel-size",
        "2",
    ]
    done = toolkit("generate", "tiny", *asked, plugins=["threads"])
    assert "Paris" in json.loads(out.read_text())["outputs"][0]["text"], done.stderr


def test_its_command_is_listed_and_runs(toolkit):
    assert "Greet somebody." in toolkit("--help", plugins=["good"]).stdout
    done = toolkit(
        "greet",
        "you",
        "--plugin-option",
        "good.greeting=hi",
        "--plugin-option",
        "good.times=2",
        plugins=["good"],
    )
    assert (done.stdout, done.stderr, done.returncode) == ("hi you\nhi you\n", "", 0)


def test_its_options_come_from_the_config_file_too(toolkit, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("plugin_option:\n  good:\n    greeting: good day,\n")
    assert (
        toolkit("greet", "you", "--config", str(file), plugins=["good"]).stdout == "good day, you\n"
    )
    environ = {"TOOLKIT_LM_PLUGIN_OPTION": "good.greeting=welcome"}
    assert (
        toolkit("greet", "you", "--config", str(file), plugins=["good"], **environ).stdout
        == "welcome you\n"
    )
    done = toolkit("greet", "you", "--plugin-option", "good.greting=x", plugins=["good"])
    assert (
        done.returncode,
        "has no option 'greting'. Did you mean 'greeting'?" in done.stderr,
    ) == (2, True)


@pytest.mark.parametrize("way", ["flag", "flag before the command", "environment", "file"])
def test_the_allow_list_holds_before_commands_are_known(toolkit, tmp_path, way):
    file = tmp_path / "options.yaml"
    file.write_text("disable_plugins: [good]\n")
    flags = {
        "flag": ["greet", "you", "--disable-plugins", "good"],
        "flag before the command": ["--disable-plugins=good", "greet", "you"],
    }
    environ = {"TOOLKIT_LM_DISABLE_PLUGINS": "good"} if way == "environment" else {}
    given = flags.get(way, ["greet", "you"]) + (["--config", str(file)] if way == "file" else [])
    done = toolkit(*given, plugins=["good"], **environ)
    assert done.returncode == 2
    assert "no such command 'greet'" in done.stderr


def test_only_the_allowed_are_imported(toolkit):
    done = toolkit(
        "plugins", "list", "--json", "--plugins", "good,tiny,cli", plugins=["good", "raising"]
    )
    assert {
        name: row["status"] for name, row in rows(done).items() if row["status"] != "disabled"
    } == dict.fromkeys(["core", "good", "tiny", "cli"], "ok")
    assert done.stderr == ""


def broken(toolkit, name, *, error):
    """Asserts that a plugin is left out loudly when it is merely installed, and that it is fatal
    when it is asked for by name."""
    done = toolkit("plugins", "list", "--json", plugins=[name])
    row = rows(done)[name]
    assert row["status"] == "broken"
    assert error in row["error"]
    assert done.stderr.count("warning: ") == 1
    for part in (
        f"plugin {name!r} ({row['distribution']} {row['version']}",
        error,
        f"--disable-plugins {name}",
    ):
        assert part in done.stderr
    assert all(rows(done)[other]["status"] == "ok" for other in SHIPPED)
    return row, toolkit("plugins", "list", "--plugins", name, plugins=[name])


def assert_fatal(done, *parts):
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_a_raising_plugin(toolkit, installed):
    row, asked = broken(toolkit, "raising", error="OSError: no such accelerator")
    place = f"{installed['raising'] / 'raising_plugin.py'}:3"
    assert "raising_plugin.py" in row["traceback"]
    assert_fatal(
        asked, "plugin 'raising' (raising-plugin 0.5", "OSError: no such accelerator", place
    )
    traced = toolkit("plugins", "list", "--plugins", "raising", "--traceback", plugins=["raising"])
    assert traced.returncode == 1
    assert 'raise OSError("no such accelerator")' in traced.stderr
    shown = toolkit("plugins", "show", "raising", plugins=["raising"])
    assert 'raise OSError("no such accelerator")' in shown.stdout


def test_a_duplicate_key(toolkit):
    done = toolkit("plugins", "list", "--json", plugins=["good", "duplicate_key"])
    found = rows(done)
    assert (found["good"]["status"], found["later"]["status"]) == ("ok", "broken")
    for part in (
        "'GoodForCausalLM' is registered by plugin 'good' (good-model 1.2.3",
        "and by plugin 'later' (duplicate-key 2.0",
    ):
        assert part in done.stderr
    assert found["later"]["entries"] == {}, "a plugin that fails leaves nothing behind"
    assert_fatal(
        toolkit("plugins", "list", "--plugins", "good,later", plugins=["good", "duplicate_key"]),
        "good-model 1.2.3",
        "duplicate-key 2.0",
    )


def test_a_duplicate_name(toolkit):
    """Neither is imported, and the command goes on; it is fatal when the name was asked for."""
    done = toolkit("plugins", "list", "--json", plugins=["good", "duplicate_name"])
    assert done.returncode == 0
    rows = [row for row in json.loads(done.stdout) if row["name"] == "good"]
    assert {row["distribution"]: row["status"] for row in rows} == {
        "duplicate-name": "broken",
        "good-model": "broken",
    }
    message = "two installed plugins have the name 'good'"
    for part in (message, "good-model 1.2.3", "duplicate-name 3.1"):
        assert part in done.stderr
    done = toolkit("plugins", "list", "--plugins", "good", plugins=["good", "duplicate_name"])
    assert_fatal(done, message, "good-model 1.2.3", "duplicate-name 3.1")
    assert (
        toolkit(
            "plugins", "list", "--disable-plugins", "good", plugins=["good", "duplicate_name"]
        ).returncode
        == 0
    )


def test_copies_of_one_distribution_are_one_plugin(toolkit, installed, tmp_path):
    copy = tmp_path / "copy"
    (metadata,) = installed["good"].glob("*.dist-info")
    (copy / metadata.name).mkdir(parents=True)
    for name in ("METADATA", "entry_points.txt"):
        (copy / metadata.name / name).write_text((metadata / name).read_text())
    path = f"{installed['good']}{os.pathsep}{copy}"
    assert rows(toolkit("plugins", "list", "--json", PYTHONPATH=path))["good"]["status"] == "ok"
    stale = copy / metadata.name / "METADATA"
    stale.write_text(stale.read_text().replace("Version: 1.2.3", "Version: 1.0.0"))
    done = toolkit("plugins", "list", "--plugins", "good", PYTHONPATH=path)
    assert_fatal(done, "good-model 1.2.3", "good-model 1.0.0")


def test_a_misspelt_hook(toolkit):
    error = "there is no hook 'toolkit_register_model'. Did you mean 'toolkit_register_models'"
    _, asked = broken(toolkit, "misspelt", error=error)
    assert_fatal(asked, "misspelt-hook 0.1", error)


def test_a_wrong_api_version(toolkit):
    error = f"it requires toolkit-lm-core<0.1, and this is toolkit-lm-core {API_VERSION}"
    _, asked = broken(toolkit, "old_api", error=error)
    assert_fatal(asked, "old-api 0.0.9", error)


def test_an_entry_module_that_imports_torch(toolkit):
    done = toolkit(
        "plugins", "list", "--json", plugins=["imports_torch"], PYTHONWARNINGS="error::UserWarning"
    )
    row = rows(done)["imports_torch"]
    assert (row["status"], list(row["entries"]["models"])) == ("ok", ["HeavyForCausalLM"])
    assert row["import_seconds"] > 0.1
    assert "imports torch" not in done.stderr, (
        "what its author should change is for `toolkit plugins check`"
    )
    assert any("requires no version of toolkit-lm-core" in note for note in row["notes"])


def test_an_unknown_name_in_a_list(toolkit):
    for flag in ("--plugins", "--disable-plugins"):
        assert_fatal(
            toolkit("plugins", "list", flag, "serber"),
            "'serber', which is not installed. Did you mean 'server'",
        )


def test_processes_with_the_same_plugins_have_one_fingerprint(installed):
    code = "from toolkit_lm.plugin import Plugins; print(Plugins.load().fingerprint().digest)"

    def digest(*plugins):
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(installed[name]) for name in plugins),
        }
        return subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
        ).stdout

    assert digest("good") == digest("good") != digest()


@pytest.fixture
def one_token(tmp_path):
    """Options of `toolkit generate`."""
    (tmp_path / "prompts.txt").write_text("a\n")
    return [
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--out",
        str(tmp_path / "outputs.jsonl"),
        "--max-tokens",
        "1",
    ]


def test_a_failing_backend_that_nobody_asked_for(toolkit, installed, one_token):
    """It is passed over with its reason, is warned about once, and the model runs."""
    place = (
        "plugin 'failing' (failing-backend 2.5, "
        f"{installed['failing_backend'] / 'failing_backend_target.py'}:26) failed in"
    )
    done = toolkit("generate", "tiny", *one_token, "--engine-process", plugins=["failing_backend"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no such kernel") == 1
    done = toolkit("explain", "tiny", "--json", plugins=["failing_backend"])
    candidates = dict(json.loads(done.stdout)["layers"][0]["candidates"])
    assert (
        candidates["failing"]
        == f"{place} refuses() of attention backend 'failing': RuntimeError: no such kernel"
    )


@pytest.mark.parametrize("command", ["serve", "generate", "explain"])
def test_a_failing_backend_that_was_asked_for(toolkit, installed, one_token, command):
    """The same error wherever it comes from; its traceback is there for who wants it."""
    options = {"serve": ["--port", "0"], "generate": one_token, "explain": []}[command]
    done = toolkit(
        command,
        "tiny",
        *options,
        "--attention-backend",
        "failing",
        "--traceback",
        plugins=["failing_backend"],
    )
    assert done.returncode == 1
    place = (
        "plugin 'failing' (failing-backend 2.5, "
        f"{installed['failing_backend'] / 'failing_backend_target.py'}:26) failed in"
    )
    assert (
        f"PluginError: {place} refuses() of attention backend 'failing': RuntimeError: no "
        "such kernel"
    ) in done.stderr
    assert 'raise RuntimeError("no such kernel")' in done.stderr


def test_a_backend_that_fails_while_a_server_starts(toolkit):
    done = toolkit("serve", "tiny", "--port", "0", plugins=["failing_backend"], FAILS_LATER="1")
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    named = (
        r"error: plugin 'failing' \(failing-backend 2.5, .*target.py:26\) failed in "
        r"FailingBackend.page_layout"
    )
    assert re.fullmatch(f"{named}: RuntimeError: no such kernel", error)


def test_a_silent_and_slow_entry_module(toolkit):
    """It prints, and waits without computing: a busy disk or machine does that to any module, so
    that nobody is blamed for it."""
    done = toolkit("explain", "tiny", "--json", plugins=["slow"])
    assert done.returncode == 0 and json.loads(done.stdout)["plugin"] == "decoder"
    assert done.stderr.count("hello from slow") == 1
    assert re.search(
        r"importing plugin 'slow' \(slow-plugin 0.1, .*slow_plugin.py\) \.\.\.", done.stderr
    )
    assert "is slow" not in done.stderr
    row = rows(toolkit("plugins", "list", "--json", plugins=["slow"]))["slow"]
    assert (row["status"], row["import_seconds"] < 3) == ("ok", True)


def test_an_import_that_is_interrupted_is_named(installed):
    environ = {**os.environ, "PYTHONPATH": str(installed["slow"])}
    code = "from toolkit_lm_cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "plugins", "list"],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # It prints this while it is imported.
        assert process.stderr.readline() == "hello from slow\n"
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
    assert process.returncode == 130
    assert "interrupted while importing plugin 'slow' (slow-plugin 0.1" in rest


def test_warnings_come_from_the_front_alone(toolkit, one_token):
    done = toolkit("generate", "tiny", *one_token, "--engine-process", plugins=["slow", "raising"])
    assert done.returncode == 0, done.stderr
    for warning in ("no such accelerator", "this module is old"):
        assert (
            sum("warning" in line.lower() and warning in line for line in done.stderr.splitlines())
            == 1
        ), done.stderr
