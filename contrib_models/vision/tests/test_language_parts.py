"""Language models without a class of ours: the fallback runs them as parts, too."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.plugin import Plugins
from toolkit_lm_devkit import checkpoint_config, load_checkpoint, randomize
from toolkit_lm_transformers.model import TransformersForCausalLM
from transformers import GPTNeoXConfig, StableLmConfig
from vision_families import TEXT, llava, pictures
from vision_harness import logits_of_prompts, prompt_of

KINDS = {"StableLmForCausalLM": StableLmConfig, "GPTNeoXForCausalLM": GPTNeoXConfig}


def saved(folder, architecture, **fields):
    theirs = llava(text=KINDS[architecture](**TEXT, architectures=[architecture], **fields))
    randomize(theirs)
    theirs.eval().save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("architecture", KINDS)
def test_a_fallback_is_a_language_part(architecture, tmp_path):
    theirs = saved(tmp_path, architecture)
    plugins = Plugins.load()
    model = load_checkpoint(
        plugins.models.load("LlavaForConditionalGeneration"), tmp_path, plugins=plugins
    )
    assert isinstance(model.language_model, TransformersForCausalLM)
    rules = plugins.models.load_multimodal("LlavaForConditionalGeneration")(
        checkpoint_config(tmp_path)
    )
    prompt = prompt_of(rules, [11, 12, 13], *pictures(theirs, 1), [14, 15])
    with torch.inference_mode():
        expected = theirs(
            input_ids=torch.tensor([prompt.token_ids]), pixel_values=prompt.pictures[0]
        ).logits[0]
    assert (logits_of_prompts(model, [prompt])[0] - expected).abs().max() <= 1e-4


def test_a_language_part_that_nothing_runs_is_refused_by_name(tmp_path):
    saved(tmp_path, "StableLmForCausalLM")
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("StableLmForCausalLM", "OfNobodyForCausalLM"))
    plugins = Plugins.load()
    with pytest.raises(UnsupportedError, match="OfNobodyForCausalLM"):
        load_checkpoint(
            plugins.models.load("LlavaForConditionalGeneration"), tmp_path, plugins=plugins
        )
