"""Selection of an engine's runner and convert type, from the options and the checkpoint."""

from __future__ import annotations

from typing import NamedTuple

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import CONVERT_TASKS, RunnerType, default_runner
from toolkit_lm.errors import ConfigError, UnsupportedError, nearest
from toolkit_lm.plugin import Plugins, way_to_get


class RunnerChoice(NamedTuple):
    """The runner and convert type that result from `--runner` and `--convert`."""

    runner: RunnerType
    convert: str
    """Convert type. "none": the unchanged model class."""


def choose_runner(config: VllmConfig, plugins: Plugins) -> RunnerChoice:
    """Selects the runner and convert type of a config whose checkpoint is known. Raises ConfigError
    for an invalid combination."""
    assert config.checkpoint is not None
    name = config.checkpoint.hf_config["architectures"][0]
    wanted = config.model.runner
    convert = config.model.convert
    by_name, by_name_convert = default_runner(name)
    profile = config.checkpoint.pooling_profile
    if profile is not None and profile.is_complete and by_name == "generate":
        by_name = "pooling"
        by_name_convert = "classify" if profile.scores else "embed"
    entry = plugins.models.get(config.checkpoint.architecture)
    if entry.encoder_decoder is not None:
        return _encoder_decoder(config, name)
    native = entry.runner == "pooling"
    if native and wanted == "generate":
        raise ConfigError(f"runner 'generate': {name!r} is a pooling model. Supported: pooling.")
    _check_convert(convert, name, native, plugins)
    runner: RunnerType = by_name
    if wanted != "auto":
        runner = wanted
    elif native or convert not in ("auto", "none"):
        runner = "pooling"
    if runner == "generate":
        if convert not in ("auto", "none"):
            hint = " or extra_tasks=['embed']" if convert == "embed" else ""
            raise ConfigError(
                f"runner 'generate' takes convert 'none', not {convert!r}. Use "
                f"runner='pooling'{hint}."
            )
        _check_extra_tasks(config.model.extra_tasks)
        return RunnerChoice("generate", "none")
    if config.model.extra_tasks:
        raise ConfigError(
            f"extra_tasks {', '.join(config.model.extra_tasks)} is for engines that generate, "
            "and this one is for pooling."
        )
    if native:
        return RunnerChoice("pooling", "none")
    if convert == "none":
        raise ConfigError(
            f"runner 'pooling' cannot run {name!r} as it is. Use "
            f"{' or '.join(f'convert={kind!r}' for kind in plugins.pooling)}."
        )
    if convert == "auto":
        convert = by_name_convert if by_name_convert != "none" else "embed"
    return RunnerChoice("pooling", convert)


def _encoder_decoder(config: VllmConfig, name: str) -> RunnerChoice:
    """Runner choice for an encoder-decoder model: it generates, or its encoder embeds if the class
    supports that."""
    model = config.model
    if model.convert == "embed" and model.runner != "generate":
        return RunnerChoice("pooling", "embed")
    asked = {
        "runner": model.runner == "pooling",
        "convert": model.convert not in ("auto", "none"),
        "extra_tasks": bool(model.extra_tasks),
    }
    for option in [option for option, refused in asked.items() if refused]:
        value = getattr(model, option)
        raise ConfigError(
            f"{option} {value!r}: {name!r} is an encoder-decoder model, which generates. Of some "
            "the encoder can embed: convert='embed'."
        )
    return RunnerChoice("generate", "none")


def _check_convert(convert: str, name: str, native: bool, plugins: Plugins) -> None:
    if convert == "reward" and not (native and "Reward" in name):
        able = "'auto'" if native else "'classify', for a checkpoint with a trained score head"
        raise ConfigError(
            f"convert 'reward' is for native reward models, and {name!r} is not one: no other "
            "model can be converted into one. "
            f"Use convert={able}."
        )
    known = ["auto", "none", "reward", *plugins.pooling]
    if convert not in known:
        way = way_to_get(plugins.pooling.noun, convert) or nearest(convert, known)
        raise ConfigError(f"there is no convert type {convert!r}. {way}")
    # The table calls reward models embedders; those that are not native are treated so.
    if (
        native
        and convert in CONVERT_TASKS
        and ("Reward" in name or default_runner(name)[1] != convert)
    ):
        raise UnsupportedError(
            f"{name!r} is a pooling model already, but not of convert type {convert!r}. Use "
            "convert='auto'."
        )


def _check_extra_tasks(extra_tasks: list[str]) -> None:
    for task in extra_tasks:
        if task != "embed":
            raise ConfigError(
                f"extra_tasks {task!r}: a generating engine can serve embeddings beside "
                "generation only. Supported: embed."
            )
