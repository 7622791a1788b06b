"""Fields put over those of config.json and generation_config.json, by vLLM's names of options."""

from __future__ import annotations

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from toolkit_lm.errors import ConfigError, RequestError, ToolkitError
from toolkit_lm_vllm import LLM, SamplingParams

CHECKPOINT = Path(str(files("toolkit_lm_tiny"))) / "checkpoint"
ROPE = {"rope_type": "linear", "factor": 2.0}
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)


def tokens(model: str, **options) -> list:
    with LLM(model, **options) as llm:
        [output] = llm.generate("Once upon a time there was", GREEDY)
    completion = output.outputs[0]
    return [completion.token_ids, completion.cumulative_logprob]


def test_a_field_is_that_of_a_checkpoint_that_states_it(tmp_path):
    """Nested fields are merged: rope_theta stays."""
    folder = tmp_path / "copy"
    shutil.copytree(CHECKPOINT, folder)
    stated = json.loads((folder / "config.json").read_text())
    stated["rope_parameters"] |= ROPE
    (folder / "config.json").write_text(json.dumps(stated))
    changed = tokens("tiny", hf_overrides={"rope_parameters": ROPE})
    assert changed == tokens(str(folder)) != tokens("tiny")


@pytest.mark.parametrize("source", ["auto", "vllm"])
def test_sampling_defaults(source):
    override = {"temperature": 0.5, "top_p": 0.25}
    with LLM("tiny", generation_config=source, override_generation_config=override) as llm:
        defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p) == (0.5, 0.25)


@pytest.mark.parametrize(
    "options", [{"hf_overrides": "[1]"}, {"override_generation_config": "nothing"}], ids=str
)
def test_what_is_no_object_is_refused(options):
    with pytest.raises(ConfigError, match=r"mapping of|not a JSON object"):
        LLM("tiny", **options)


def test_a_bad_default_is_refused():
    with pytest.raises((ToolkitError, RequestError), match="temperature"):
        LLM("tiny", override_generation_config={"temperature": "hot"})
