"""TRL's GRPO with `use_vllm`, in the trainer's process: its steps with weights that change."""

from __future__ import annotations

import pytest
import toolkit_lm
import torch
from datasets import Dataset
from toolkit_lm.errors import UnsupportedError
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient

STEPS = 3
GENERATIONS = 4


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The checkpoint `tiny` in float32, so that rounding is small."""
    with toolkit_lm.LLM("tiny") as llm:
        tiny = llm.config.checkpoint.path
    folder = str(tmp_path_factory.mktemp("policy"))
    AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def distinct_words(completions, **columns):
    """A reward that is larger for answers with more distinct characters."""
    return [float(len(set(text))) for text in completions]


def trainer_of(policy, folder, **options):
    arguments = GRPOConfig(
        output_dir=str(folder),
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        per_device_train_batch_size=GENERATIONS,
        num_generations=GENERATIONS,
        max_completion_length=8,
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        temperature=0.9,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        seed=1,
        **options,
    )
    prompts = ["Once upon a time", "The sun"] * 8
    dataset = Dataset.from_dict({"prompt": prompts})
    return GRPOTrainer(
        model=policy, reward_funcs=distinct_words, args=arguments, train_dataset=dataset
    )


@pytest.mark.parametrize("sleeps", [False, True])
def test_grpo_steps_with_the_policy_of_each_step(policy, tmp_path, sleeps):
    trainer = trainer_of(policy, tmp_path, vllm_enable_sleep_mode=sleeps)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    after = dict(trainer.model.named_parameters())
    assert not any(torch.equal(after[name], weights) for name, weights in before.items())
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == STEPS
    # Four answers to one prompt differ, though the engine has a seed.
    assert any(step["reward_std"] > 0 for step in steps)
    # The engine's log probabilities are the policy's of this very step, temperature included.
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-3
    # Each step has given the engine its weights.
    llm = trainer.vllm_generation.llm
    trainer.vllm_generation.sync_weights()
    if sleeps:
        llm.wake_up(tags=["kv_cache"])
    ids = trainer.processing_class("Once upon a time").input_ids
    [output] = llm.generate([{"prompt_token_ids": ids}], use_tqdm=False)
    assert int(output.outputs[0].weight_versions[-1].version) >= STEPS
    check_policy(trainer.model, llm, ids)
    llm.close()


def check_policy(model, llm, ids):
    """The engine computes what the trainer's model computes."""
    params = llm.get_default_sampling_params().replace(max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    for position, entries in enumerate(output.prompt_logprobs[1:]):
        token = ids[position + 1]
        assert entries[token].logprob == pytest.approx(expected[position, token].item(), abs=1e-3)


def test_weights_over_nccl_are_refused_in_plain_words():
    """The server mode of this version of TRL needs CUDA in the trainer itself."""
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    client = object.__new__(VLLMClient)
    client.base_url = "http://unused"
    client.group_port = 1
    client.get_server_info = lambda: {"weight_transfer_config": {"backend": "nccl"}}
    client.get_world_size = lambda: 1
    with pytest.raises(NotImplementedError, match="needs a CUDA device"):
        client.init_communicator(device="cpu")
    with pytest.raises(UnsupportedError, match="/update_weights"):
        trainer_init({})
