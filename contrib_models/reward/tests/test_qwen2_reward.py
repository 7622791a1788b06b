"""Qwen2's reward models: transformers' decoder, with the head applied by hand."""

import json

import pytest
import torch
from reward_harness import PROMPTS, SMALL, TAG, load, rewards
from safetensors.torch import save_file
from toolkit_lm.errors import CheckpointError, RequestError
from toolkit_lm_reward.qwen2 import Qwen2ForProcessRewardModel, Qwen2ForRewardModel
from torch.nn import functional as F
from transformers import Qwen2Config, Qwen2Model


@pytest.fixture
def checkpoint(tmp_path):
    """Makes a checkpoint of so many labels; returns its folder and the reference."""

    def make(num_labels):
        torch.manual_seed(0)
        decoder = Qwen2Model(Qwen2Config(**SMALL)).eval()
        for parameter in decoder.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.2)
        size = SMALL["hidden_size"]
        head = {
            "0.weight": (size, size),
            "0.bias": (size,),
            "2.weight": (num_labels, size),
            "2.bias": (num_labels,),
        }
        head = {name: torch.randn(shape) for name, shape in head.items()}
        weights = {f"model.{name}": tensor for name, tensor in decoder.state_dict().items()}
        weights |= {f"score.{name}": tensor for name, tensor in head.items()}
        save_file(
            {**weights, "lm_head.weight": torch.zeros(SMALL["vocab_size"], size)},
            tmp_path / "model.safetensors",
        )
        (tmp_path / "config.json").write_text(json.dumps({**SMALL, "architectures": ["..."]}))
        (tmp_path / "tokenizer.json").write_text(
            json.dumps(
                {
                    "added_tokens": [
                        {"id": 61, "content": "<|im_end|>"},
                        {"id": TAG, "content": "<extra_0>"},
                    ]
                }
            )
        )

        def reference(prompt):
            with torch.inference_mode():
                hidden_states = decoder(prompt[None]).last_hidden_state[0]
            inner = F.relu(F.linear(hidden_states, head["0.weight"], head["0.bias"]))
            return F.linear(inner, head["2.weight"], head["2.bias"])

        return tmp_path, reference

    return make


def test_rewards_of_all_tokens(checkpoint):
    folder, reference = checkpoint(1)
    model = load(Qwen2ForRewardModel, folder)
    assert model.pooler.supported_tasks() == {"token_classify"}
    for given, prompt in zip(rewards(model), PROMPTS, strict=True):
        torch.testing.assert_close(given, reference(prompt))
    torch.testing.assert_close(
        rewards(model, use_activation=True)[0], torch.sigmoid(reference(PROMPTS[0]))
    )


def test_rewards_of_steps(checkpoint):
    folder, reference = checkpoint(2)
    model = load(Qwen2ForProcessRewardModel, folder)
    for given, prompt in zip(rewards(model), PROMPTS, strict=True):
        expected = reference(prompt)[prompt == TAG]
        assert given.shape == ((prompt == TAG).sum(), 2)
        torch.testing.assert_close(given, expected.softmax(1))
    logits = rewards(model, use_activation=False, returned_token_ids=[1])[0]
    torch.testing.assert_close(logits, reference(PROMPTS[0])[PROMPTS[0] == TAG][:, 1:])
    torch.testing.assert_close(
        rewards(model, step_tag_id=41)[0], reference(PROMPTS[0])[3:4].softmax(1)
    )
    with pytest.raises(RequestError, match="the model gives 2 logits"):
        rewards(model, returned_token_ids=[2])


def test_options_say_which_tokens(checkpoint):
    folder, reference = checkpoint(2)
    (folder / "tokenizer.json").unlink()
    expected = reference(PROMPTS[0]).softmax(1)
    torch.testing.assert_close(
        rewards(load(Qwen2ForProcessRewardModel, folder, step_tag_id=41))[0], expected[3:4]
    )
    torch.testing.assert_close(
        rewards(load(Qwen2ForProcessRewardModel, folder, pooling_type="ALL"))[0], expected
    )
    with pytest.raises(
        CheckpointError,
        match=r"tokenizer.json' does not tell the id of the token '<extra_0>'.*Give step_tag_id",
    ):
        load(Qwen2ForProcessRewardModel, folder)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": []}))
    with pytest.raises(CheckpointError, match="'<extra_0>'"):
        load(Qwen2ForProcessRewardModel, folder)


def test_a_head_in_bfloat16_computes_in_float32(checkpoint):
    folder, _ = checkpoint(1)
    model = load(Qwen2ForRewardModel, folder, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.score.parameters()} == {torch.float32}
    assert model.model.norm.weight.dtype is torch.bfloat16
    assert rewards(model)[0].dtype is torch.float32
