"""LLM as trainers of reinforcement learning use it, by vLLM's names."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from toolkit_lm.errors import RequestError
from toolkit_lm_vllm import LLM, SamplingParams

OPTIONS = {
    "distributed_executor_backend": "external_launcher",
    "model_impl": "vllm",
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": -1,
    "enable_sleep_mode": True,
    "worker_extension_cls": "test_trainers.Extension",
    "seed": 7,
    "max_model_len": 64,
    "num_gpu_blocks_override": 32,
    "dtype": "float32",
}
PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=0)


class Extension:
    def add(self, one, other=0):
        return one + other


def drawn(llm, **params):
    outputs = llm.generate([PROMPT] * 3, PARAMS.replace(**params), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", **OPTIONS) as llm:
        yield llm


def test_a_seed_of_the_engine_is_one_stream(llm):
    """Equal prompts get other answers, and another engine of that seed the same ones."""
    with LLM("tiny", **OPTIONS) as other:
        found = [drawn(other), drawn(other)]
        assert found == [drawn(llm), drawn(llm)]
    assert len({tuple(tokens) for call in found for tokens in call}) > 3
    one, two, three = drawn(llm, seed=1)
    assert one == two == three
    one, two, three = drawn(llm, temperature=0)
    assert one == two == three


def test_calls_of_workers(llm):
    assert llm.collective_rpc("add", args=(1,), kwargs={"other": 2}) == [3]
    assert llm.llm_engine.model_executor.collective_rpc("add", args=(1,)) == [1]
    with pytest.raises(RequestError, match="timeout must be None"):
        llm.collective_rpc("add", 3.0, (1,))


def test_weights_by_the_path_of_objects(llm):
    """They are the engine's before the next request, however many calls gave them."""
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    weights = load_file(llm.config.checkpoint.path + "/model.safetensors")
    greedy = {"temperature": 0, "max_tokens": 8}
    before = drawn(llm, **greedy)
    for name, tensor in weights.items():
        shift = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3))
        assert model.load_weights([(name, tensor + shift.to(tensor.dtype))]) == {name}
    changed = drawn(llm, **greedy)
    assert changed != before
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    model.load_weights(weights.items())
    assert llm.reset_prefix_cache()
    llm.wake_up(tags=["kv_cache"])
    assert drawn(llm, **greedy) == before
    model.load_weights([("no.weight", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"unexpected: no\.weight"):
        llm.generate([PROMPT])
    assert drawn(llm, **greedy) == before
