"""Every family through the whole engine: prompts of several lengths in several steps, in float32
and in bfloat16."""

import copy

import pytest
import torch
from encoder_families import VARIANTS, make_model
from toolkit_lm import LLM
from toolkit_lm_devkit import make_checkpoint, randomize

VOCAB_SIZE = 270
PROMPTS = [
    {"prompt_token_ids": [5 + (7 * i + n) % 260 for i in range(n)]}
    for n in (9, 30, 5, 30, 1, 9, 60, 9)
]
EXACT = ["Bert", "Roberta", "MPNet", "ModernBert", "NomicBert"]
TASKS = {
    "Model": "embed",
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "token_classify",
}


def make(architecture, family, folder, dtype=torch.float32):
    fields = next(iter(VARIANTS[family].values()))
    model = make_model(architecture, {**fields, "vocab_size": VOCAB_SIZE}).eval()
    randomize(model)
    make_checkpoint(folder, model.to(dtype))
    return model


def results(folder, task, **options):
    options = {"dtype": "float32", "max_num_batched_tokens": 100, "max_num_seqs": 4, **options}
    with LLM(str(folder), device="cpu", **options) as llm:
        return [
            torch.tensor(output.outputs.data)
            for output in llm.encode(PROMPTS, pooling_task=task, use_tqdm=False)
        ]


def expected(model, task):
    with torch.inference_mode():
        outputs = [model(torch.tensor([prompt["prompt_token_ids"]])) for prompt in PROMPTS]
    if task == "embed":
        return [
            torch.nn.functional.normalize(output.last_hidden_state[0].float().mean(0), dim=-1)
            for output in outputs
        ]
    return [output.logits[0].float().softmax(-1) for output in outputs]


@pytest.mark.parametrize("kind", list(TASKS))
@pytest.mark.parametrize("family", list(VARIANTS))
def test_results_are_those_of_transformers(tmp_path, family, kind):
    model = make(f"{family}{kind}", family, tmp_path)
    for ours, theirs in zip(
        results(tmp_path, TASKS[kind]), expected(model, TASKS[kind]), strict=True
    ):
        assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("family", EXACT)
def test_bfloat16_error_is_that_of_transformers(tmp_path, family):
    """Both are compared with transformers in float32, on the weights that bfloat16 leaves."""
    half = make(f"{family}Model", family, tmp_path, torch.bfloat16)
    exact = torch.stack(expected(copy.deepcopy(half).float(), "embed"))
    theirs = (torch.stack(expected(half, "embed")) - exact).norm()
    ours = (torch.stack(results(tmp_path, "embed", dtype="bfloat16")) - exact).norm()
    assert 0 < ours <= 1.5 * theirs
