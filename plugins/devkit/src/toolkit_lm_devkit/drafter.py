"""DrafterConformance: what every drafter must do, shown on a small Llama, or on a model of the
test's choice."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.messages import StepResult
from toolkit_lm.plugin import Plugins, PluginWarning
from toolkit_lm.prompts import TokensPrompt
from toolkit_lm.step import StepInputs, StepRun
from torch import Tensor

from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.executor import write_llama

PROMPTS = [
    [3 + (index * step) % 11 for index in range(length)]
    for step, length in ((1, 24), (3, 9), (5, 40), (0, 1))
]
"""Token ids that repeat themselves, and a single one."""
SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1, "seed": 5},
    "several": {"temperature": 1, "seed": 3, "n": 2},
    "penalties": {"temperature": 0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
}
"""Parameters of requests that are in one batch."""
_CHUNKED = {"max_num_batched_tokens": 12, "max_num_seqs": 8}
COURSES: Mapping[str, Mapping[str, Any]] = {
    "together": {},
    "in chunks": _CHUNKED,
    "preempted": {**_CHUNKED, "num_kv_blocks": 24, "preemption_mode": "recompute"},
}
"""Options under which tokens are the same."""


class DrafterConformance(Conformance):
    """Subclass it as `class TestMine(DrafterConformance)`, and name the drafter.

    The distribution that registers it must be installed, or its plugin stand in `plugins`;
    toolkit-lm-decoder, toolkit-lm-sdpa and toolkit-lm-renderer-hf must be installed too. The
    executor is one that runs its worker in the test's process.
    """

    drafter: ClassVar[str]
    """The name that it is registered under."""
    model: ClassVar[str | None] = None
    """A checkpoint, for a drafter that is made for it. None: a small Llama with random weights."""
    plugins: ClassVar[Sequence[object]] = ()
    """Plugins from code."""
    engine_options: ClassVar[Mapping[str, Any]] = {"device": "cpu", "dtype": "float32"}
    """Options of VllmConfig that every engine gets."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        return {"course": COURSES}

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        return cls.model or str(write_llama(tmp_path_factory.mktemp("llama")))

    @pytest.fixture(scope="class")
    @classmethod
    def undrafted(cls, checkpoint: str) -> dict[str, list[list[int]]]:
        """The tokens without a drafter."""
        return cls.generate(checkpoint, drafter=None)

    def test_tokens_are_those_without_drafts(
        self, checkpoint: str, undrafted: Mapping[str, list[list[int]]], course: Mapping[str, Any]
    ) -> None:
        drafted = self.generate(checkpoint, **course)
        for case, tokens in undrafted.items():
            assert drafted[case] == tokens, f"{case}: other tokens with drafts than without"

    def test_it_drafts(self, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        drafts = self.watch(monkeypatch)
        self.generate(checkpoint)
        assert any(drafts), "it has drafted nothing, although the prompts repeat themselves"

    def test_its_drafts_count(self, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Some of its drafts are tokens that the model takes, of sequences side by side as of one
        alone."""
        counts = self.count(monkeypatch)
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, detokenize=False)
        prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        with self.llm(checkpoint) as llm:
            for prompt in prompts:
                llm.generate([prompt], params, use_tqdm=False)
            alone = sum(counts)
            counts.clear()
            llm.generate(prompts, params, use_tqdm=False)
        together = sum(counts)
        assert alone, f"of {len(PROMPTS)} greedy sequences, none took a single draft"
        assert together >= alone / 2, (
            f"{together} drafts are taken of sequences side by side, but {alone} of each alone"
        )

    # Data of the tests

    @classmethod
    def generate(cls, checkpoint: str, **course: Any) -> dict[str, list[list[int]]]:
        """The tokens of each sequence of each prompt under each of the parameters."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PluginWarning)
            found = cls.generate_with_warnings(checkpoint, **course)
        failures = [
            str(warning.message)
            for warning in caught
            if issubclass(warning.category, PluginWarning)
        ]
        assert not failures, "\n".join(failures)
        return found

    @classmethod
    def generate_with_warnings(cls, checkpoint: str, **course: Any) -> dict[str, list[list[int]]]:
        """Like `generate`, but the drafter may be dropped."""
        cases: list[str] = []
        prompts: list[TokensPrompt] = []
        params: list[SamplingParams] = []
        for name, fields in SAMPLING.items():
            for prompt in PROMPTS:
                cases.append(f"{name}, a prompt of {len(prompt)} tokens")
                prompts.append({"prompt_token_ids": prompt})
                params.append(
                    SamplingParams(max_tokens=20, ignore_eos=True, detokenize=False, **fields)
                )
        with cls.llm(checkpoint, **course) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for case, output in zip(cases, outputs, strict=True):
            assert output.error is None, f"{case}: {output.error}"
        return {
            case: [list(completion.token_ids) for completion in output.outputs]
            for case, output in zip(cases, outputs, strict=True)
        }

    @classmethod
    def llm(cls, checkpoint: str, **course: Any) -> LLM:
        """An engine with the drafter, unless `course` names another."""
        defaults = {
            "drafter": cls.drafter,
            "block_size": 4,
            "max_model_len": 64,
            "num_kv_blocks": 512,
        }
        options = {**defaults, **cls.engine_options, **course}
        if options["drafter"]:
            options.setdefault("draft_budget", "all")
        return LLM(checkpoint, plugins=list(cls.plugins), **options)

    @classmethod
    def count(cls, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many drafts were taken from now on, one entry for each sequence and step that
        verified some."""
        counts: list[int] = []
        drafter = Plugins.load(extra=cls.plugins).drafters.load(cls.drafter)
        finish = drafter.finish

        def counting(
            self: Any, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
        ) -> None:
            for row, drawn in zip(inputs.plan.scheduled, result.token_ids, strict=True):
                if row.num_drafts:
                    counts.append(len(drawn) - 1)
            finish(self, inputs, hidden_states, result, step)

        monkeypatch.setattr(drafter, "finish", counting)
        return counts

    @classmethod
    def watch(cls, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
        """The drafts from now on, one entry for each sequence and step."""
        drafts: list[list[int]] = []
        drafter = Plugins.load(extra=cls.plugins).drafters.load(cls.drafter)
        finish = drafter.finish

        def watching(
            self: Any, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
        ) -> None:
            finish(self, inputs, hidden_states, result, step)
            drafts.extend(result.drafts.values())

        monkeypatch.setattr(drafter, "finish", watching)
        return drafts
