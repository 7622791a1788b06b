"""`engine_command`: flags from where options are stated, and their precedence."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Annotated, get_args, get_origin

import pytest
import typer
from msgspec import Struct
from toolkit_lm.config import PluginsConfig, VllmConfig, option
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm_cli.app import LazyGroup
from toolkit_lm_cli.prescan import plugins_config
from toolkit_lm_cli.sampling import SamplingFlags
from toolkit_lm_commands import engine_command


class PortOptions(Struct, frozen=True, kw_only=True):
    port: Annotated[int, option("A port.", ge=1)] = 80
    quiet: Annotated[bool, option("Say nothing.")] = False
    origins: Annotated[list[str], option("Origins.")] = []


class ClientOptions(Struct, frozen=True, kw_only=True):
    url: Annotated[str | None, option("A server.")] = None
    api_key: Annotated[str | None, option("Its key.")] = None


seen = {}


@engine_command(PortOptions)
def probe(
    config: VllmConfig,
    ports: PortOptions,
    plugins: Plugins,
    flags: SamplingFlags,
    extra: str = "none",
) -> None:
    """Probe the options."""
    seen.update(config=config, ports=ports, plugins=plugins, flags=flags, extra=extra)


@engine_command(ClientOptions)
def other(client: ClientOptions) -> None:
    """Another command."""


class LoudParams(ProcessorParams):
    loud_times: Annotated[int, param("Times that it is loud.", ge=0, le=9)] = 1
    loud_words: Annotated[list[str] | None, param("What is loud.", none="all")] = None
    loud_secret: Annotated[bool, param("Nobody hears.", flag=False)] = False


class ProbePlugin:
    name = "probe"

    @hookimpl
    def toolkit_register_logits_processors(self, processors):
        processors.add("loud", "nowhere:Loud", params=LoudParams)

    @hookimpl
    def toolkit_register_commands(self, commands):
        commands.add("probe", "probe_module:probe", help="Probe the options.")
        commands.add("other", "probe_module:other", help="Another command.")


@pytest.fixture
def invoke(monkeypatch):
    """Runs the command `probe` through the group, and returns what the function was given."""
    module = type(sys)("probe_module")
    module.probe = probe
    module.other = other
    monkeypatch.setitem(sys.modules, "probe_module", module)
    app = typer.Typer(cls=LazyGroup)

    @app.callback()
    def root(config: str | None = None, disable_plugins: list[str] | None = None) -> None: ...

    def call(*arguments):
        seen.clear()
        plugins = Plugins.load(PluginsConfig(plugins=["cli"]), extra=[ProbePlugin()])
        monkeypatch.setattr(plugins, "config", plugins_config(arguments, os.environ))
        typer.main.get_command(app).main(list(arguments), obj=plugins, standalone_mode=False)
        return dict(seen)

    return call


def test_defaults(invoke):
    found = invoke("probe")
    assert found["config"] == VllmConfig.make()
    assert found["ports"] == PortOptions()
    assert (found["flags"], found["extra"]) == ({}, "none")


def test_help_tells_bounds_and_default():
    parameters = inspect.signature(probe).parameters.values()
    helps = {
        p.name: get_args(p.annotation)[1].help
        for p in parameters
        if get_origin(p.annotation) is Annotated
    }
    assert helps["block_size"].endswith(". Between 1 and 1024. Default: 16.")
    assert helps["temperature"].endswith(". Between 0 and 1000000. Default: 1.0.")
    assert helps["top_p"].endswith(". Above 0 and at most 1. Default: 1.0.")
    assert helps["best_of"].endswith(". At least 1. Default: n.")
    assert helps["max_tokens"].endswith(
        ". At least 0. none: as many as fit in max_model_len, the default of a chat. Default: 16."
    )
    assert helps["stop"].endswith(". May be given several times.")
    assert helps["early_stopping"].endswith(". Default: false.")


def test_every_kind_of_flag(invoke):
    arguments = [
        "probe",
        "some/model",
        "--block-size",
        "32",
        "--port=81",
        "--quiet",
        "--origins",
        "a",
        "--origins",
        "b,c",
        "--extra",
        "x",
    ]
    arguments += [
        "--max-model-len",
        "none",
        "--max-tokens",
        "none",
        "--top-k",
        "5",
        "--stop",
        "a",
        "--stop",
        "b,c",
        "--seed",
        "7",
    ]
    found = invoke(*arguments)
    config = found["config"]
    assert (
        config.model.model,
        config.cache.block_size,
        config.model.max_model_len,
        config.model.seed,
    ) == ("some/model", 32, None, 7)
    assert found["ports"] == PortOptions(port=81, quiet=True, origins=["a", "b", "c"])
    assert found["flags"] == {"max_tokens": None, "top_k": 5, "stop": ["a", "b,c"], "seed": 7}
    assert found["flags"].params(temperature=0).top_k == 5
    assert found["extra"] == "x"


def test_parameters_of_logits_processors_have_flags(invoke):
    flags = invoke("probe", "--loud-times", "3", "--loud-words", "a", "--loud-words", "b")["flags"]
    assert flags == {"loud_times": 3, "loud_words": ["a", "b"]}
    assert flags.params(temperature=0) == SamplingParams(
        temperature=0, extra_args={"loud_times": 3, "loud_words": ["a", "b"]}
    )
    assert flags.params({"loud_times": 4, "loud_secret": True}).extra_args == {
        "loud_times": 4,
        "loud_words": ["a", "b"],
        "loud_secret": True,
    }
    assert invoke("probe")["flags"].params() == SamplingParams()
    for overrides, message in (
        ({"loud_times": 10}, "between 0 and 9"),
        ({"loud_timse": 1}, "Did you mean 'loud_times'"),
    ):
        with pytest.raises(RequestError, match=message):
            flags.params(overrides)
    with pytest.raises(ConfigError, match=r"^--loud-times must be between 0 and 9, not 10"):
        invoke("probe", "--loud-times", "10")
    with pytest.raises(Exception, match="no such option: --loud-secret"):
        invoke("probe", "--loud-secret")
    registry = Plugins.load(PluginsConfig(plugins=["cli"]), extra=[ProbePlugin()]).logits_processors
    [flag] = get_args(
        inspect.signature(probe.with_processors(registry)).parameters["loud_times"].annotation
    )[1:]
    assert flag.help == "Times that it is loud. Between 0 and 9. Default: 1."


def test_a_flag_wins_over_environment_over_file(invoke, tmp_path, monkeypatch):
    file = tmp_path / "options.yaml"
    file.write_text("block-size: 8\nport: 82\nmax_num_seqs: 3\nquiet: true\n")
    monkeypatch.setenv("TOOLKIT_LM_BLOCK_SIZE", "16")
    monkeypatch.setenv("TOOLKIT_LM_PORT", "83")
    found = invoke("probe", "--config", file.as_posix(), "--block-size", "32", "--no-quiet")
    assert (
        found["config"].cache.block_size,
        found["ports"].port,
        found["config"].scheduler.max_num_seqs,
    ) == (32, 83, 3)
    assert found["ports"].quiet is False
    assert invoke("--config", file.as_posix(), "probe")["config"].scheduler.max_num_seqs == 3


def test_wrong_values_name_their_option(invoke):
    with pytest.raises(ConfigError, match=r"^--block-size must be between 1 and 1024, not 0"):
        invoke("probe", "--block-size", "0")
    with pytest.raises(ConfigError, match=r"^--dtype .*Did you mean 'float16'"):
        invoke("probe", "--dtype", "flot16")


def test_switches_that_may_be_unset(invoke, monkeypatch):
    monkeypatch.setenv("TOOLKIT_LM_OVERLAP", "true")
    config = invoke(
        "probe", "--enable-prefix-caching", "--no-enable-chunked-prefill", "--no-normalize"
    )["config"]
    assert (
        config.cache.enable_prefix_caching,
        config.scheduler.enable_chunked_prefill,
        config.pooler.normalize,
    ) == (True, False, False)
    assert (config.engine.overlap, config.engine.engine_process) == (True, None)
    monkeypatch.setenv("TOOLKIT_LM_OVERLAP", "perhaps")
    with pytest.raises(
        ConfigError,
        match=r"TOOLKIT_LM_OVERLAP must be true or false or none, not 'perhaps'",
    ):
        invoke("probe")


def test_no_abbreviations(invoke):
    with pytest.raises(Exception, match=r"no such option: --block-siz"):
        invoke("probe", "--block-siz", "8")


def test_options_of_other_commands_are_known_and_typos_are_not(invoke, tmp_path, monkeypatch):
    file = tmp_path / "options.yaml"
    file.write_text("url: http://x\n")
    monkeypatch.setenv("TOOLKIT_LM_API_KEY", "k")
    assert invoke("probe", "--config", file.as_posix())["config"] == VllmConfig.make()
    file.write_text("prot: 3\n")
    with pytest.raises(ConfigError, match=r"unknown option 'prot'. Did you mean 'port'"):
        invoke("probe", "--config", file.as_posix())


@pytest.mark.parametrize(
    ("arguments", "environ", "wanted"),
    [
        ([], {}, PluginsConfig()),
        (["serve", "--plugins", "a", "--plugins=b,c"], {}, PluginsConfig(plugins=["a", "b", "c"])),
        (["serve", "--plugins", "a"], {"TOOLKIT_LM_PLUGINS": "b"}, PluginsConfig(plugins=["a"])),
        (
            ["--", "--plugins", "a"],
            {"TOOLKIT_LM_DISABLE_PLUGINS": "b"},
            PluginsConfig(disable_plugins=["b"]),
        ),
        (
            ["--plugin-option", "a.b=1", "--plugin-option=a.c=2"],
            {},
            PluginsConfig(plugin_option={"a": {"b": "1", "c": "2"}}),
        ),
        (["--plugins"], {}, PluginsConfig()),
    ],
)
def test_which_plugins_to_load_is_found_before_commands_are_known(arguments, environ, wanted):
    assert plugins_config(arguments, environ) == wanted


def test_and_in_the_config_file(tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("plugins: [a]\nsome_command_option: 3\n")
    assert plugins_config(["x", "--config", str(file)], {}) == PluginsConfig(plugins=["a"])
    with pytest.raises(ConfigError, match=r"absent.yaml"):
        plugins_config([f"--config={tmp_path / 'absent.yaml'}"], {})


def test_the_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom toolkit_lm_cli.app import run\nassert run(['--help']) == 0\n"
        "names = 'torch transformers numpy pydantic fastapi httpx rich prompt_toolkit'.split()\n"
        "heavy = [m for m in names if m in sys.modules]\n"
        "print(heavy, len(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy, num_modules = done.stderr.rsplit(maxsplit=1)
    assert heavy == "[]"
    # A count is the same on every machine: a third of a second of CPU time here.
    assert int(num_modules) < 700
