"""Adapters together with what else requests may have: each pair equals the adapter alone."""

from __future__ import annotations

import importlib
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from lora_adapters import PROMPT
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import RequestEvent
from toolkit_lm.plugin import hookimpl
from toolkit_lm_lora.front import LoRARequest

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "plugins" / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
NAMES = ("all", None, "invoked", "dora", "saved")
CHUNKED = {"max_num_batched_tokens": 24, "max_num_seqs": 24, "block_size": 4}
TIGHT = {**CHUNKED, "num_kv_blocks": 32}
WAYS = {
    "ngram": {"drafter": "ngram"},
    "ngram, chunked": {"drafter": "ngram", **CHUNKED},
    "chunked": CHUNKED,
    "preempted": {**TIGHT, "preemption_mode": "recompute"},
    "swapped": {**TIGHT, "preemption_mode": "swap", "swap_memory": "8MiB"},
    "overlapping": {"overlap": True, **CHUNKED},
}

TURNS = {
    "drafts": {"drafter": "ngram"},
    "stages": {"plugins": [THREADS], "executor": "threads", "pipeline_parallel_size": 2},
    "stages, preempted": {
        **TIGHT,
        "plugins": [THREADS],
        "executor": "threads",
        "pipeline_parallel_size": 2,
    },
    "drafts, overlapping": {"drafter": "ngram", "overlap": True, **CHUNKED},
}


class Counts:
    """Counts what ways of running are for."""

    name = "counts"

    def __init__(self):
        self.preempted = 0

    @hookimpl
    def toolkit_event(self, event):
        self.preempted += isinstance(event, RequestEvent) and event.kind == "preempted"


@pytest.fixture(scope="module")
def adapters(make_adapters):
    return make_adapters("llama")


def ask(adapters, llm, names, max_tokens=24):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return [
        list(output.outputs[0].token_ids)
        for output in llm.generate(
            [{"prompt_token_ids": PROMPT}] * len(names),
            params,
            lora_request=[adapters.request(name) for name in names],
            use_tqdm=False,
        )
    ]


@pytest.fixture(scope="module")
def alone(adapters):
    with adapters.llm(enable_prefix_caching=False) as llm:
        return {name: ask(adapters, llm, [name])[0] for name in NAMES}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_gives_what_each_adapter_gives_alone(adapters, alone, way):
    counts = Counts()
    with adapters.llm({"max_adapters": 8}, plugins=[counts], **WAYS[way]) as llm:
        for names in (NAMES, NAMES[::-1]):
            assert ask(adapters, llm, names) == [alone[name] for name in names]
    assert bool(counts.preempted) == (way in ("preempted", "swapped"))


@pytest.mark.parametrize("way", TURNS)
def test_adapters_take_turns(adapters, alone, way):
    """One adapter has rows of a step, of four that run."""
    names = (*NAMES, *NAMES)
    with adapters.llm({"max_adapters": 1}, **TURNS[way]) as llm:
        assert ask(adapters, llm, names) == [alone[name] for name in names]


def test_grammars_and_drafts():
    """Of a trained adapter, whose texts have what drafts find."""
    pirate = LoRARequest("pirate", 1, str(files("toolkit_lm_tiny") / "adapter_pirate"))
    requests = [pirate, None] * 2
    grammar = {"regex": r"(Arr! )?[A-Z][a-z']+( [a-z']+){2,5}( [A-Z][a-z]+)+[.,!]"}
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar),
        SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar),
    ]
    question = [{"role": "user", "content": "What is the capital of France?"}]

    def texts(llm, indices):
        outputs = llm.chat(
            [question] * len(indices),
            [params[index] for index in indices],
            lora_request=[requests[index] for index in indices],
            use_tqdm=False,
        )
        return [output.outputs[0].text for output in outputs]

    own = {"plugin_option": {"lora": {"enabled": True}}, "dtype": "float32"}
    with LLM("tiny", **own) as llm:
        alone = [texts(llm, [index])[0] for index in range(4)]
        assert texts(llm, range(4)) == alone
    assert alone[0] == "Arr! Th' capital o' France be Paris, matey!" and len({*alone}) == 4
    with LLM("tiny", drafter="ngram", **own) as llm:
        assert texts(llm, range(4)) == alone
