"""`toolkit`: exit codes, errors, warnings, and the commands about the installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from toolkit_lm import __version__
from toolkit_lm_cli.generate import _read

COMMAND = [sys.executable, "-c", "from toolkit_lm_cli import main; main()"]


def test_version_and_help(toolkit):
    assert toolkit("--version").out == f"toolkit-lm {__version__}\n"
    shown = toolkit("--help")
    assert shown.code == 0
    for name in ("explain", "env", "plugins", "--traceback"):
        assert name in shown.out


def test_the_commands_of_other_plugins_work_without_the_plugin_cli(toolkit, tmp_path):
    shown = toolkit("--disable-plugins", "cli", "--help").out
    assert " serve " in shown and " chat " not in shown
    assert (
        toolkit("--plugins", "devkit", "plugins", "new", "command", "mine", "--dir", tmp_path).code
        == 0
    )
    assert "no such command 'chat'" in toolkit("--plugins", "devkit", "chat").err


def test_the_entry_module_imports_no_parser():
    code = (
        "import sys, toolkit_lm_cli\nprint({'typer', 'rich', 'toolkit_lm_cli.app', "
        "'toolkit_lm_commands.options'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_no_command_shows_the_help(toolkit):
    assert "Commands" in "".join(toolkit()[1:])


def test_an_unknown_command_names_the_nearest(toolkit):
    done = toolkit("explan")
    assert (done.code, done.out) == (2, "")
    assert "no such command 'explan'. Did you mean 'explain'" in done.err


def test_a_wrong_option_is_exit_code_2(toolkit, monkeypatch):
    assert toolkit("env", "--jsn").code == 2
    monkeypatch.setenv("TOOLKIT_LM_BLOCK_SIZE", "many")
    done = toolkit("explain", "tiny")
    assert done.code == 2
    assert done.err.startswith(
        "error: environment variable TOOLKIT_LM_BLOCK_SIZE must be a whole number, not 'many'."
    )


@pytest.mark.filterwarnings("default")
def test_an_unknown_variable_is_a_warning_of_one_line(toolkit, monkeypatch):
    monkeypatch.setenv("TOOLKIT_LM_BLOCK_SISE", "16")
    done = toolkit("plugins", "list", "--json")
    assert done.code == 0
    assert done.err == (
        "warning: environment variable TOOLKIT_LM_BLOCK_SISE sets no option. Did you mean "
        "TOOLKIT_LM_BLOCK_SIZE?\n"
    )


def test_variables_that_are_no_options_import_no_other_command():
    """Some commands need torch, which the front of a server does without."""
    code = (
        "import atexit, sys; from toolkit_lm_cli import main\n"
        "atexit.register(lambda: sys.stderr.write(str('torch' in sys.modules)))\n"
        "main()"
    )
    environ = {
        **os.environ,
        "TOOLKIT_LM_LAUNCH_KEY": "a secret of two nodes",
        "TOOLKIT_LM_SERVICE_HOST": "10.0.0.1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, "plugins", "list", "--json"],
        capture_output=True,
        text=True,
        env=environ,
    )
    assert (done.returncode, done.stderr) == (0, "False")


def test_plugins_list_and_show(toolkit):
    shown = toolkit("plugins", "list")
    assert shown.code == 0
    for part in ("core", "toolkit-lm-decoder", __version__, "ok", "commands, hookspecs"):
        assert part in shown.out
    rows = json.loads(toolkit("plugins", "list", "--json").out)
    assert len(shown.out.splitlines()) == len(rows), "a line for each, whole in a pipe"
    assert "executors, kernels, kv kinds, kv tiers, scheduling policies" in shown.out
    assert "toolkit_lm.kv.spec:FullSpec" in toolkit("plugins", "show", "core").out
    for name in ("toolkit-lm-cli", "Toolkit_LM.cli"):
        assert "toolkit_lm_cli.generate:generate" in toolkit("plugins", "show", name).out
    done = toolkit("plugins", "show", "decodr")
    assert (done.code, done.out) == (1, "")
    assert "there is no plugin 'decodr'. Did you mean 'decoder'" in done.err


def test_an_interrupt_is_quiet():
    # Who runs the tests in the background may have interrupts ignored.
    code = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom "
        "toolkit_lm_cli import app, main\n"
        "app.plugins_config = lambda *_: signal.raise_signal(signal.SIGINT)\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, "env"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_pipe_is_quiet():
    with subprocess.Popen(
        [*COMMAND, "plugins", "list", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == b""


def test_prompts_are_lines_that_end_at_a_newline_and_are_not_blank(tmp_path, toolkit):
    """JSON may hold other separators as they are."""
    file = tmp_path / "prompts.jsonl"
    file.write_bytes('{"prompt": "a\u2028b\x85"}\r\n\n \n{"prompt": "c"}\n'.encode())
    assert _read(file) == ['{"prompt": "a\u2028b\x85"}', '{"prompt": "c"}']
    assert "Blank lines are left out" in " ".join(toolkit("generate", "--help").out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--prot", "3"], "no such option: --prot (Possible options: --host, --port"),
        (["nothing"], "no such command 'nothing'. Known: bench, "),
        (["plugins", "nothing"], "no such command 'nothing'. Known: api, "),
        (["quantize"], "missing option '--out'. See `toolkit quantize --help`."),
        (["env", "a", "b"], "got unexpected extra argument(s) (a b). See `toolkit env --help`."),
        (["serve", "--port"], "option '--port' requires an argument."),
        (["serve", "--port", "x"], "--port must be a whole number, not 'x'."),
        (["serve", "tiny", "--max-model-len", "0"], "--max-model-len must be at least 1, not 0."),
        (["bench", "sweep"], "give either --concurrencies or --request-rates, such as "),
        (["env", "--nothing"], "no such option: --nothing. See `toolkit env --help`."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_use_is_one_line_of_one_style(toolkit, words, message):
    done = toolkit(*words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}") and done.err.count("\n") == 1
