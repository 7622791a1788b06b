"""TRL's GRPO with `use_vllm`, in the trainer's process and with a server: its steps with weights
that change."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import toolkit_lm
import torch
from datasets import Dataset
from toolkit_lm_vllm.utils.network_utils import get_open_port
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.scripts.vllm_serve import ScriptArguments, build_command

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


def trainer_of(policy, folder, vllm_mode="colocate", **options):
    arguments = GRPOConfig(
        output_dir=str(folder),
        use_vllm=True,
        vllm_mode=vllm_mode,
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


@pytest.fixture
def server(policy):
    """The URL of `toolkit serve`, with the flags that `trl vllm-serve` gives `vllm serve`."""
    line = build_command(ScriptArguments(model=policy, host="127.0.0.1", port=0, max_model_len=64))
    flags = line[line.index("serve") :]
    # In the place of VLLM_SERVER_DEV_MODE=1.
    command = [sys.executable, "-c", "from toolkit_lm_cli import main; main()", *flags]
    process = subprocess.Popen(
        [*command, "--admin-routes", "--device", "cpu"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("Serving "), line
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.fixture
def current_device(monkeypatch):
    """TRL's client refuses a trainer's device that is not of CUDA, for NCCL's sake. "cuda" without
    a number means the current device to it, which it does not touch: all else of it runs as it
    is."""
    init = VLLMClient.init_communicator
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: init(self, "cuda"))
    monkeypatch.setattr("trl.generation.vllm_client.get_ip", lambda: "127.0.0.1")


def answers_of(client, ids):
    """Most likely tokens, and log probabilities of a prompt."""
    found = client.generate([ids], max_tokens=8, temperature=0.0, logprobs=0)
    return found["completion_ids"][0], found["logprobs"][0]


def test_server_mode_takes_steps_with_the_policy_of_each_step(
    policy, server, tmp_path, current_device
):
    trainer = trainer_of(
        policy,
        tmp_path,
        vllm_mode="server",
        vllm_server_base_url=server,
        vllm_group_port=get_open_port(),
    )
    client = trainer.vllm_generation.vllm_client
    ids = trainer.processing_class("Once upon a time").input_ids
    first = answers_of(client, ids)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(steps) == STEPS
    assert any(step["reward_std"] > 0 for step in steps)
    for step in steps:
        assert step["sampling/sampling_logp_difference/max"] < 1e-3
    trainer.vllm_generation.sync_weights()
    tokens, logprobs = answers_of(client, ids)
    assert logprobs != first[1]
    # The server computes what the trainer's model computes.
    with torch.inference_mode():
        logits = trainer.model(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits.float(), -1).gather(1, torch.tensor(tokens)[:, None])
    assert [entry[0] for entry in logprobs] == pytest.approx(expected[:, 0].tolist(), abs=1e-3)
    version = client._get(f"{server}/weight_info")["weight_version"]
    # One change for each update that the trainer sent.
    assert int(version) >= STEPS
    chats = client.chat([[{"role": "user", "content": "Hi"}]], n=2, max_tokens=4)
    assert len(chats["completion_ids"]) == 2
    client.close_communicator()


def test_one_tensor_at_a_time_changes_the_answers(policy, server, current_device):
    client = VLLMClient(server, group_port=get_open_port())
    assert client.get_world_size() == 1
    client.init_communicator(device="cpu")
    first = answers_of(client, [5, 6, 7])
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    name = "model.norm.weight"
    weight = dict(model.named_parameters())[name].detach()
    client.update_named_param(name, weight * 0.5)
    assert answers_of(client, [5, 6, 7])[1] != first[1]
    with client.weight_update():
        client.update_named_param(name, weight)
    client.reset_prefix_cache()
    assert answers_of(client, [5, 6, 7]) == first
    client.close_communicator()
    with pytest.raises(AttributeError):
        client.update_named_param(name, weight)
