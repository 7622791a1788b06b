"""PartConformance: what every part of a step must do, shown through the whole engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.messages import NewSequence
from toolkit_lm.plugin import PartRegistry, Plugins
from toolkit_lm.prompts import TokensPrompt
from toolkit_lm.step import StepPart

from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.executor import write_llama

PROMPTS = [[3 + (7 * i + length) % 50 for i in range(length)] for length in (25, 9, 1, 17)]
SAMPLING: Sequence[Mapping[str, Any]] = ({"temperature": 0}, {"temperature": 1, "seed": 5, "n": 2})
"""Parameters of requests, in turn."""
_CHUNKED = {"max_num_batched_tokens": 12, "max_num_seqs": 8}
COURSES: Mapping[str, Mapping[str, Any]] = {
    "together": {},
    "in chunks": _CHUNKED,
    "preempted": {**_CHUNKED, "num_kv_blocks": 24, "preemption_mode": "recompute"},
    "overlap": {"overlap": True},
}
"""Options under which tokens are the same."""
Tokens = list[list[int]]
"""Token ids of each sequence of a request."""


class PartConformance(Conformance):
    """Subclass it as `class TestMine(PartConformance)`, name the part, and say in `shares` what
    requests give to it.

    The distribution that registers it must be installed, or its plugin stand in `plugins`;
    toolkit-lm-decoder, toolkit-lm-sdpa and toolkit-lm-renderer-hf must be installed too. The
    executor is one that runs its worker in the test's process.
    """

    part: ClassVar[str]
    """The name that it is registered under."""
    shares: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """`SamplingParams.extra_args` of requests that use the part, each with another result. Empty:
    requests say nothing of it."""
    plugins: ClassVar[Sequence[object]] = ()
    """Plugins from code."""
    changes_tokens: ClassVar[bool] = False
    """The part changes the tokens of requests that give it nothing."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        return {"course": COURSES}

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """The model: a small Llama with random weights, unless a subclass has another."""
        return str(write_llama(tmp_path_factory.mktemp("llama")))

    @pytest.fixture(scope="class")
    @classmethod
    def options(cls, checkpoint: str) -> Mapping[str, Any]:
        """Options of engines with the part, such as `plugin_option`."""
        return {}

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, checkpoint: str, options: Mapping[str, Any]) -> list[Tokens]:
        """The tokens of each request by itself, without a cached prefix."""
        with cls.llm(checkpoint, options, enable_prefix_caching=False) as llm:
            return [cls.ask(llm, [request])[0] for request in cls.requests()]

    def test_only_the_workers_half_imports_torch(self) -> None:
        entry = self.registry().get(self.part)
        modules = {
            target.partition(":")[0] for half, target in entry.halves.items() if half != "worker"
        }
        code = f"import sys, {', '.join(sorted(modules)) or 'os'}; sys.exit('torch' in sys.modules)"
        path = os.pathsep.join(path for path in sys.path if path)
        # The words are our own.
        ran = subprocess.run(  # nosec B603
            [sys.executable, "-c", code], check=False, env=os.environ | {"PYTHONPATH": path}
        )
        assert ran.returncode == 0, f"{', '.join(modules)}: imports torch, or fails"

    def test_requests_without_a_share_are_as_without_the_part(
        self, checkpoint: str, alone: Sequence[Tokens]
    ) -> None:
        if self.changes_tokens:
            pytest.skip("it changes the tokens of all requests")
        requests = self.requests()
        plain = [index for index, (_, _, share) in enumerate(requests) if not share]
        with LLM(checkpoint, **self.defaults()) as llm:
            tokens = self.ask(llm, [requests[index] for index in plain])
        assert [alone[index] for index in plain] == tokens, (
            "requests that give it nothing have other tokens than without the part"
        )

    def test_each_share_counts(self, alone: Sequence[Tokens]) -> None:
        found: dict[str, str] = {}
        for (prompt, _, share), tokens in zip(self.requests(), alone, strict=True):
            if prompt is PROMPTS[0]:
                before = found.setdefault(repr(tokens), repr(share))
                assert before == repr(share), f"{share} gives the tokens of {before}"

    def test_tokens_do_not_depend_on_the_company(
        self,
        checkpoint: str,
        options: Mapping[str, Any],
        alone: Sequence[Tokens],
        course: Mapping[str, Any],
    ) -> None:
        """All requests at once, and once more, where prefixes are cached."""
        requests = self.requests()
        with self.llm(checkpoint, options, **course) as llm:
            for order in ("beside others", "after others"):
                for request, tokens, own in zip(
                    requests, self.ask(llm, requests), alone, strict=True
                ):
                    assert tokens == own, (
                        f"{request[2] or 'a request without a share'}: other tokens {order} than "
                        "alone"
                    )

    def test_sequences_that_have_left_are_forgotten(
        self, checkpoint: str, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The engine calls `remove` for each sequence that leaves: this undoes the effect of
        `add`."""
        if "worker" not in self.registry().get(self.part).halves:
            pytest.skip("it has no half on the workers")
        kind: type[StepPart] = self.registry().load_half(self.part, "worker")
        parts: list[StepPart] = []
        make = kind.__init__

        def made(part: StepPart, *arguments: Any, **keywords: Any) -> None:
            make(part, *arguments, **keywords)
            parts.append(part)

        monkeypatch.setattr(kind, "__init__", made)
        with self.llm(checkpoint, options) as llm:
            self.ask(llm, self.requests())
            # The next plan drops the last of them.
            self.ask(llm, [(PROMPTS[0], SAMPLING[0], {})])
            before = self.sizes(parts)
            for _ in range(2):
                self.ask(llm, self.requests())
            self.ask(llm, [(PROMPTS[0], SAMPLING[0], {})])
            after = self.sizes(parts)
        grown = [f"{name} from {before[name]} to {n}" for name, n in (after - before).items()]
        assert not grown, f"it keeps something of sequences that have left: {', '.join(grown)}"

    def test_unknown_sequences_are_no_error(
        self, checkpoint: str, options: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A sequence may be added twice, and an unknown one may leave."""
        if "worker" not in self.registry().get(self.part).halves:
            pytest.skip("it has no half on the workers")
        kind: type[StepPart] = self.registry().load_half(self.part, "worker")
        add = kind.add

        def twice(part: StepPart, seq: NewSequence) -> None:
            part.remove(-7)
            add(part, seq)
            add(part, seq)

        monkeypatch.setattr(kind, "add", twice)
        request = self.requests()[0]
        with self.llm(checkpoint, options) as llm:
            assert self.ask(llm, [request])[0]

    # Data of the tests

    @classmethod
    def sizes(cls, parts: Sequence[StepPart]) -> Counter[str]:
        """How many entries the collections of the parts have, by attribute."""
        counted: Counter[str] = Counter()
        for part in parts:
            for name, value in vars(part).items():
                if isinstance(value, dict | list | set):
                    counted[name] += len(value)
        return counted

    @classmethod
    def requests(cls) -> list[tuple[list[int], Mapping[str, Any], Mapping[str, Any]]]:
        """Prompt, sampling parameters and share of each: all prompts, with each share and with
        none."""
        shares = ({}, *cls.shares)
        return [
            (prompt, SAMPLING[(place + number) % len(SAMPLING)], share)
            for number, share in enumerate(shares)
            for place, prompt in enumerate(PROMPTS)
        ]

    @classmethod
    def ask(
        cls,
        llm: LLM,
        requests: Sequence[tuple[list[int], Mapping[str, Any], Mapping[str, Any]]],
    ) -> list[Tokens]:
        """The tokens of each request."""
        prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt, _, _ in requests]
        params = [
            SamplingParams(
                max_tokens=8,
                ignore_eos=True,
                detokenize=False,
                extra_args=dict(share) or None,
                **fields,
            )
            for _, fields, share in requests
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            assert output.error is None, output.error
        return [[list(completion.token_ids) for completion in output.outputs] for output in outputs]

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        return {
            "device": "cpu",
            "dtype": "float32",
            "block_size": 4,
            "max_model_len": 64,
            "num_kv_blocks": 512,
            "engine_process": False,
        }

    @classmethod
    def llm(cls, checkpoint: str, options: Mapping[str, Any], **course: Any) -> LLM:
        """An engine with the part."""
        return LLM(checkpoint, plugins=list(cls.plugins), **{**cls.defaults(), **options, **course})

    @classmethod
    def registry(cls) -> PartRegistry:
        return Plugins.load(extra=cls.plugins).parts
