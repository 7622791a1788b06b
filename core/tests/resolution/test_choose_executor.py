"""Which executor runs an engine: the first whose number of workers suffices, or the one asked
for."""

from __future__ import annotations

import pytest
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.resolution.resolution import choose_executor


class Registers:
    name = "executors"

    @hookimpl
    def toolkit_register_executors(self, executors):
        executors.add("two", "nowhere:Two", max_ranks=2)
        executors.add("any", "nowhere:Any")


PLUGINS = Plugins.load(PluginsConfig(plugins=[]), extra=[Registers()])


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, "in_process"),
        ({"tensor_parallel_size": 2}, "two"),
        ({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "any"),
        ({"executor": "two"}, "two"),
        ({"executor": "any", "pipeline_parallel_size": 2}, "any"),
    ],
)
def test_the_first_that_suffices_or_the_one_asked_for(options, chosen):
    assert choose_executor(VllmConfig.make(**options), PLUGINS)[0] == chosen


def test_each_candidate_has_its_reason():
    _, candidates = choose_executor(VllmConfig.make(pipeline_parallel_size=3), PLUGINS)
    assert candidates == [
        ("in_process", "3 workers are needed, and it supports at most 1"),
        ("two", "3 workers are needed, and it supports at most 2"),
        ("any", None),
    ]


def test_the_one_asked_for_is_refused_with_those_that_are_able():
    config = VllmConfig.make(tensor_parallel_size=2, pipeline_parallel_size=2, executor="two")
    sizes = "tensor_parallel_size 2 x pipeline_parallel_size 2"
    expected = (
        f"executor 'two' cannot run {sizes}: 4 workers are needed, and it supports at most 2. "
        "Supported: any."
    )
    with pytest.raises(UnsupportedError) as caught:
        choose_executor(config, PLUGINS)
    assert str(caught.value) == expected


def test_none_is_able():
    with pytest.raises(
        UnsupportedError,
        match=r"no executor can run tensor_parallel_size 2 .*: in_process: 2 workers are "
        r"needed, and it supports at most 1\.",
    ):
        choose_executor(
            VllmConfig.make(tensor_parallel_size=2), Plugins.load(PluginsConfig(plugins=[]))
        )


def test_an_unknown_name():
    with pytest.raises(
        ConfigError, match=r"no executor 'tow' is registered\. Did you mean 'two'\?"
    ):
        choose_executor(VllmConfig.make(executor="tow"), PLUGINS)
