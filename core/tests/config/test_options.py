"""Options: how each is stated, converted and found."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import pytest
from toolkit_lm.config import (
    PluginsConfig,
    SchedulerConfig,
    VllmConfig,
    load_options,
    option,
    options_of,
)
from toolkit_lm.errors import ConfigError


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    count: Annotated[int, option("A count.", ge=1, le=8)] = 2
    ratio: Annotated[float, option("A ratio.", ge=0, le=1)] = 0.5
    limit: Annotated[int | None, option("A limit.")] = None
    color: Annotated[Literal["red", "green"], option("A color.")] = "red"
    loud: Annotated[bool, option("Loud.")] = False
    fast: Annotated[bool | None, option("Fast.")] = None
    names: Annotated[list[str] | None, option("Names.")] = None
    tree: Annotated[dict[str, dict[str, str]], option("A tree.")] = msgspec.field(
        default_factory=dict
    )
    derived: int = 0


OPTIONS = options_of(Sample)
BY_NAME = {o.name: o for o in OPTIONS}


def test_each_option_is_derived_from_its_field():
    assert [o.name for o in OPTIONS] == [
        "count",
        "ratio",
        "limit",
        "color",
        "loud",
        "fast",
        "names",
        "tree",
    ]
    assert (BY_NAME["count"].flag, BY_NAME["count"].env, BY_NAME["count"].default) == (
        "--count",
        "TOOLKIT_LM_COUNT",
        2,
    )
    assert BY_NAME["color"].choices == ("red", "green")
    assert [o.name for o in OPTIONS if o.is_flag] == ["loud", "fast"]
    assert BY_NAME["names"].is_list and BY_NAME["tree"].is_mapping
    assert BY_NAME["limit"].kinds == (int, type(None))
    assert BY_NAME["tree"].default == {}


@pytest.mark.parametrize(
    ("name", "given", "wanted"),
    [
        ("count", "3", 3),
        ("count", 3, 3),
        ("ratio", "0.25", 0.25),
        ("ratio", 1, 1.0),
        ("limit", "none", None),
        ("limit", None, None),
        ("limit", "7", 7),
        ("color", "green", "green"),
        ("loud", "true", True),
        ("loud", "0", False),
        ("fast", "true", True),
        ("fast", "none", None),
        ("names", "a, b,", ["a", "b"]),
        ("names", ["a", "b"], ["a", "b"]),
        ("names", "none", None),
        ("tree", "a.b=c", {"a": {"b": "c"}}),
        ("tree", ["a.b-c=d=e", "a.f=g,h"], {"a": {"b_c": "d=e", "f": "g,h"}}),
        ("tree", "a.b=1,2,c.d=3", {"a": {"b": "1,2"}, "c": {"d": "3"}}),
        ("tree", {"a": {"b": "c"}}, {"a": {"b": "c"}}),
    ],
)
def test_convert(name, given, wanted):
    assert BY_NAME[name].convert(given, "here") == wanted


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("count", "three"),
        ("count", 0),
        ("count", "9"),
        ("count", 1.5),
        ("count", True),
        ("count", None),
        ("count", "none"),
        ("ratio", "nan"),
        ("ratio", "inf"),
        ("limit", "[1]"),
        ("color", "blue"),
        ("loud", "perhaps"),
        ("names", 3),
        ("tree", "a=b"),
        ("tree", ["a.b"]),
        ("tree", {"a": 1}),
    ],
)
def test_convert_refuses(name, given):
    with pytest.raises(ConfigError, match=rf"^here: {name}\b"):
        BY_NAME[name].convert(given, f"here: {name}")


def test_a_wrong_choice_names_the_choices():
    with pytest.raises(
        ConfigError, match=r"^color must be one of .*green.*, not 'gren'. Did you mean 'green'\?"
    ):
        BY_NAME["color"].convert("gren", "color")


def test_a_keyword_wins_over_environment():
    environ = {"TOOLKIT_LM_COUNT": "4", "TOOLKIT_LM_RATIO": "0.2", "HOME": "x"}
    assert load_options(OPTIONS, {"count": "5"}, environ=environ) == {"count": 5, "ratio": 0.2}


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown option 'ration'. Did you mean 'ratio'"):
        load_options(OPTIONS, {"ration": 1})
    with pytest.warns(
        UserWarning, match=r"TOOLKIT_LM_COUMT sets no option. Did you mean TOOLKIT_LM_COUNT\?"
    ):
        assert load_options(OPTIONS, {}, environ={"TOOLKIT_LM_COUMT": "3"}) == {}


def test_options_of_other_commands_are_let_pass():
    assert load_options(OPTIONS, {}, environ={"TOOLKIT_LM_PORT": "81"}, foreign=["port"]) == {}


def test_a_wrong_value_names_its_source():
    with pytest.raises(ConfigError, match=r"environment variable TOOLKIT_LM_COUNT"):
        load_options(OPTIONS, {}, environ={"TOOLKIT_LM_COUNT": "many"})


def test_names_are_unique_and_helped_over_all_sections():
    options = VllmConfig.options()
    names = [o.name for o in options]
    assert len(names) == len(set(names))
    assert all(o.help.endswith(".") for o in options)


def test_every_default_is_a_value_of_its_option():
    for o in VllmConfig.options():
        assert o.convert(o.default, "default") == o.default


def test_make_and_replace():
    config = VllmConfig.make(block_size="32", plugins=["a"], max_model_len=None)
    assert (config.cache.block_size, config.plugins.plugins, config.model.max_model_len) == (
        32,
        ["a"],
        None,
    )
    changed = config.replace(block_size=8)
    assert (changed.cache.block_size, config.cache.block_size, changed.plugins) == (
        8,
        32,
        config.plugins,
    )
    for call in (VllmConfig.make, config.replace):
        with pytest.raises(
            ConfigError, match=r"unknown option 'block_sise'. Did you mean 'block_size'"
        ):
            call(block_sise=1)
        with pytest.raises(ConfigError, match=r"^block_size must be between 1 and 1024, not 0"):
            call(block_size=0)


def test_a_config_is_frozen():
    with pytest.raises(AttributeError):
        VllmConfig.make().cache.block_size = 3


def test_a_default_config_is_resolved():
    config = VllmConfig.default({"architectures": ["X"], "hidden_size": 8}, max_num_seqs=3)
    assert config.checkpoint.architecture == "X"
    assert config.hf_config["hidden_size"] == 8
    assert (config.device.device, config.max_model_len, config.scheduler.max_num_seqs) == (
        "cpu",
        512,
        3,
    )


def test_ranks():
    config = VllmConfig.make(tensor_parallel_size=2, pipeline_parallel_size=2).with_rank(3)
    assert (config.parallel.tensor_parallel_rank, config.parallel.pipeline_parallel_rank) == (1, 1)


def test_sections_survive_a_process_boundary():
    config = VllmConfig.make(plugin_option=["a.b=c"], served_model_name="x")
    assert msgspec.json.decode(msgspec.json.encode(config), type=VllmConfig) == config
    assert isinstance(config.scheduler, SchedulerConfig) and isinstance(
        config.plugins, PluginsConfig
    )
