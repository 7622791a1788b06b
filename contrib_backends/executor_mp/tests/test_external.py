"""Executor 'external_launcher': ranks that somebody else has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ports import free_port
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.distributed import Group
from toolkit_lm.errors import ConfigError, EngineDeadError, UnsupportedError

SCRIPT = Path(__file__).with_name("external_rank.py")
OPTIONS = {"max_model_len": 64, "num_kv_blocks": 24, "dtype": "float32", "renderer": "tokens"}
PROMPTS = [[5, 6, 7, 8], [9] * 20]
PARAMS = {"temperature": 0.8, "seed": 3, "max_tokens": 8, "ignore_eos": True}


def launched(model, prompts, world=2, **options):
    """Runs a process for each rank, as torchrun does. Returns their code, stdout and stderr."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {"WORLD_SIZE": str(world), **address}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, str(SCRIPT), json.dumps(model), json.dumps(prompts[rank])),
                *(json.dumps(PARAMS), json.dumps({**OPTIONS, **options})),
            ],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        found = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, found, strict=True)]


@pytest.fixture(scope="module")
def alone():
    with LLM("tiny", **OPTIONS) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        return [
            output.outputs[0].token_ids
            for output in llm.generate(prompts, SamplingParams(**PARAMS))
        ]


def test_two_ranks_draw_the_same_tokens(alone):
    for code, printed, errors in launched("tiny", [PROMPTS] * 2, tensor_parallel_size=2):
        assert code == 0, errors
        assert json.loads(printed.splitlines()[-1]) == alone


class OtherPlan(Group):
    """A group whose other rank plans something else."""

    size = 2

    def all_gather(self, tensor, dim):
        return torch.cat([tensor, tensor + 1], dim)


def test_ranks_with_other_plans_fail(monkeypatch):
    with LLM("tiny", executor="external_launcher", **OPTIONS) as llm:
        executor = llm.engine.client.core.executor
        monkeypatch.setattr(executor, "_group", OtherPlan())
        with pytest.raises(EngineDeadError, match="have planned different steps"):
            llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(**PARAMS))


def test_one_rank_needs_no_launcher(alone, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with LLM("tiny", executor="external_launcher", **OPTIONS) as llm:
        outputs = llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(**PARAMS))
    assert outputs[0].outputs[0].token_ids == alone[0]
    with pytest.raises(ConfigError, match="MASTER_PORT is not set"):
        LLM("tiny", executor="external_launcher", tensor_parallel_size=2, **OPTIONS)
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size must be 1"):
        LLM("tiny", executor="external_launcher", pipeline_parallel_size=2, **OPTIONS)
