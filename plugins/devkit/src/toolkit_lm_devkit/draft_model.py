"""DraftModelConformance: what every drafter with layers of its own must do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
from toolkit_lm import LLM
from toolkit_lm.messages import StepResult
from toolkit_lm.plugin import Plugins, PluginWarning
from toolkit_lm.step import StepInputs, StepRun
from torch import Tensor

from toolkit_lm_devkit.drafter import DrafterConformance

_CHUNKED = {"max_num_batched_tokens": 12, "max_num_seqs": 8}
COURSES: Mapping[str, Mapping[str, Any]] = {
    "together": {},
    "in chunks": _CHUNKED,
    "cached": {"enable_prefix_caching": True, "max_num_seqs": 2},
    "preempted": {**_CHUNKED, "preemption_mode": "recompute"},
    "swapped": {**_CHUNKED, "preemption_mode": "swap", "swap_memory": "4MiB"},
}
"""Options under which tokens are the same, and drafts too. Where requests are preempted, the cache
is small."""
FAULTS = ("add", "remove", "finish", "forward", "draw")
"""Methods that raise in the middle of a run: those of the drafter, then those that it calls."""


_PERIOD = 7
_ASKED = 2
"""Steps of each period that ask for drafts."""
_CALLS_BEFORE = 3
"""Calls before the one that raises."""


class _FailingStep:
    """The runner's interface, with a method that raises."""

    def __init__(self, step: StepRun, fault: str, check: Callable[[], None]) -> None:
        self._step = step
        self._fault = fault
        self._check = check

    def __getattr__(self, name: str) -> Any:
        if name == self._fault:
            self._check()
        return getattr(self._step, name)


class DraftModelConformance(DrafterConformance):
    """Subclass it as `class TestMine(DraftModelConformance)`, name the drafter, and give its
    options in `drafter_options`.

    Requirements as for DrafterConformance. `twin_options` makes a drafter that is the model itself:
    all of its drafts are accepted, however its KV cache was computed, kept and brought back.
    """

    few_blocks: ClassVar[int] = 56
    """Blocks of four tokens for more than one sequence of 64 tokens, in the model and the drafter,
    and for less than eight."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        courses = {
            name: {**course, "num_kv_blocks": cls.few_blocks}
            if "preemption_mode" in course
            else course
            for name, course in COURSES.items()
        }
        return {"course": courses, "fault": {name: name for name in FAULTS}}

    @classmethod
    def drafter_options(cls, checkpoint: str) -> Mapping[str, Any]:
        """Options of engines with the drafter, such as `plugin_option`."""
        return {}

    @classmethod
    def twin_options(cls, checkpoint: str) -> Mapping[str, Any] | None:
        """Options with which the drafter is the model itself. None: it cannot be."""
        return None

    def test_tokens_are_those_without_drafts(
        self,
        checkpoint: str,
        undrafted: Mapping[str, list[list[int]]],
        course: Mapping[str, Any],
    ) -> None:
        """If there is a twin, it drafts, and all its drafts are accepted."""
        twin = self.twin_options(checkpoint)
        with pytest.MonkeyPatch.context() as patch:
            verified = self.verified(patch)
            drafted = self.generate(checkpoint, **(twin or {}), **course)
        for case, tokens in undrafted.items():
            assert drafted[case] == tokens, f"{case}: other tokens with drafts than without"
        assert verified, "it has drafted nothing"
        wrong = [counts for counts in verified if counts[1] < counts[0]]
        assert twin is None or not wrong, (
            f"{len(wrong)} of {len(verified)} times, drafts of the model itself were not accepted: "
            f"of {wrong[0][0]} drafts {wrong[0][1]}"
        )

    def test_its_drafts_count(self, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Drafts of a twin count, alone and side by side: see the test above. Random layers agree
        with nothing, so that others need only be verified."""
        verified = self.verified(monkeypatch)
        self.generate(checkpoint)
        assert verified, "it has drafted nothing"

    def test_it_follows_steps_that_ask_for_no_drafts(self, checkpoint: str) -> None:
        """Most steps ask for none. The twin is right in the others all the same."""
        if (twin := self.twin_options(checkpoint)) is None:
            pytest.skip("no drafter of this kind is the model itself")
        kind = self.kind()
        finish = kind.finish
        calls = []

        def resting(
            drafter: Any, inputs: StepInputs, hidden: Tensor, result: StepResult, step: StepRun
        ) -> None:
            calls.append(len(result.token_ids))
            if len(calls) % _PERIOD < _ASKED:
                finish(drafter, inputs, hidden, result, step)
            else:
                drafter.follow(inputs, hidden, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "finish", resting)
            verified = self.verified(patch)
            self.generate(checkpoint, **twin, **COURSES["in chunks"])
        wrong = [counts for counts in verified if counts[1] < counts[0]]
        assert verified, "it has drafted nothing"
        assert not wrong, f"of {len(verified)} drafts after steps without, {len(wrong)} are wrong"

    def test_garbage_changes_no_token(
        self,
        checkpoint: str,
        undrafted: Mapping[str, list[list[int]]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        kind = self.kind()
        finish = kind.finish

        def garbled(
            drafter: Any, inputs: StepInputs, hidden: Tensor, result: StepResult, step: StepRun
        ) -> None:
            finish(drafter, inputs, hidden, result, step)
            for seq_id, drafts in result.drafts.items():
                result.drafts[seq_id] = [(7 * token + seq_id) % 50 for token in drafts]

        monkeypatch.setattr(kind, "finish", garbled)
        drafted = self.generate(checkpoint)
        for case, tokens in undrafted.items():
            assert drafted[case] == tokens, f"{case}: wrong drafts change tokens"

    def test_raising_anywhere_drops_it(
        self,
        checkpoint: str,
        undrafted: Mapping[str, list[list[int]]],
        fault: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The tokens are those without drafts, and one warning says so."""
        kind = self.kind()
        calls: list[str] = []

        def check() -> None:
            calls.append(fault)
            if len(calls) > _CALLS_BEFORE:
                raise RuntimeError("a planted fault")

        if fault in ("forward", "draw"):
            finish = kind.finish

            def failing_step(
                drafter: Any, inputs: StepInputs, hidden: Tensor, result: StepResult, step: StepRun
            ) -> None:
                finish(drafter, inputs, hidden, result, _FailingStep(step, fault, check))

            monkeypatch.setattr(kind, "finish", failing_step)
        else:
            method = getattr(kind, fault)

            def failing(*arguments: Any, **named: Any) -> Any:
                check()
                return method(*arguments, **named)

            monkeypatch.setattr(kind, fault, failing)
        with pytest.warns(PluginWarning, match=r"a planted fault.*is dropped") as caught:
            drafted = self.generate_with_warnings(checkpoint)
        assert len(caught) == 1, f"{len(caught)} warnings for one drafter"
        for case, tokens in undrafted.items():
            assert drafted[case] == tokens, f"{case}: other tokens once {fault} has raised"

    # Data of the tests

    @classmethod
    def llm(cls, checkpoint: str, **course: Any) -> LLM:
        drafts = course.get("drafter", cls.drafter) is not None
        own = cls.drafter_options(checkpoint) if drafts else {}
        return super().llm(checkpoint, **{**own, **course})

    @classmethod
    def kind(cls) -> Any:
        """The drafter's class."""
        return Plugins.load(extra=cls.plugins).drafters.load(cls.drafter)

    @classmethod
    def verified(cls, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
        """Numbers of drafts and of accepted ones from now on, one entry for each sequence and step
        that verified some."""
        counts: list[tuple[int, int]] = []
        kind = cls.kind()
        finish = kind.finish

        def counting(
            drafter: Any, inputs: StepInputs, hidden: Tensor, result: StepResult, step: StepRun
        ) -> None:
            for row, drawn in zip(inputs.plan.scheduled, result.token_ids, strict=True):
                if row.num_drafts:
                    counts.append((row.num_drafts, len(drawn) - 1))
            finish(drafter, inputs, hidden, result, step)

        monkeypatch.setattr(kind, "finish", counting)
        return counts
