"""LogitsProcessorConformance: what every logits processor must do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import SamplerState
from toolkit_lm.param_spec import ProcessorParams, params_of
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import LogitsProcessorRegistry, PluginInfo, Plugins
from toolkit_lm.renderer import Rendered
from toolkit_lm.sampling import LogitsProcessor, ProcessorTable, Sampled, SamplingBatch, sample
from torch import Tensor

from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.sampling import sampling_rows

NAME = "tested"
_ROWS = 8
_DRAWS = 12
_DRAFTS = 3


class LetterRenderer:
    """The part of a renderer that `prepare` needs: one token per byte of a text."""

    vocab_size = 256
    config = VllmConfig.default({"vocab_size": 256})
    plugins: Plugins | None = None

    def render_prompt(self, prompt: str, *, add_special_tokens: bool = True) -> Rendered:
        return Rendered(list(prompt.encode()))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> list[bytes]:
        return [bytes([token_id]) for token_id in token_ids]


class LogitsProcessorConformance(Conformance):
    """Subclass it as `class TestMine(LogitsProcessorConformance)`; name both halves, and parameters
    that turn the processor on.

    Sequences of random tokens are drawn with the sampler itself, over a vocabulary of 256 tokens,
    in batches of several compositions and orders, and with a preemption before each draw.
    """

    processor: ClassVar[type[LogitsProcessor]]
    params: ClassVar[type[ProcessorParams]]
    cases: ClassVar[Sequence[Mapping[str, Any]]]
    """Parameters of requests, each of which turns the processor on."""
    wrong: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Parameters of requests that are refused."""
    end_token_id: ClassVar[int | None] = None
    """Token that ends an answer of the processor: nothing is drawn after it."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        cases = getattr(cls, "cases", ())
        wrong = cls.wrong
        return {
            "case": {str(case): case for case in cases},
            "arguments": {str(arguments): arguments for arguments in wrong},
        }

    # The front half

    def test_the_parameters_say_what_they_mean(self) -> None:
        for o in params_of(self.params).values():
            assert o.help[:1].isupper() and o.help.endswith("."), (
                f"the help text of {o.name} is no sentence: {o.help!r}"
            )
        self.params()

    def test_the_parameters_need_no_torch(self) -> None:
        code = f"import sys, {self.params.__module__}; sys.exit('torch' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
        )  # nosec B603 # our own words
        assert done.returncode == 0, done.stderr or f"{self.params.__module__} imports torch"

    def test_arguments_cross_processes(self, case: Mapping[str, Any]) -> None:
        arguments = self.arguments(case)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(arguments)) == arguments

    def test_what_is_wrong_is_refused_by_its_name(self, arguments: Mapping[str, Any]) -> None:
        with pytest.raises(RequestError) as error:
            self.arguments(arguments)
        assert error.value.param in arguments

    # The half in the sampler

    def test_it_changes_something(self, case: Mapping[str, Any]) -> None:
        before = self.values()
        assert any(
            not torch.equal(self.applied(case, values), values)
            for values in (before, before.flip(-1))
        )

    def test_something_is_left_to_draw(self, case: Mapping[str, Any]) -> None:
        found = self.applied(case, self.values())
        assert not found.isnan().any()
        assert (found >= 0).all() or self.processor.stage == "logits", "a probability is negative"
        assert (
            found.amax(dim=-1) > (0 if self.processor.stage == "probs" else -torch.inf)
        ).all(), "no token is left"

    def test_a_row_depends_on_no_other(self, case: Mapping[str, Any]) -> None:
        logits = self.logits()
        cases = [case, None] * (_ROWS // 2)
        together = self.draw(logits, self.rows(cases))
        order = np.arange(_ROWS)[::-1].copy()
        turned = self.draw(logits.flip(0), self.rows(cases).select(order))
        assert [turned.token_ids[_ROWS - 1 - i] for i in range(_ROWS)] == together.token_ids, (
            "the order of the rows matters"
        )
        for i in range(_ROWS):
            alone = self.draw(logits[i : i + 1], self.rows(cases).select(np.array([i])))
            assert alone.token_ids == [together.token_ids[i]], (
                "a row draws another token alone than in a batch"
            )
            assert alone.states.get(0) == together.states.get(i), (
                "a row has another state alone than in a batch"
            )

    def test_a_preemption_changes_nothing(self, case: Mapping[str, Any]) -> None:
        """The same draws from one batch, and from a new one before each draw."""
        cases: list[Mapping[str, Any] | None] = [case] * _ROWS
        rows = self.rows(cases)
        states = [SamplerState() for _ in cases]
        outputs: list[list[int]] = [[] for _ in cases]
        for step in range(_DRAWS):
            logits = self.logits(step)
            staying = self.draw(logits, rows)
            back = self.draw(logits, self.rows(cases, outputs, states))
            assert back.token_ids == staying.token_ids, (
                f"draw {step} is another one after a preemption"
            )
            assert back.states == staying.states, (
                f"the state after draw {step} is another one after a preemption"
            )
            rows.history.append(np.arange(_ROWS), staying.token_ids)
            rows.position += 1
            for index, token_id in enumerate(staying.token_ids):
                outputs[index].append(token_id)
                states[index] = staying.states.get(index, {})

    def test_what_must_follow_follows(self, case: Mapping[str, Any]) -> None:
        """`begin` changes no draw, and what `drafts` says is drawn next, whatever the logits."""
        rows = self.rows([case] * _ROWS)
        unprepared = self.rows([case] * _ROWS)
        users = rows.users(np.arange(_ROWS))
        table = rows.processors
        assert table is not None, "it was made with one"
        coming: dict[int, list[int]] = {}
        for step in range(_DRAWS):
            table.begin(*users)
            drawn, other = (
                self.draw(self.logits(step), selected).token_ids for selected in (rows, unprepared)
            )
            assert drawn == other, "begin() changes what is drawn"
            wrong = [
                key
                for key, token_id in zip(users[0], drawn, strict=True)
                if coming.get(key, [token_id])[0] != token_id
            ]
            assert not wrong, "another token is drawn than drafts() said"
            for selected in (rows, unprepared):
                selected.history.append(np.arange(_ROWS), drawn)
                selected.position += 1
            drafted = table.drafts(*users)
            coming = {key: left for key, tokens in coming.items() if (left := tokens[1:])} | drafted

    def test_drafts_are_verified_as_if_each_were_drawn(self, case: Mapping[str, Any]) -> None:
        """Several positions of each sequence in one draw, if the processor `verifies_drafts`. The
        last draft of half of the sequences is another token."""
        cases: list[Mapping[str, Any] | None] = [case] * _ROWS
        rows = self.rows(cases)
        assert rows.processors is not None, "it was made with one"
        listens = self.processor.after_draw is not LogitsProcessor.after_draw
        steps = listens or not self.processor.verifies_drafts
        assert rows.steps.tolist() == [steps] * _ROWS
        if steps:
            return
        drawn = []
        for step in range(_DRAFTS + 1):
            drawn.append(self.draw(self.logits(step), rows).token_ids)
            rows.history.append(np.arange(_ROWS), drawn[-1])
            rows.position += 1
        for wrong in (False, True):
            rows = self.rows(cases)
            for row in range(_ROWS):
                drafts = [drawn[step][row] for step in range(_DRAFTS)]
                if wrong and row % 2:
                    drafts[-1] = (drafts[-1] + 1) % LetterRenderer.vocab_size
                start = int(rows.history.num_tokens[row])
                rows.history.put(row, start, drafts, num_drafts=_DRAFTS)
            positions = np.tile(np.arange(_DRAFTS + 1), _ROWS)
            selected = rows.select(np.repeat(np.arange(_ROWS), _DRAFTS + 1), positions)
            logits = torch.stack([self.logits(step) for step in range(_DRAFTS + 1)], dim=1)
            found = sample(logits.flatten(0, 1), selected)
            for index, token in enumerate(found.token_ids):
                row, step = divmod(index, _DRAFTS + 1)
                is_ended = any(drawn[i][row] == self.end_token_id for i in range(step))
                if is_ended or (wrong and row % 2 and step == _DRAFTS):
                    # After the end, or the wrong draft: what is drawn or fails there is not kept.
                    continue
                assert index not in found.errors, found.errors[index]
                assert token == drawn[step][row], (
                    f"after {step} drafts another token is drawn than after as many draws"
                )

    def test_a_sequence_leaves(self, case: Mapping[str, Any]) -> None:
        made = self.processor(VllmConfig.default(), torch.device("cpu"))
        row = self.rows([None]).processor_row(0)
        for _ in range(2):
            made.add(row, self.arguments(case), {})
            made.remove(row.key)
        # The same as if `add` had raised.
        made.remove(row.key + 1)

    # Data of the tests

    def arguments(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that `prepare` makes of parameters. Raises RequestError."""
        try:
            arguments = self.params(**parameters).prepare(LetterRenderer())
        except RequestError as error:
            raise RequestError(str(error), error.param or next(iter(parameters))) from error
        except ValueError as error:
            raise RequestError(str(error), next(iter(parameters))) from error
        assert arguments is not None, f"{parameters} does not turn the processor on"
        return dict(arguments)

    def rows(
        self,
        cases: Sequence[Mapping[str, Any] | None],
        outputs: Sequence[list[int]] | None = None,
        states: Sequence[SamplerState] | None = None,
    ) -> SamplingBatch:
        """A row for each case; None: one without the processor."""
        registry = LogitsProcessorRegistry(owner=PluginInfo("tested"))
        registry.add(NAME, "tested:Tested", params=self.params)
        vars(registry)["load"] = lambda key: self.processor
        generator = torch.Generator().manual_seed(5)
        prompts = [
            torch.randint(0, 16, (3 + 5 * i,), generator=generator).tolist()
            for i in range(len(cases))
        ]
        return sampling_rows(
            *[SamplingParams()] * len(cases),
            prompts=prompts,
            outputs=outputs,
            capacity=_DRAWS,
            processors=ProcessorTable(registry, VllmConfig.default(), torch.device("cpu")),
            arguments=[{} if case is None else {NAME: self.arguments(case)} for case in cases],
            states=states,
        )

    def logits(self, seed: int = 0) -> Tensor:
        return (
            torch.randn(
                _ROWS, LetterRenderer.vocab_size, generator=torch.Generator().manual_seed(seed)
            )
            * 3
        )

    def values(self) -> Tensor:
        """Input of the processor's stage."""
        return (
            self.logits()
            if self.processor.stage == "logits"
            else torch.softmax(self.logits(), dim=-1)
        )

    def applied(self, case: Mapping[str, Any], values: Tensor) -> Tensor:
        rows = self.rows([case] * _ROWS)
        made = self.processor(VllmConfig.default(), torch.device("cpu"))
        views = [rows.processor_row(i) for i in range(_ROWS)]
        for row in views:
            made.add(row, self.arguments(case), {})
        original = values.clone()
        found = made.apply(original, views)
        assert (found.shape, found.dtype) == (values.shape, torch.float32)
        if self.processor.atomic:
            assert found is original, "an atomic processor works in place"
            assert (found < torch.inf).all(), "an atomic processor makes no NaN and no infinity"
        return found

    def draw(self, logits: Tensor, rows: SamplingBatch) -> Sampled:
        sampled = sample(logits, rows)
        assert not sampled.errors, sampled.errors
        return sampled
