"""Every causal language model class of the installed transformers: its tokens are transformers', or
it is refused with a reason."""

import json

import pytest
from fallback_harness import check_parity, generate
from tiny_causal import ALL, NOT_BUILT, save, tiny_config
from toolkit_lm.config import VllmConfig
from toolkit_lm_transformers.model import TransformersForCausalLM

SHORT = (
    "roberta",
    "camembert",
    "data2vec-text",
    "modernbert-decoder",
    "stablelm",
    "gemma3",
    "gemma4_unified_text",
    "phimoe",
    "mamba",
    "blt",
)
"""A member of each kind: positions that begin later, a head that needs more, random weights within
bounds, a window that masks alone tell of, and what is refused.
"""


@pytest.mark.parametrize(
    "model_type",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in ALL],
)
def test_it_gives_the_tokens_of_transformers_or_is_refused(model_type, tmp_path):
    if model_type in NOT_BUILT:
        with pytest.raises(Exception, match=NOT_BUILT[model_type]):
            save(model_type, tmp_path)
        return
    hf_config = json.loads(tiny_config(model_type).to_json_string()) | {
        "architectures": [ALL[model_type]]
    }
    refusal = TransformersForCausalLM.refuses(VllmConfig.default(hf_config))
    if refusal is None:
        model = save(model_type, tmp_path)
        # transformers may write the config of a part, of another model_type.
        refusal = TransformersForCausalLM.refuses(
            VllmConfig.default(json.loads((tmp_path / "config.json").read_text()))
        )
    if refusal is None:
        check_parity(
            model, generate(tmp_path, model_impl="transformers", num_kv_blocks=200, preempts=False)
        )
    else:
        assert refusal.strip()


def test_what_cannot_be_built_is_of_transformers():
    assert NOT_BUILT.keys() <= set(ALL)
