"""The parts of a runner's steps: which are made, and which of their methods are called."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_model import make_config, make_plugins
from msgspec import Raw
from toolkit_lm.errors import PluginError
from toolkit_lm.messages import StepPlan
from toolkit_lm.parts import EncoderPart, MediaPart
from toolkit_lm.plugin import PartRegistry, PluginInfo
from toolkit_lm.runner import model_runner, step_parts, warm_up
from toolkit_lm.runner.step_parts import StepParts, make_parts
from toolkit_lm.step import StepPart


class Idle(StepPart):
    """Has nothing to do."""


class Answering(StepPart):
    def begin(self, plan, step):
        return Raw(b"\x01") if "answering" in plan.parts else None


class OfLastStage(StepPart):
    ranks = "last_stage"


class Asking(StepPart):
    asks = ("sing",)


def made(model=None, stage=0, stages=1, **workers):
    registry = PartRegistry(owner=PluginInfo("test"))
    for name, cls in workers.items():
        registry.add(name, worker=f"{__name__}:{cls.__name__}")
    plugins = make_plugins()
    plugins.parts = registry
    config = make_config()
    config = config.with_rank(0)
    parallel = SimpleNamespace(
        pipeline_parallel_rank=stage, pipeline_parallel_size=stages, tensor_parallel_size=1
    )
    config = SimpleNamespace(
        **{name: getattr(config, name) for name in ("checkpoint", "scheduler", "model", "cache")},
        parallel=parallel,
    )
    model = model or SimpleNamespace(parts={})
    return make_parts(model, config, torch.device("cpu"), plugins)


def test_of_a_part_that_overrides_nothing_nothing_is_called():
    parts = made(idle=Idle)
    assert list(parts.by_name) == ["idle"]
    calls = (parts.add, parts.remove, parts.begin, parts.groups, parts.inputs, parts.finish)
    assert calls == ([],) * 6
    assert parts.facts() == {} and parts.layers() == {} and parts.calls("example") == []


def test_a_plan_without_rows_reaches_a_part_and_its_answer_comes_back():
    [(name, begin)] = made(answering=Answering, idle=Idle).begin
    assert (name, begin(StepPlan(), None)) == ("answering", None)
    assert begin(StepPlan(parts={"answering": Raw(b"\x01")}), None) == Raw(b"\x01")


def test_a_part_runs_on_the_stages_that_it_names():
    assert list(made(last=OfLastStage, stage=0, stages=2).by_name) == []
    assert list(made(last=OfLastStage, stage=1, stages=2).by_name) == ["last"]


def test_a_model_without_what_a_part_asks_for_is_refused():
    with pytest.raises(PluginError, match="has the part 'asking', and no sing"):
        made(asking=Asking)


def test_a_model_may_read_media_and_have_an_encoder():
    class Both(torch.nn.Module):
        parts = {"media": MediaPart, "encoder": EncoderPart}
        embed = encode_items = example_items = encode = None

    parts = made(Both())
    assert list(parts.by_name) == ["media", "encoder"]
    assert parts.feeds == {"sequences", "encoder_cache"}


def test_the_runner_asks_no_part_for_its_class():
    for module in (model_runner, warm_up, step_parts):
        source = Path(vars(module).get("__file__") or module.__code__.co_filename).read_text()
        asked = set(re.findall(r"isinstance\([^()]*(?:\([^()]*\))?[^()]*, (\w+)\)", source))
        assert asked <= {"Tensor", "FallbackModel", "float", "Pooler"}
    assert StepParts({}).feeds == frozenset()
