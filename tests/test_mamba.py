"""A recurrent model, by a third party's distribution (tests/plugins/mamba): a KV kind of its own,
and no keys and values."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.attention import BatchLimits, BatchView, GroupSetup
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.events import RequestEvent
from toolkit_lm.kv.group_blocks import SnapshotBlocks
from toolkit_lm.plugin import hookimpl
from toolkit_lm.scheduler.request import Request
from toolkit_lm_devkit import KVKindConformance, make_checkpoint

sys.path.insert(0, str(Path(__file__).parent / "plugins" / "mamba"))

import test_conformance_kit_models as kit_models
import toolkit_lm_mamba
from toolkit_lm_mamba.mixer import MambaBackend
from toolkit_lm_mamba.spec import MambaSpec

VOCAB = 272
PROMPTS = [
    {"prompt_token_ids": [(7 * i + length) % VOCAB for i in range(length)]}
    for length in (5, 21, 1, 33, 13)
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=VOCAB, ignore_eos=True)


class Preemptions:
    name = "preemptions"

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def toolkit_event(self, event) -> None:
        self.count += isinstance(event, RequestEvent) and event.kind == "preempted"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder, and transformers' model."""
    torch.manual_seed(3)
    config = transformers.MambaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=3,
        time_step_rank=4,
        conv_kernel=4,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = transformers.MambaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return make_checkpoint(tmp_path_factory.mktemp("mamba"), model), model


def run(folder, params=GREEDY, **options):
    """Outputs, and how often requests were preempted."""
    counter = Preemptions()
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_logprobs": VOCAB,
    }
    with LLM(str(folder), plugins=[toolkit_lm_mamba, counter], **defaults | options) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False), counter.count


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"overlap": True, "max_num_batched_tokens": 9},
    ],
    ids=["whole prompts", "chunks", "one token at a time", "overlap"],
)
def test_parity_with_transformers(checkpoint, assert_parity, options):
    folder, model = checkpoint
    assert_parity(model, run(folder, **options)[0])


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_go_on(checkpoint, assert_parity, mode):
    folder, model = checkpoint
    # n sequences wait for their leader's state; those that come first take all blocks.
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=VOCAB, ignore_eos=True, n=2)
    outputs, preemptions = run(
        folder,
        params,
        num_kv_blocks=3,
        preemption_mode=mode,
        swap_memory="1MiB",
        max_num_batched_tokens=16,
    )
    assert preemptions > 0
    for index in range(2):
        for output in outputs:
            assert output.outputs[index].token_ids == output.outputs[0].token_ids
    assert_parity(model, outputs)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_layers_are_ops(checkpoint, backend, tmp_path):
    """The recurrence is one op of the graph, and what is around it is compiled."""
    folder, _ = checkpoint
    details = {"backend": backend, "cache_dir": str(tmp_path)}
    compiled = {"optimization_level": 1, "compilation_config": json.dumps(details)}
    options = {"max_num_batched_tokens": 8, "num_kv_blocks": 3, "swap_memory": "1MiB"}
    outputs = []
    for level in ({}, compiled):
        with LLM(
            str(folder),
            plugins=[toolkit_lm_mamba],
            dtype="float32",
            max_model_len=64,
            max_num_seqs=8,
            **options,
            **level,
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            outputs.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS, params)])
            compiler = llm.engine.client.core.executor.runner.compiler
            if level:
                [program] = compiler._programs.values()
                ops = [step.name for step in program.plan.steps if step.kind == "op"]
                assert ops == ["toolkit_lm::cache_layer"] * 3
                assert compiler.num_eager_steps == 0
    assert outputs[0] == outputs[1]


def test_forks_copy_the_state(checkpoint):
    """Each of n sampled sequences is what it would be alone: drawn with the seed of its own."""
    folder, _ = checkpoint
    params = SamplingParams(temperature=1.0, max_tokens=10, n=4, seed=11, ignore_eos=True)
    together, _ = run(folder, params)
    chunked, _ = run(folder, params, max_num_batched_tokens=8)
    for one, other in zip(together, chunked, strict=True):
        drawn = [completion.token_ids for completion in one.outputs]
        assert drawn == [completion.token_ids for completion in other.outputs]
        assert len({tuple(tokens) for tokens in drawn}) > 1


def test_beams_fork_at_each_token(checkpoint):
    folder, model = checkpoint
    params = SamplingParams(
        use_beam_search=True, n=2, beam_width=3, max_tokens=6, ignore_eos=True, temperature=0
    )
    outputs, _ = run(folder, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor([prompt["prompt_token_ids"]])
        for completion in output.outputs:
            tokens = torch.tensor([completion.token_ids])
            with torch.no_grad():
                logits = model(torch.cat([ids, tokens], 1)).logits[0, ids.shape[1] - 1 : -1]
            expected = torch.log_softmax(logits, -1).gather(1, tokens[0][:, None]).sum()
            assert abs(completion.cumulative_logprob - float(expected)) < 1e-3


def test_a_state_without_snapshots_switches_prefix_caching_off(checkpoint, monkeypatch):
    folder, _ = checkpoint
    monkeypatch.setattr(MambaSpec, "shares_prefixes", False)
    options = {"plugins": [toolkit_lm_mamba], "device": "cpu", "max_model_len": 64}
    with LLM(str(folder), **options) as llm:
        assert not llm.engine.client.core.scheduler.request_blocks.caching
    culprit = r"layer 'backbone\.layers\.0\.mixer' keeps 'mamba', whose blocks no other"
    with pytest.raises(UnsupportedError, match=culprit):
        LLM(str(folder), enable_prefix_caching=True, **options)


@pytest.fixture(scope="module", params=["recurrent", "hybrid"])
def model(request, checkpoint, tmp_path_factory):
    """A checkpoint, and the plugins that it needs."""
    if request.param == "recurrent":
        return checkpoint[0], [toolkit_lm_mamba]
    folder = tmp_path_factory.mktemp("hybrid")
    kit_models.TestHybrid().make_checkpoint(folder)
    return folder, [toolkit_lm_mamba, kit_models.HYBRID]


SIZE = 4
CASES = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 9},
    "overlap": {"overlap": True},
    "recompute": {"num_kv_blocks": 28, "preemption_mode": "recompute"},
    "swap": {"num_kv_blocks": 28, "preemption_mode": "swap", "swap_memory": "4MiB"},
}
EACH = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, logprobs=VOCAB, ignore_eos=True),
    "forks": SamplingParams(temperature=1, max_tokens=9, n=3, seed=4, ignore_eos=True),
    "beams": SamplingParams(
        use_beam_search=True, n=2, beam_width=2, max_tokens=6, ignore_eos=True, temperature=0
    ),
}
TAILS = [[*range(length, 2 * length)] for length in (29, 32, 33, 5, 4, 1)]


def tokens_and_logprobs(outputs):
    return [
        [
            (one.token_ids, [{k: v.logprob for k, v in e.items()} for e in one.logprobs or ()])
            for one in output.outputs
        ]
        for output in outputs
    ]


def rounds(model, params, *, caching=True, drafter=None, count=3, **options):
    """The same prompts again and again: what came, and the cached tokens."""
    folder, plugins = model
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "block_size": SIZE} | options
    if drafter is not None:
        options["draft_budget"] = "all"
    if len(plugins) == 1 and "num_kv_blocks" in options:
        options["num_kv_blocks"] = options["num_kv_blocks"] // 7
    with LLM(
        str(folder),
        plugins=[*plugins],
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_logprobs=VOCAB,
        enable_prefix_caching=caching,
        drafter=drafter,
        **options,
    ) as llm:
        prompts = [{"prompt_token_ids": tail} for tail in TAILS]
        found = [llm.generate(prompts, params, use_tqdm=False) for _ in range(count)]
    assert not any(output.error for outputs in found for output in outputs)
    return (
        [tokens_and_logprobs(outputs) for outputs in found],
        [[output.num_cached_tokens for output in outputs] for outputs in found],
    )


def border(prompt):
    return (len(prompt) - 1) // SIZE * SIZE


@pytest.mark.parametrize("drafter", [None, "ngram"])
def test_a_warm_state_gives_what_a_cold_one_gives(model, drafter):
    """Bit for bit: who begins from a snapshot computes what its first owner computed."""
    params = EACH["greedy"]
    alone = {"max_num_seqs": 1, "drafter": drafter}
    found, cached = rounds(model, params, **alone)
    assert found[1] == found[2] == found[0]
    assert cached[1] == cached[2] == [border(prompt) for prompt in TAILS]


@pytest.mark.parametrize("params", EACH)
def test_hits_change_no_token(model, params):
    [plain, *_], _ = rounds(model, EACH[params], caching=False, count=1)
    for case in CASES.values():
        found, cached = rounds(model, EACH[params], count=2, **case)
        assert any(cached[1]) or "num_kv_blocks" in case
        for outputs in found:
            for one, other in zip(plain, outputs, strict=True):
                assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other], case


def test_without_room_for_snapshots_requests_go_on(checkpoint):
    model = checkpoint[0], [toolkit_lm_mamba]
    found, cached = rounds(model, EACH["greedy"], max_num_seqs=1, num_kv_blocks=7)
    assert found[1] == found[2] == found[0]
    assert not any(map(any, cached))


def test_a_snapshot_that_is_taken_a_token_late_is_seen(model):
    """The tests above can fail."""
    with pytest.MonkeyPatch.context() as patch:
        until = Request._until_pause
        kept = SnapshotBlocks.is_kept
        keep = SnapshotBlocks.keep
        patch.setattr(Request, "_until_pause", lambda *given: (n := until(*given)) + (n > 0))
        patch.setattr(
            SnapshotBlocks, "is_kept", lambda self, table, n, *rest: kept(self, table, n - 1, *rest)
        )
        patch.setattr(
            SnapshotBlocks,
            "keep",
            lambda self, table, hashes, n, room: keep(self, table, hashes, n - 1, room=room),
        )
        late, cached = rounds(model, EACH["greedy"], max_num_seqs=1)
    assert any(cached[1])
    assert late[1] != late[0]


def test_a_sequence_holds_one_block(checkpoint):
    folder, _ = checkpoint
    with LLM(
        str(folder),
        plugins=[toolkit_lm_mamba],
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        enable_prefix_caching=False,
    ) as llm:
        [pool] = llm.engine.client.core.kv_cache.pools
        [group] = llm.engine.client.core.kv_cache.groups
    assert (group.spec.kind, pool.num_blocks, pool.num_pages) == ("mamba", 4, 3)


class TestMambaSpec(KVKindConformance):
    plugins = [toolkit_lm_mamba]
    backend = MambaBackend
    spec = MambaSpec(block_size=64, channels=32, kernel_size=4, state_size=8)
    variants = [
        MambaSpec(block_size=2048, channels=32, kernel_size=4, state_size=8),
        MambaSpec(block_size=64, channels=33, kernel_size=4, state_size=8),
        MambaSpec(block_size=64, channels=32, kernel_size=3, state_size=8),
        MambaSpec(block_size=64, channels=32, kernel_size=4, state_size=9),
        MambaSpec(block_size=64, channels=32, kernel_size=4, state_size=8, rewinds=2),
        MambaSpec(block_size=64, channels=32, kernel_size=4, state_size=8, snapshots=16),
    ]


def test_padding_is_no_sequence():
    spec = MambaSpec(block_size=16, channels=4, kernel_size=4, state_size=2)
    backend = MambaBackend(
        GroupSetup(
            layers=[], kv_cache=spec, limits=BatchLimits(2, 2, 8), device=torch.device("cpu")
        )
    )
    table = torch.tensor([[3], [0]], dtype=torch.int32)
    start = torch.tensor([0, 1, 2], dtype=torch.int32)
    lengths = torch.tensor([5, 0], dtype=torch.int32)
    batch = BatchView(
        query_start=start.numpy(),
        seq_lens=lengths.numpy(),
        starts=torch.tensor([4, 0]).numpy(),
        query_start_device=start,
        seq_lens_device=lengths,
        block_table=table,
        slot_mapping=torch.tensor([3, -1]),
        max_query_len=1,
        max_seq_len=5,
        has_padding=True,
    )
    assert backend.build(batch) == [(slice(0, 1), 3, 4)]


def test_a_pooling_engine_has_a_cache_for_its_states(checkpoint):
    """Also where nothing comes after a prompt, and attention would need none."""
    folder, _ = checkpoint
    vectors = []
    for options in ({}, {"enable_chunked_prefill": True, "max_num_batched_tokens": 8}):
        engine = {
            "dtype": "float32",
            "max_model_len": 64,
            "max_num_seqs": 8,
            "runner": "pooling",
            "convert": "embed",
        } | options
        with LLM(str(folder), plugins=[toolkit_lm_mamba], **engine) as llm:
            vectors.append(
                [list(output.outputs.embedding) for output in llm.embed(PROMPTS, use_tqdm=False)]
            )
    for one, other in zip(*vectors, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert len(set(map(tuple, vectors[0]))) == len(PROMPTS)
