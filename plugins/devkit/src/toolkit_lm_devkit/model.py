"""ModelConformance: what every model class must do, shown through the whole engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import Checkpoint, VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec, plan_groups
from toolkit_lm.model import (
    FusibleLayer,
    Kernels,
    Model,
    Sources,
    check_constructor,
    construction,
)
from toolkit_lm.plugin import Plugins
from toolkit_lm.resolution import read_checkpoint
from toolkit_lm_weights.safetensors import CheckpointWeights
from torch import Tensor

from toolkit_lm_devkit.equality import assert_same_logits, assert_same_tokens
from toolkit_lm_devkit.forward import assert_embeds, load_checkpoint, logits_of
from toolkit_lm_devkit.generation import Generated, generate, pool
from toolkit_lm_devkit.sharding import assert_shards, is_sharded
from toolkit_lm_devkit.thread_ranks import run_ranks
from toolkit_lm_devkit.warm_states import WarmStates
from toolkit_lm_devkit.weight_names import WeightNames

Reference = Callable[[Sequence[int]], Tensor]
"""Token ids of one sequence -> logits [T, V] at each of them."""

BLOCK_SIZE = 4
CHUNK = 12
"""Token budget of a step where prompts must be computed in chunks."""
FUSED_TOLERANCE = 1e-4
"""Most difference of log probabilities, in float32, where a layer is computed in one call."""
FUSED_BLOCK_SIZE = 16
"""One that the attention of kernels takes, without which they compute no layer in one call."""
POOLED_TOLERANCE = 1e-5
"""Most difference of the entries of vectors of unit length, in float32."""


@dataclass(frozen=True)
class Subject:
    """A checkpoint that was written for a variant, and what should come out of it."""

    folder: Path
    reference: Reference
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of VllmConfig that every engine gets."""
    plugins: Sequence[object] = ()
    """Plugins from code, in addition to the installed ones."""

    @cached_property
    def loaded(self) -> Plugins:
        """The plugins that an engine would load."""
        return Plugins.load(extra=self.plugins)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint as the engine reads it."""
        return read_checkpoint(VllmConfig.make(model=str(self.folder), **self.options), self.loaded)

    @cached_property
    def model_class(self) -> type[Model]:
        """The class that the engine chooses for it."""
        chosen: type[Model] = self.loaded.models.load(self.checkpoint.architecture)
        return chosen

    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """[output tokens, V]: the reference's log probabilities along `output`."""
        with torch.inference_mode():
            logits = self.reference([*prompt, *output]).float().cpu()
        return torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)


class ModelConformance(WarmStates, WeightNames):
    """Subclass it as `class TestMine(ModelConformance)`, and write checkpoints in
    `make_checkpoint`.

    The distribution that registers the architecture must be installed, or its plugin stand in
    `plugins`; toolkit-lm-pooling-adapters must be installed too. Checkpoints are small: two layers,
    heads that `tensor_parallel_sizes` divide, a vocabulary of some 270 tokens, at least
    `max_model_len` positions. For models that transformers has too there is
    `TransformersConformance`.
    """

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    """Name -> what `make_checkpoint` is given. The more expensive tests run for the first one."""
    engine_options: ClassVar[Mapping[str, Any]] = {"device": "cpu"}
    """Options of VllmConfig that every engine gets."""
    plugins: ClassVar[Sequence[object]] = ()
    """Plugins from code."""
    lengths: ClassVar[Sequence[int]] = (5, 17, 40, 3, 64, 33, 1, 21)
    """Lengths of the prompts."""
    placeholder_ids: ClassVar[Collection[int]] = ()
    """Token ids that stand for items of media: prompts of text alone have none of them."""
    max_tokens: ClassVar[int] = 24
    max_model_len: ClassVar[int] = 112
    tensor_parallel_sizes: ClassVar[Sequence[int]] = (2, 4)
    pipeline_stages: ClassVar[int] = 2
    """Stages that the model's layers are cut into; 1 where it cannot be cut."""
    poolable: ClassVar[bool] = True
    """False where the model cannot be pooled (`convert="embed"`) without a KV cache, and so must be
    refused."""

    def make_checkpoint(self, folder: Path, **variant: Any) -> Reference:
        """Writes a checkpoint with random float32 weights and a tokenizer (see `write_checkpoint`),
        and gives the model to compare with."""
        raise NotImplementedError(
            f"{type(self).__name__} must define make_checkpoint(folder, **variant)"
        )

    def model_class(self, subject: Subject) -> type[Model]:
        """The class under test: the one that the engine chooses."""
        return subject.model_class

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        return {
            "variant": {name: name for name in cls.variants},
            "ranks": {str(size): size for size in cls.tensor_parallel_sizes},
        }

    @pytest.fixture(scope="class")
    @classmethod
    def subjects(cls, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Subject]:
        """Variant -> its checkpoint, which is written once."""
        made: dict[str, Subject] = {}

        def get(variant: str) -> Subject:
            if variant not in made:
                folder = tmp_path_factory.mktemp("checkpoint")
                reference = cls().make_checkpoint(folder, **cls.variants[variant])
                made[variant] = Subject(folder, reference, cls.engine_options, cls.plugins)
            return made[variant]

        return get

    @pytest.fixture
    def first(self, subjects: Callable[[str], Subject]) -> Subject:
        """The checkpoint of the first variant."""
        return subjects(next(iter(self.variants)))

    # Parity

    def test_parity_of_mixed_lengths(
        self, subjects: Callable[[str], Subject], variant: str
    ) -> None:
        subject = subjects(variant)
        assert self.check_parity(subject).preemptions == 0

    def test_parity_chunked_and_preempted(
        self, subjects: Callable[[str], Subject], variant: str
    ) -> None:
        subject = subjects(variant)
        specs = self.kv_cache_specs(subject)
        # It holds one sequence of the greatest length, but not all of them.
        num_blocks = sum(spec.max_blocks(self.max_model_len, CHUNK) for spec in specs) + 2
        pool = {
            "num_kv_blocks": num_blocks,
            "max_num_seqs": len(self.lengths),
            "max_num_batched_tokens": CHUNK,
        }
        generated = self.check_parity(subject, **pool)
        if self.must_preempt(specs):
            assert generated.preemptions > 0, f"{num_blocks} KV blocks were meant to be too few"

    def must_preempt(self, specs: Sequence[KVCacheSpec]) -> bool:
        """Whether sequences that were admitted run out of blocks in so small a pool, since what is
        kept of each only grows.

        What does not grow, as a recurrent state, is there on admission, and so few blocks admit few
        sequences at a time: these then have room to grow. Where all layers are windowed, sequences
        give back as many blocks as they take.
        """
        return all(spec.grows for spec in specs) and any(
            spec.first_needed(self.max_model_len) == 0 for spec in specs
        )

    def test_parity_of_one_token_at_a_time(self, first: Subject) -> None:
        # A user who gives no length gets the checkpoint's own, if it has one.
        has_length = bool(first.loaded.models.get(first.checkpoint.architecture).length_keys)
        unstated = {
            "max_model_len": None if has_length else self.max_model_len,
            "num_kv_blocks": None,
        } | dict(self.engine_options)
        # Alone, each after a longer one: steps differ by position alone.
        prompts = sorted(self.prompts(first), key=len)[::-3]
        options = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
        self.check_parity(first, prompts, **options, **unstated)

    def check_parity(
        self, subject: Subject, prompts: Sequence[Sequence[int]] | None = None, /, **options: Any
    ) -> Generated:
        """Prompts, by default all of them, in one engine: greedy tokens and log probabilities are
        those of the reference."""
        prompts = prompts or self.prompts(subject)
        generated = self.generate(subject, prompts, **options)
        for prompt, tokens, ours in zip(
            prompts, generated.token_ids, generated.logprobs, strict=True
        ):
            assert len(tokens) == self.max_tokens
            reference = subject.logprobs(prompt, tokens)
            assert_same_logits(ours, reference)
            assert_same_tokens(tokens, reference)
        return generated

    def test_fused_layers_compute_what_their_modules_do(
        self, subjects: Callable[[str], Subject], variant: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Layers that kernels compute in one call give the results of their modules."""
        self.check_fusing(subjects(variant), monkeypatch)

    def check_fusing(self, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
        """All prompts in one engine, and in another one whose layers are left to their modules."""
        fused: set[str] = set()
        fuse = FusibleLayer.fuse

        def fuse_and_watch(layer: FusibleLayer, kernels: Kernels) -> None:
            fuse(layer, kernels)
            if (call := layer.fused) is None:
                return

            def watched(*arguments: Any) -> tuple[Tensor, Tensor] | None:
                if (done := call(*arguments)) is not None:
                    fused.add(type(layer).__name__)
                return done

            layer.fused = watched

        with monkeypatch.context() as patch:
            patch.setattr(FusibleLayer, "fuse", fuse_and_watch)
            ours = self.generate_all(subject, block_size=FUSED_BLOCK_SIZE)
            if not fused:
                return
            patch.setattr(FusibleLayer, "fuse", lambda layer, kernels: None)
            theirs = self.generate_all(subject, block_size=FUSED_BLOCK_SIZE)
        label = (
            f"{', '.join(sorted(fused))}: the layer in one call of kernels, by its `parts`, is "
            "not what its modules compute"
        )
        for tokens, others, logprob, other in zip(
            ours.token_ids, theirs.token_ids, ours.logprobs, theirs.logprobs, strict=True
        ):
            # After the first other token it is another text.
            same = (
                next(
                    (i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b),
                    len(tokens) - 1,
                )
                + 1
            )
            worst = (logprob[:same] - other[:same]).abs().max().item()
            assert worst <= FUSED_TOLERANCE, f"{label}: logits differ by {worst:.3g}"

    def test_pooling_without_a_cache(
        self, subjects: Callable[[str], Subject], variant: str
    ) -> None:
        """The hidden states that are pooled are those that the reference's logits are made of."""
        subject = subjects(variant)
        if self.poolable:
            self.check_pooling(subject)
        else:
            with pytest.raises(UnsupportedError):
                self.check_pooling(subject)

    def check_pooling(self, subject: Subject) -> None:
        """All prompts in one pooling engine: hidden states of all tokens, and embeddings."""
        prompts = self.prompts(subject)
        pooled = pool(
            subject.folder,
            prompts,
            plugins=subject.plugins,
            max_model_len=self.max_model_len,
            **self.engine_options,
        )
        model = load_checkpoint(self.model_class(subject), subject.folder, plugins=subject.loaded)
        for prompt, states, embedding in zip(prompts, *pooled, strict=True):
            with torch.inference_mode():
                # No token sees what follows it, but a scaling of positions may depend on the
                # length, which is here that of `check_parity`.
                reference = (
                    subject.reference([*prompt, *[0] * self.max_tokens])[: len(prompt)]
                    .float()
                    .cpu()
                )
                logits = model.compute_logits(states)
                assert all(map(torch.equal, model.likeliest(states), logits.max(-1))), (
                    "greedy tokens are not those of the logits"
                )
                ours = logits.float()
            assert_same_logits(ours.log_softmax(-1), reference.log_softmax(-1))
            difference = (embedding - torch.nn.functional.normalize(states[-1], dim=0)).abs().max()
            assert difference <= POOLED_TOLERANCE, (
                f"an embedding is off by {difference:.3g} from the last token's hidden state"
            )

    def generate(
        self, subject: Subject, prompts: Sequence[Sequence[int]], **options: Any
    ) -> Generated:
        """`prompts` through the engine."""
        vocab_size = subject.reference([0]).shape[-1]
        options = (
            {"block_size": BLOCK_SIZE, "max_model_len": self.max_model_len, "num_kv_blocks": 1024}
            | dict(self.engine_options)
            | options
        )
        return generate(
            subject.folder,
            prompts,
            vocab_size=vocab_size,
            max_tokens=self.max_tokens,
            plugins=subject.plugins,
            **options,
        )

    def generate_all(self, subject: Subject, **options: Any) -> Generated:
        """The conformance prompts through the engine."""
        return self.generate(subject, self.prompts(subject), **options)

    def prompts(self, subject: Subject) -> list[list[int]]:
        """Random token ids, of the lengths in `lengths`."""
        generator = torch.Generator().manual_seed(7)
        drawn = torch.tensor(
            [i for i in range(3, subject.reference([0]).shape[-1]) if i not in self.placeholder_ids]
        )
        return [
            drawn[torch.randint(len(drawn), (length,), generator=generator)].tolist()
            for length in self.lengths
        ]

    def kv_cache_specs(self, subject: Subject) -> list[KVCacheSpec]:
        """That of each KV group."""
        return [group.spec for group in self.kv_cache(subject).groups]

    def kv_cache(self, subject: Subject) -> KVCacheConfig:
        """The model's KV groups and pools, without blocks."""
        layers = [
            module
            for module in self.make_model(subject).modules()
            if isinstance(module, CacheLayer)
        ]
        specs = {
            layer.prefix: spec
            for layer in layers
            if layer.shares_with is None and (spec := layer.keeps)
        }
        return plan_groups(specs, dict.fromkeys(specs, "auto"))

    # Construction and weights

    def make_model(self, subject: Subject, *, rank: int = 0, ranks: int = 1) -> Model:
        """The model as one rank holds it, without weights."""
        options: dict[str, Any] = {
            "max_model_len": self.max_model_len,
            "block_size": BLOCK_SIZE,
            "tensor_parallel_size": ranks,
        }
        config = VllmConfig.default(**options).with_rank(rank).with_checkpoint(subject.checkpoint)
        sources = Sources(CheckpointWeights(subject.folder).names())
        with construction(models=subject.loaded.models, sources=sources):
            return self.model_class(subject)(vllm_config=config)

    def test_constructor_takes_two_keywords(self, first: Subject) -> None:
        cls = self.model_class(first)
        check_constructor(cls)
        kinds = {p.name: p.kind for p in inspect.signature(cls).parameters.values()}
        positional = [
            name for name, kind in kinds.items() if kind is not inspect.Parameter.KEYWORD_ONLY
        ]
        assert positional == [], f"{cls.__name__}: parameters {positional} must be keyword-only"

    def test_shards_make_up_the_whole(
        self, subjects: Callable[[str], Subject], variant: str, ranks: int
    ) -> None:
        subject = subjects(variant)
        models = [
            self.make_model(subject),
            *(self.make_model(subject, rank=rank, ranks=ranks) for rank in range(ranks)),
        ]
        for model in models:
            model.load_weights(CheckpointWeights(subject.folder))
        assert any(is_sharded(models[1]).values()), f"{ranks} ranks hold all of every weight"
        assert_shards(models[0], models[1:])

    def test_embeds_its_tokens(self, first: Subject) -> None:
        assert_embeds(load_checkpoint(self.model_class(first), first.folder, plugins=first.loaded))

    def test_ranks_and_stages_compute_the_whole(self, first: Subject, ranks: int) -> None:
        """Ranks with a shard each, in `pipeline_stages` stages, give the logits of one rank."""
        model_class = self.model_class(first)
        tokens = torch.tensor(self.prompts(first)[0])
        expected = logits_of(
            [load_checkpoint(model_class, first.folder, plugins=first.loaded)], tokens
        )
        stages = self.pipeline_stages

        def compute(rank: int) -> Tensor:
            options: dict[str, Any] = {
                "tensor_parallel_size": ranks,
                "pipeline_parallel_size": stages,
            }
            parts = [
                load_checkpoint(
                    model_class,
                    first.folder,
                    rank=stage * ranks + rank,
                    plugins=first.loaded,
                    **options,
                )
                for stage in range(stages)
            ]
            return logits_of(parts, tokens)

        for rank, ours in enumerate(run_ranks(compute, ranks)):
            assert (ours - expected).abs().max() <= 1e-4, (
                f"rank {rank} of {ranks}, in {stages} stages, gives other logits than one alone"
            )
