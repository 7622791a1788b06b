"""ExecutorConformance: what every executor must do, shown on a small Llama; and WorkersConformance,
for one whose workers can die."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.config import VllmConfig
from toolkit_lm.engine import EngineCore
from toolkit_lm.errors import EngineDeadError
from toolkit_lm.executor import Executor, make_executor
from toolkit_lm.messages import NewSequence, ScheduledSequence, StepPlan, StepResult
from toolkit_lm.outputs import CompletionOutput, RequestOutput
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import resolve
from torch import Tensor

from toolkit_lm_devkit.checkpoints import write_checkpoint
from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.equality import assert_same_logits, assert_same_tokens
from toolkit_lm_devkit.forward import load_checkpoint, logits_of

VOCAB_SIZE = 272
NUM_LAYERS = 4
BLOCK_SIZE = 4
LENGTHS = (5, 17, 40, 3, 33, 1, 21)
"""Lengths of the prompts."""
MAX_MODEL_LEN = 64
PATIENCE = 60.0
"""Seconds after which a future counts as lost."""

COURSES: Mapping[str, Mapping[str, Any]] = {
    "mixed lengths": {},
    "in chunks": {"max_num_batched_tokens": 12, "max_num_seqs": 8},
    "recomputed": {
        "max_num_batched_tokens": 12,
        "max_num_seqs": 8,
        "num_kv_blocks": 20,
        "preemption_mode": "recompute",
    },
    "swapped": {
        "max_num_batched_tokens": 12,
        "max_num_seqs": 8,
        "num_kv_blocks": 20,
        "preemption_mode": "swap",
        "swap_memory": "4MiB",
    },
    "steps overlap": {
        "overlap": True,
        "max_num_batched_tokens": 12,
        "max_num_seqs": 8,
        "num_kv_blocks": 20,
    },
}
"""Options under which tokens are the same."""


def write_llama(folder: Path) -> Path:
    """A Llama with random float32 weights, and heads and layers that 2 ranks can share."""
    size = 64
    inner = 96
    kv_size = 32
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 1,
        "dtype": "float32",
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (VOCAB_SIZE, size),
        "model.norm": (size,),
        "lm_head": (VOCAB_SIZE, size),
    }
    layer = {
        "input_layernorm": (size,),
        "self_attn.q_proj": (size, size),
        "self_attn.k_proj": (kv_size, size),
        "self_attn.v_proj": (kv_size, size),
        "self_attn.o_proj": (size, size),
        "post_attention_layernorm": (size,),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    for number in range(NUM_LAYERS):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{name}.weight": 0.2 * torch.randn(shape, generator=generator) + (len(shape) == 1)
        for name, shape in shapes.items()
    }
    return write_checkpoint(folder, config, weights)


class ExecutorConformance(Conformance):
    """Subclass it as `class TestMine(ExecutorConformance)`, and name the executor.

    The distribution that registers it must be installed, or be in `plugins`; toolkit-lm-decoder,
    toolkit-lm-sdpa and toolkit-lm-renderer-hf too. What is computed is compared with a forward pass
    without an engine, on one rank.
    """

    executor: ClassVar[str]
    """The name that it is registered under."""
    plugins: ClassVar[Sequence[object]] = ()
    """Plugins from code."""
    ranks: ClassVar[Sequence[tuple[int, int]]] = ((1, 1),)
    """Tensor x pipeline parallel sizes that it can run; (2, 1), (1, 2) and (2, 2) where it can."""
    engine_options: ClassVar[Mapping[str, Any]] = {"device": "cpu"}
    """Options of VllmConfig that every engine gets."""

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        return {
            "sizes": {f"{tensor}x{pipeline}": (tensor, pipeline) for tensor, pipeline in cls.ranks},
            "course": COURSES,
        }

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_llama(tmp_path_factory.mktemp("llama"))

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, folder: Path) -> Callable[[Sequence[int]], Tensor]:
        """Token ids -> logits [T, V] at each of them."""
        model = load_checkpoint(Plugins.load().models.load("LlamaForCausalLM"), folder)
        return lambda token_ids: logits_of([model], torch.tensor(token_ids))

    @pytest.fixture(scope="class")
    @classmethod
    def cores(cls) -> Iterator[dict[tuple[int, int], EngineCore]]:
        """Cores that `core` has made, by sizes."""
        made: dict[tuple[int, int], EngineCore] = {}
        yield made
        for core in made.values():
            core.shutdown()

    @pytest.fixture
    def core(
        self, cores: dict[tuple[int, int], EngineCore], folder: Path, sizes: tuple[int, int]
    ) -> Iterator[EngineCore]:
        """An engine with nothing to do, which the class's tests have one after the other: sequences
        below 8 are dropped after each."""
        if sizes not in cores:
            cores[sizes] = self.make_core(folder, sizes)
        core = cores[sizes]
        yield core
        core.executor.execute(StepPlan(dropped=list(range(8)))).result(PATIENCE)

    @pytest.fixture
    def ended_core(self, folder: Path, sizes: tuple[int, int]) -> Iterator[EngineCore]:
        """An engine that is the test's alone, which may end its executor."""
        core = self.make_core(folder, sizes)
        yield core
        core.shutdown()

    def make_core(self, folder: Path, sizes: tuple[int, int]) -> EngineCore:
        """An engine with nothing to do, whose executor is at the test's disposal."""
        plugins = Plugins.load(extra=self.plugins)
        config = resolve(VllmConfig.make(model=str(folder), **self.options(sizes)), plugins)
        return EngineCore(config, plugins, make_executor(config, plugins))

    def options(self, sizes: tuple[int, int], **course: Any) -> dict[str, Any]:
        """Options for VllmConfig."""
        fixed = {
            "executor": self.executor,
            "tensor_parallel_size": sizes[0],
            "pipeline_parallel_size": sizes[1],
        }
        defaults = {
            "block_size": BLOCK_SIZE,
            "max_model_len": MAX_MODEL_LEN,
            "num_kv_blocks": 256,
            "max_logprobs": VOCAB_SIZE,
        }
        return {**defaults, **self.engine_options, **course, **fixed}

    def llm(self, folder: Path, sizes: tuple[int, int], **course: Any) -> LLM:
        return LLM(str(folder), plugins=list(self.plugins), **self.options(sizes, **course))

    # Through the whole engine

    def test_tokens_are_those_of_one_rank(
        self,
        folder: Path,
        reference: Callable[[Sequence[int]], Tensor],
        sizes: tuple[int, int],
        course: Mapping[str, Any],
    ) -> None:
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=VOCAB_SIZE)
        with self.llm(folder, sizes, **course) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False
            )
        for output in outputs:
            check(output, reference, greedy=True)

    def test_sequences_of_a_prompt_and_its_cached_prefix(
        self, folder: Path, reference: Callable[[Sequence[int]], Tensor], sizes: tuple[int, int]
    ) -> None:
        params = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True, logprobs=VOCAB_SIZE)
        prompt = prompts()[2]
        with self.llm(folder, sizes) as llm:
            outputs = [
                llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
                for _ in range(2)
            ]
        assert [output.num_cached_tokens for output in outputs] == [
            0,
            len(prompt) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE,
        ]
        for output in outputs:
            assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3, (
                "the sequences draw the same tokens"
            )
            check(output, reference, greedy=False)

    # The executor itself

    def test_every_rank_says_what_it_caches(self, core: EngineCore, sizes: tuple[int, int]) -> None:
        specs = core.executor.kv_cache_specs()
        assert len(specs) == sizes[0] * sizes[1]
        assert len({layer for spec in specs for layer in spec}) == NUM_LAYERS
        for spec in specs:
            assert len(spec) == NUM_LAYERS // sizes[1]
        assert core.executor.backends().keys() == {layer for spec in specs for layer in spec}
        assert (
            msgspec.json.decode(msgspec.json.encode(core.executor.backends()))
            == core.executor.backends()
        )

    def test_memory_is_a_number_of_bytes(self, core: EngineCore) -> None:
        for free in (core.executor.free_memory(), core.executor.free_host_memory()):
            assert isinstance(free, int)
            assert free > 0

    def test_steps_run_in_the_order_of_the_calls(
        self, core: EngineCore, reference: Callable[[Sequence[int]], Tensor]
    ) -> None:
        """The largest allowed number of steps is in flight; each needs the results of those before
        it."""
        tokens = prompts()[1]
        steps = [StepPlan(new=[new(0, tokens[:6])], scheduled=[row(0, 6)])]
        steps += [
            StepPlan(scheduled=[row(0, 1, start=6 + i, tokens=[token])])
            for i, token in enumerate(tokens[6:])
        ]
        logits = reference(tokens)
        results: list[StepResult] = []
        on_their_way: list[Future[StepResult]] = []
        for plan in steps:
            if len(on_their_way) == core.executor.max_in_flight:
                results.append(on_their_way.pop(0).result(PATIENCE))
            on_their_way.append(core.executor.execute(plan))
        results += [future.result(PATIENCE) for future in on_their_way]
        assert_same_tokens(
            [token for result in results for token in result.token_ids[0]], logits[5:]
        )

    def test_a_result_has_what_was_asked_for(
        self, core: EngineCore, reference: Callable[[Sequence[int]], Tensor]
    ) -> None:
        """A row that draws, with log probabilities, a chunk that does not draw, and log
        probabilities of a prompt."""
        asked = [
            SamplingParams(temperature=0, logprobs=2),
            SamplingParams(temperature=0),
            SamplingParams(temperature=0, prompt_logprobs=1),
        ]
        sequences = [
            new(i, prompts()[0], [2 * i, 2 * i + 1], params) for i, params in enumerate(asked)
        ]
        scheduled = [row(0, 5), row(1, 3, samples=False), row(2, 5)]
        result = core.executor.execute(StepPlan(new=sequences, scheduled=scheduled)).result(
            PATIENCE
        )
        best = int(reference(prompts()[0])[-1].argmax())
        assert result.token_ids == [[best], [], [best]]
        assert [len(entries) for entries in result.logprobs] == [1, 0, 0]
        (entry,) = result.logprobs[0]
        assert (entry.token_ids[:2], len(entry.logprobs)) == ([best, best], 3)
        assert {seq_id: len(entries) for seq_id, entries in result.prompt_logprobs.items()} == {
            2: 4
        }
        assert result.errors == {}

    def test_drafts_count_as_far_as_they_are_drawn(
        self, core: EngineCore, reference: Callable[[Sequence[int]], Tensor]
    ) -> None:
        """A row that verifies drafts draws several tokens; the step after it begins where they
        end."""
        tokens = list(prompts()[0])
        for _ in range(5):
            tokens.append(int(reference(tokens)[-1].argmax()))
        first, *drafts = tokens[5:8]
        wrong = (tokens[8] + 1) % VOCAB_SIZE
        core.executor.execute(StepPlan(new=[new(0, tokens[:5])], scheduled=[row(0, 5)])).result(
            PATIENCE
        )
        drafted = row(0, 4, start=5, tokens=[first, *drafts, wrong])
        drafted.num_drafts = 3
        result = core.executor.execute(StepPlan(scheduled=[drafted])).result(PATIENCE)
        assert result.token_ids == [tokens[6:9]]
        result = core.executor.execute(
            StepPlan(scheduled=[row(0, 1, start=8, tokens=[tokens[8]])])
        ).result(PATIENCE)
        assert result.token_ids == [[tokens[9]]]

    def test_a_plan_that_computes_nothing(self, core: EngineCore) -> None:
        assert core.executor.execute(StepPlan(dropped=[3])).result(PATIENCE).token_ids == []

    def test_a_failed_step_is_in_its_future(
        self, core: EngineCore, reference: Callable[[Sequence[int]], Tensor], sizes: tuple[int, int]
    ) -> None:
        """Its error has a traceback, and says on which of several ranks; the workers live on."""
        future = core.executor.execute(StepPlan(scheduled=[row(99, 1)]))
        assert isinstance(future, Future), "a step that fails has a result"
        error = future.exception(PATIENCE)
        assert isinstance(error, Exception)
        assert error.__traceback__ is not None
        assert sizes == (1, 1) or any(note.startswith("on rank ") for note in error.__notes__)
        core.executor.warm_up()
        result = core.executor.execute(
            StepPlan(new=[new(0, prompts()[0])], scheduled=[row(0, 5)])
        ).result(PATIENCE)
        assert result.token_ids == [[int(reference(prompts()[0])[-1].argmax())]]

    def test_shutdown_twice(self, ended_core: EngineCore) -> None:
        ended_core.executor.shutdown()
        ended_core.executor.shutdown()


class WorkersConformance(ExecutorConformance):
    """For an executor whose workers are not the engine's own thread: one of them may die."""

    def kill(self, executor: Executor) -> None:
        """Has a worker die, as by a crash; at the latest at the next step."""
        raise NotImplementedError(f"{type(self).__name__} must define kill(executor)")

    def test_a_dead_worker_fails_all_futures(self, ended_core: EngineCore) -> None:
        core = ended_core
        plan = StepPlan(new=[new(0, prompts()[0])], scheduled=[row(0, 5)])
        core.executor.execute(plan).result(PATIENCE)
        self.kill(core.executor)
        for _ in range(core.executor.max_in_flight + 1):
            future = core.executor.execute(StepPlan(scheduled=[row(0, 1, start=5, tokens=[3])]))
            error = future.exception(PATIENCE) if isinstance(future, Future) else future.result()
            assert isinstance(error, EngineDeadError), (
                f"a dead worker's step has the result {error!r}"
            )
            assert "rank" in str(error), f"it does not say whose: {error}"
        core.executor.shutdown()

    def test_an_engine_says_why_it_is_dead(self, folder: Path, sizes: tuple[int, int]) -> None:
        with self.llm(folder, sizes) as llm:
            client: Any = llm.engine.client
            self.kill(client.core.executor)
            for _ in range(2):
                with pytest.raises(EngineDeadError) as caught:
                    llm.generate([{"prompt_token_ids": prompts()[0]}], use_tqdm=False)
                assert caught.value.__notes__, "the error holds no last words of the worker"


@functools.cache
def prompts() -> list[list[int]]:
    """Random token ids, of the lengths in `LENGTHS`."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS
    ]


def new(
    seq_id: int,
    token_ids: Sequence[int],
    blocks: Sequence[int] = range(8),
    params: SamplingParams | None = None,
) -> NewSequence:
    """A sequence for a plan; greedy, unless `params` say otherwise. The model has one KV group."""
    return NewSequence(
        seq_id=seq_id,
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids),
        block_tables=[list(blocks)],
        params=params or SamplingParams(temperature=0),
        seed=0,
        stop_token_ids=[],
    )


def row(
    seq_id: int,
    num_tokens: int,
    *,
    start: int = 0,
    tokens: Sequence[int] = (),
    samples: bool = True,
) -> ScheduledSequence:
    """A row of a plan, which has its blocks already."""
    return ScheduledSequence(seq_id, start, num_tokens, [[]], samples, list(tokens))


def check(
    output: RequestOutput, reference: Callable[[Sequence[int]], Tensor], *, greedy: bool
) -> None:
    """The log probabilities along each sequence, and greedy tokens, are the reference's."""
    for completion in output.outputs:
        tokens = list(completion.token_ids)
        expected = reference([*(output.prompt_token_ids or ()), *tokens])[
            -len(tokens) - 1 : -1
        ].log_softmax(-1)
        assert_same_logits(_table(completion), expected)
        if greedy:
            assert_same_tokens(tokens, expected)


def _table(completion: CompletionOutput) -> Tensor:
    """[output tokens, V]."""
    return torch.tensor(
        [
            [entries[token].logprob for token in range(VOCAB_SIZE)]
            for entries in completion.logprobs or ()
        ]
    )
