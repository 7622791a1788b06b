"""Reward models through the whole engine, prompts in one batch and in chunks."""

import json

import numpy as np
import pytest
import torch
from reward_harness import SMALL, TAG
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from toolkit_lm import LLM
from toolkit_lm.errors import ConfigError, RequestError, UnsupportedError
from toolkit_lm.pooling_params import PoolingParams
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2Model

PROMPTS = [[7, 3, TAG, 41, 12, 7, TAG], [5], [TAG, *range(3, 40), TAG]]
GIVEN = [{"prompt_token_ids": ids} for ids in PROMPTS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a process reward model, and the logits [T, 2] of each prompt."""
    folder = tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    decoder = Qwen2Model(Qwen2Config(**SMALL)).eval()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    weights = {f"model.{name}": tensor for name, tensor in decoder.state_dict().items()}
    save_file(
        weights | {f"score.{name}": tensor for name, tensor in head.state_dict().items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(
        json.dumps(
            {**SMALL, "architectures": ["Qwen2ForProcessRewardModel"], "model_type": "qwen2"}
        )
    )
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TAG)}, unk_token="w0"))
    tokenizer.add_special_tokens(["<extra_0>"])
    assert tokenizer.token_to_id("<extra_0>") == TAG
    tokenizer.save(str(folder / "tokenizer.json"))
    with torch.inference_mode():
        return folder, [head(decoder(torch.tensor([ids])).last_hidden_state[0]) for ids in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 4}],
)
def test_rewards_of_steps(checkpoint, options):
    folder, logits = checkpoint
    expected = [
        each[np.array(ids) == TAG].softmax(1) for each, ids in zip(logits, PROMPTS, strict=True)
    ]
    with LLM(str(folder), device="cpu", dtype="float32", num_kv_blocks=64, **options) as llm:
        assert (llm.config.model.runner, llm.config.model.convert) == ("pooling", "none")
        for output, probabilities in zip(
            llm.encode(GIVEN, pooling_task="token_classify", use_tqdm=False), expected, strict=True
        ):
            assert output.outputs.data.shape == probabilities.shape
            np.testing.assert_allclose(output.outputs.data, probabilities, atol=1e-5)
        params = PoolingParams(
            task="token_classify", step_tag_id=41, use_activation=False, returned_token_ids=[1]
        )
        np.testing.assert_allclose(
            llm.encode(GIVEN[0], params, use_tqdm=False)[0].outputs.data,
            logits[0][3:4, 1:],
            atol=1e-5,
        )
        with pytest.raises(RequestError, match=r"token id 9999 is not in the vocabulary") as raised:
            llm.encode(GIVEN[0], PoolingParams(task="token_classify", step_tag_id=9999))
        assert raised.value.param == "step_tag_id"
        with pytest.raises(RequestError, match="token_classify"):
            llm.encode(GIVEN, pooling_task="embed", use_tqdm=False)


def test_reward_is_an_accepted_name_of_what_it_is(checkpoint):
    folder, _ = checkpoint
    with LLM(str(folder), device="cpu", convert="reward", num_kv_blocks=64) as llm:
        assert llm.config.model.runner == "pooling"
    for error, options in (
        (ConfigError, {"runner": "generate"}),
        (UnsupportedError, {"convert": "classify"}),
    ):
        with pytest.raises(error, match="is a pooling model"):
            LLM(str(folder), device="cpu", **options)


def test_scores_depend_on_what_came_before(checkpoint):
    """A guard of the reference above: rewards of one token id differ with its place."""
    _, logits = checkpoint
    steps = logits[0][np.array(PROMPTS[0]) == TAG]
    assert not torch.allclose(F.softmax(steps, 1)[0], F.softmax(steps, 1)[1], atol=1e-3)
