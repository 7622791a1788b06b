"""KVTierInEngine: the tests of KVTierConformance that run an engine with the tier."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file, save_file
from toolkit_lm import LLM, SamplingParams

from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.executor import write_llama

_SMALL: Mapping[str, Any] = {
    "block_size": 4,
    "max_model_len": 112,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 32,
    "dtype": "float32",
}
_BLOCKS = 30
"""Blocks of a device that two of the prompts fill."""
_ROOM = 200
"""Blocks of a device that has room for all of them."""
_PROMPTS = [[3 + (7 * i + length) % 50 for i in range(length)] for length in (70, 66, 60, 71)]
_ABORTS = 50
_LATE = 0.2
"""Seconds that a load has which never comes."""
_WAIT = 30.0
"""Seconds within which threads end, and loads begin."""
Change = Callable[["Future[Any]", Callable[[], Any]], None]
"""Completes a load, or does not: the future, and a function that gives the stored bytes."""


def _raise(future: Future[Any], data: Callable[[], Any]) -> None:
    raise OSError("the store raises")


FAULTS: Mapping[str, Change] = {
    "raises": _raise,
    "fails": lambda future, data: future.set_exception(OSError("the load fails")),
    "hangs": lambda future, data: None,
    "is cut": lambda future, data: future.set_result(bytes(data())[:-1]),
    "is empty": lambda future, data: future.set_result(b""),
    "is too long": lambda future, data: future.set_result(bytes(data()) + b"x"),
}
"""Loads that go wrong."""


class Answers:
    """Answers of an engine to each prompt."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        self.outputs = outputs
        self.tokens = [list(output.outputs[0].token_ids) for output in outputs]
        self.bits = [
            [sorted((key, value.logprob) for key, value in entry.items()) for entry in logprobs]
            for logprobs in (output.outputs[0].logprobs for output in outputs)
        ]
        """Log probabilities of the likeliest tokens."""
        self.cached = [output.num_cached_tokens for output in outputs]


Without = tuple[Answers, Answers]
Options = Mapping[str, Any]


class KVTierInEngine(Conformance):
    """The base of KVTierConformance. Without a `name` its tests are skipped.

    toolkit-lm-decoder, toolkit-lm-sdpa and toolkit-lm-renderer-hf must be installed.
    """

    name: ClassVar[str | None] = None
    """The name that the tier is registered under."""
    plugins: ClassVar[Sequence[object]] = ()
    """Plugins from code, unless the tier's distribution is installed."""
    outlives: ClassVar[bool] = False
    """A later engine, also one in another process, finds what a former one has stored."""
    damages: ClassVar[bool] = False
    """The class has a `damage` of its own."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        return {"fault": FAULTS}

    @pytest.fixture
    def engine_options(self) -> Mapping[str, Any]:
        """Options of an engine that turn the tier on, with room for 100 blocks of 4 kB, and have it
        load whatever it finds."""
        return {}

    def request(self, last: Any) -> Mapping[str, Any]:
        """`extra_args` of a request. `last`: the output of the one before with this prompt; None:
        it is the first."""
        return {}

    def settle(self, llm: LLM) -> None:
        """Returns once all that was given to the tier can be found. Called after prompts."""

    def damage(self) -> None:
        """Changes bytes of all blocks that the tier holds, behind its back, between two engines."""

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The model: a small Llama with random weights."""
        return write_llama(tmp_path_factory.mktemp("llama"))

    @pytest.fixture(scope="class")
    @classmethod
    def without(cls, checkpoint: Path) -> tuple[Answers, Answers]:
        """The answers without a tier: cold, and with the prefix on the device."""
        if cls.name is None:
            pytest.skip("it names no tier to run an engine with")
        with LLM(str(checkpoint), **_SMALL, num_kv_blocks=_ROOM) as llm:
            return Answers(_ask(llm)), Answers(_ask(llm))

    # Loaded blocks

    def test_cold_is_warm_is_loaded(
        self, checkpoint: Path, engine_options: Options, without: Without
    ) -> None:
        """On a device that has room for half of the prompts: bit for bit what the device's own
        blocks give."""
        cold, warm = without
        with self._engine(checkpoint, engine_options) as llm:
            outcomes = self._outcomes(llm)
            first = self._answers(llm)
            again = self._answers(llm, first)
            assert outcomes and set(outcomes) == {"loaded"}
            self._rests(llm)
        assert first.tokens == again.tokens == cold.tokens
        assert first.cached == [0] * len(_PROMPTS)
        assert again.cached == warm.cached
        assert again.bits == warm.bits

    def test_another_engine_finds_it(
        self, checkpoint: Path, engine_options: Options, without: Without
    ) -> None:
        """After the first one has ended."""
        self._needs(self.outlives, "it ends with its engine")
        cold, warm = without
        with self._engine(checkpoint, engine_options, num_kv_blocks=_ROOM) as llm:
            assert self._answers(llm).tokens == cold.tokens
        with self._engine(checkpoint, engine_options, num_kv_blocks=_ROOM) as llm:
            outcomes = self._outcomes(llm)
            restored = self._answers(llm)
            assert outcomes == ["loaded"] * len(_PROMPTS)
        assert restored.tokens == cold.tokens
        assert restored.cached == warm.cached
        assert restored.bits == warm.bits

    def test_a_reset_lasts(
        self, checkpoint: Path, engine_options: Options, without: Without
    ) -> None:
        with self._engine(checkpoint, engine_options) as llm:
            first = self._answers(llm)
            llm.reset_prefix_cache()
            again = self._answers(llm, first)
        assert again.cached == [0] * len(_PROMPTS)
        assert again.tokens == without[0].tokens

    # Faults

    def test_a_load_that_goes_wrong_is_a_miss(
        self,
        checkpoint: Path,
        engine_options: Options,
        without: Without,
        fault: Change,
    ) -> None:
        """The request computes itself, and the blocks are free again."""
        with self._engine(checkpoint, engine_options) as llm:
            first = self._answers(llm)
            outcomes = self._outcomes(llm)
            _tiers(llm)[self._name].timeout = _LATE
            late = self._spoil(llm, fault)
            again = self._answers(llm, first)
            assert outcomes and set(outcomes) <= {"failed", "late"}
            for future in late:
                # Nobody waits for it, and nobody's blocks are written.
                if not future.done():
                    future.set_result(b"late")
            assert self._answers(llm, again).tokens == without[0].tokens
            self._rests(llm)
        assert first.tokens == again.tokens == without[0].tokens

    def test_a_block_that_is_damaged_is_a_miss(
        self, checkpoint: Path, engine_options: Options, without: Without
    ) -> None:
        """A bit is another one: of what `load` gives where the worker's half is `checked`, else of
        what the tier holds."""
        self._needs(self._is_checked or self.damages, "its memory is this process's alone")
        with self._engine(checkpoint, engine_options) as llm:
            first = self._answers(llm)
            if self._is_checked:
                outcomes = self._outcomes(llm)
                self._spoil(llm, lambda future, data: future.set_result(_flipped(data())))
                assert self._answers(llm, first).tokens == without[0].tokens
                assert outcomes and set(outcomes) == {"failed"}
                self._rests(llm)
        if self.damages:
            self.damage()
            with self._engine(checkpoint, engine_options, num_kv_blocks=_ROOM) as llm:
                outcomes = self._outcomes(llm)
                again = self._answers(llm)
                assert "loaded" not in outcomes
                self._rests(llm)
            assert again.tokens == without[0].tokens

    def test_a_store_that_is_full_keeps_nothing(
        self, checkpoint: Path, engine_options: Options, without: Without
    ) -> None:
        with self._engine(checkpoint, engine_options) as llm:
            store = _store(llm, self._name)

            def full(*block: Any) -> None:
                raise OSError(errno.ENOSPC, "the store is full")

            store.store = full
            outcomes = self._outcomes(llm)
            first = self._answers(llm)
            again = self._answers(llm, first)
            assert "loaded" not in outcomes
            self._rests(llm)
        assert first.tokens == again.tokens == without[0].tokens

    def test_aborted_loads_free_their_blocks(
        self, checkpoint: Path, engine_options: Options, without: Without
    ) -> None:
        with self._engine(checkpoint, engine_options) as llm:
            core: Any = llm.engine.client.core  # type: ignore[attr-defined]
            first = self._answers(llm)
            outcomes = self._outcomes(llm)
            self._spoil(llm, FAULTS["hangs"])
            for number in range(_ABORTS):
                # The first prompts have left the device.
                index = number % 2
                params = _params(self.request(first.outputs[index]))
                llm.engine.add_request(f"{number}", _prompt(index), params)
                until = time.monotonic() + _WAIT
                while not core.scheduler.roster.loading:
                    assert time.monotonic() < until, "no load begins"
                    llm.engine.step()
                llm.engine.abort([f"{number}"])
            assert outcomes == ["cancelled"] * _ABORTS
            assert core.scheduler.blocks.num_used == 0
            del _store(llm, self._name).load
            assert self._answers(llm, first).tokens == without[0].tokens
            self._rests(llm)

    # Blocks of others

    @pytest.mark.parametrize("other", ["weights", "dtype", "block_size"])
    def test_others_never_read_it(
        self,
        checkpoint: Path,
        engine_options: Options,
        without: Without,
        tmp_path: Path,
        other: str,
    ) -> None:
        """Other weights in the same folder, and an engine whose blocks are others."""
        self._needs(self.outlives, "it ends with its engine")
        model = tmp_path / "model"
        shutil.copytree(checkpoint, model)
        with self._engine(model, engine_options, num_kv_blocks=_ROOM) as llm:
            assert self._answers(llm).tokens == without[0].tokens
        more: Mapping[str, Any] = {"dtype": {"dtype": "bfloat16"}, "block_size": {"block_size": 8}}
        own: Mapping[str, Any] = more.get(other, {})
        if other == "weights":
            _change_weights(model)
        with LLM(str(model), **{**_SMALL, "num_kv_blocks": _ROOM, **own}) as llm:
            expected = Answers(_ask(llm))
        with self._engine(model, engine_options, num_kv_blocks=_ROOM, **own) as llm:
            found = self._answers(llm)
        assert found.cached == [0] * len(_PROMPTS)
        assert found.tokens == expected.tokens
        assert found.bits == expected.bits

    def test_another_salt_never_reads_it(
        self, checkpoint: Path, engine_options: Options, without: Without
    ) -> None:
        with self._engine(checkpoint, engine_options) as llm:
            first = self._answers(llm)
            outcomes = self._outcomes(llm)
            again = self._answers(llm, first, cache_salt="another tenant's")
            assert "loaded" not in outcomes
        assert again.cached == [0] * len(_PROMPTS)
        assert again.tokens == without[0].tokens

    # The end

    def test_close_ends_its_threads(
        self, checkpoint: Path, engine_options: Options, without: Without
    ) -> None:
        """Threads of engines with the tier and without have ended."""
        before = set(threading.enumerate())
        with self._engine(checkpoint, engine_options) as llm:
            self._answers(llm, self._answers(llm))
        until = time.monotonic() + _WAIT
        while left := set(threading.enumerate()) - before:
            assert time.monotonic() < until, f"alive after close: {left}"
            time.sleep(0.01)

    # Engines

    @property
    def _name(self) -> str:
        assert self.name is not None, "`without` skips tests without a name"
        return self.name

    @property
    def _is_checked(self) -> bool:
        return bool(self.store.checked)  # type: ignore[attr-defined]

    def _needs(self, met: bool, reason: str) -> None:
        if not met:
            pytest.skip(reason)

    def _engine(self, checkpoint: Path, options: Mapping[str, Any], **more: Any) -> LLM:
        whole = {**_SMALL, "num_kv_blocks": _BLOCKS, **options, **more}
        return LLM(str(checkpoint), plugins=list(self.plugins), **whole)

    def _answers(
        self, llm: LLM, last: Answers | None = None, cache_salt: str | None = None
    ) -> Answers:
        outputs = None if last is None else last.outputs
        found = Answers(_ask(llm, self.request, outputs, cache_salt))
        self.settle(llm)
        return found

    def _outcomes(self, llm: LLM) -> list[str]:
        """Ends of loads from now on."""
        tier = _tiers(llm)[self._name]
        ended = tier.ended
        found: list[str] = []

        def record(num_bytes: int, seconds: float, outcome: str) -> None:
            found.append(outcome)
            ended(num_bytes, seconds, outcome)

        tier.ended = record
        return found

    def _spoil(self, llm: LLM, change: Change) -> list[Future[Any]]:
        """Loads go wrong from now on. Returns their futures, as they come."""
        store = _store(llm, self._name)
        load = store.load
        futures: list[Future[Any]] = []

        def spoiled(group: int, key: bytes) -> Future[Any]:
            future: Future[Any] = Future()
            change(future, lambda: load(group, key).result(_WAIT))
            futures.append(future)
            return future

        store.load = spoiled
        store.fill = lambda blocks: 0
        return futures

    @staticmethod
    def _rests(llm: LLM) -> None:
        """Nothing is left of any request."""
        scheduler = llm.engine.client.core.scheduler  # type: ignore[attr-defined]
        assert scheduler.blocks.num_used == 0
        assert not scheduler.roster.requests


def _ask(
    llm: LLM,
    request: Callable[[Any], Mapping[str, Any]] = lambda last: {},
    last: Sequence[Any] | None = None,
    cache_salt: str | None = None,
) -> list[Any]:
    """The output of each prompt, one after the other. `last`: those of the time before."""
    outputs = []
    for index in range(len(_PROMPTS)):
        params = _params(request(None if last is None else last[index]))
        [output] = llm.generate([_prompt(index)], params, use_tqdm=False, cache_salt=cache_salt)
        assert output.error is None, output.error
        outputs.append(output)
    return outputs


def _params(extra_args: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(
        temperature=0,
        max_tokens=8,
        ignore_eos=True,
        logprobs=5,
        extra_args=dict(extra_args) or None,
    )


def _prompt(index: int) -> Any:
    return {"prompt_token_ids": _PROMPTS[index]}


def _tiers(llm: LLM) -> Any:
    return llm.engine.client.core.scheduler.tiers.tiers  # type: ignore[attr-defined]


def _store(llm: LLM, name: str) -> Any:
    """The worker's half."""
    executor = llm.engine.client.core.executor  # type: ignore[attr-defined]
    return executor.runner._transfers._stores[name]


def _flipped(data: Any) -> bytes:
    found = bytearray(data)
    found[0] ^= 1
    return bytes(found)


def _change_weights(folder: Path) -> None:
    """Writes other weights of the same names and sizes."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({name: tensor.flip(0).contiguous() for name, tensor in weights.items()}, path)
