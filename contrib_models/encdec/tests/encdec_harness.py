"""Encoder-decoder models without an engine: steps of sequences with a paged cache, some of which
begin while others go on."""

from dataclasses import dataclass, field

import numpy as np
import torch
from toolkit_lm.attention import (
    Attention,
    AttentionType,
    BatchLimits,
    BatchView,
    Binding,
    ForwardContext,
    GroupSetup,
    forward_context,
)
from toolkit_lm.model import Model
from toolkit_lm_devkit import load_checkpoint
from toolkit_lm_sdpa.backend import SdpaBackend

BLOCK_SIZE = 16
NUM_BLOCKS = 64
LIMITS = BatchLimits(16, 1024, 256)
ENCODER = 0
DECODER = 1
CROSS = 2
"""KV groups."""
GROUPS = {
    AttentionType.ENCODER: ENCODER,
    AttentionType.DECODER: DECODER,
    AttentionType.CROSS: CROSS,
}
MAX_MODEL_LEN = 64
# Lengths of the encoder's sequences, and of the decoder's.
LENGTHS = [(7, 9), (33, 20), (1, 6), (60, 40), (33, 5)]


def load(model_class, folder, **options):
    """The model of a checkpoint folder, as one rank holds it."""
    return load_checkpoint(
        model_class, folder, **{"max_model_len": MAX_MODEL_LEN, "block_size": BLOCK_SIZE, **options}
    )


@dataclass(eq=False)
class Sequence:
    """A request, and where its keys are."""

    encoder_ids: torch.Tensor
    token_ids: torch.Tensor
    """All tokens of the decoder, teacher-forced."""
    num_computed: int = 0
    tables: dict = field(default_factory=dict)
    logits: list = field(default_factory=list)
    """Logits of each token that is computed."""


def random_sequences():
    generator = torch.Generator().manual_seed(1)
    return [
        Sequence(*(torch.randint(5, 90, (n,), generator=generator) for n in lengths))
        for lengths in LENGTHS
    ]


def steps(sequences):
    """Prefill, in chunks for some, beside sequences that decode or begin later."""
    a, b, c, d, e = sequences
    yield [(a, 3), (b, 20)]
    yield [(a, 1), (c, 1), (d, 17)]
    yield [(d, 23), (a, 1), (e, 2), (c, 1)]
    for _ in range(3):
        yield [(c, 1), (e, 1), (a, 1)]
    yield [(c, 1), (a, 1)]


class Driver:
    """Runs a model step by step. Block ids are handed out in a random order, and unwritten slots
    are NaN."""

    def __init__(self, model: Model, backend=SdpaBackend):
        self.model = model
        layers = [module for module in model.modules() if isinstance(module, Attention)]
        self.bindings = {}
        self.backends = {}
        for layer in layers:
            kind = layer.params.attention_type
            spec = layer.attention_spec(torch.device("cpu"), cached=True)
            assert backend.refuses(spec) is None
            if kind not in self.backends:
                setup = GroupSetup(
                    layers=[spec], kv_cache=spec.kv_cache, limits=LIMITS, device=torch.device("cpu")
                )
                self.backends[kind] = backend(setup)
            cache = spec.kv_cache and tuple(
                torch.full((NUM_BLOCKS, *one.shape), torch.nan, dtype=getattr(torch, one.dtype))
                for one in backend.page_layout(spec.kv_cache)
            )
            self.bindings[layer.prefix] = Binding(
                self.backends[kind], layer.params, cache, GROUPS[kind]
            )
        assert len(self.bindings) == len(layers), "two attention layers have one prefix"
        order = torch.randperm(2 * NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
        self.free = {
            group: [block for block in order if block < NUM_BLOCKS] for group in (DECODER, CROSS)
        }

    def run(self, *steps):
        """Each step names the sequences that compute, and how many tokens of each."""
        for step in steps:
            self.step(step)

    @torch.inference_mode()
    def step(self, rows):
        begun = [sequence for sequence, _ in rows if not sequence.num_computed]
        encoder_hidden_states = self._encode([s.encoder_ids for s in begun]) if begun else None
        counts = [count for _, count in rows]
        starts = [s.num_computed for s, _ in rows]
        parts = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
        decoder = self._batch(rows, DECODER, [part.stop for part in parts], parts)
        of_encoders = [slice(0, len(s.encoder_ids) if s in begun else 0) for s, _ in rows]
        cross = self._batch(rows, CROSS, [len(s.encoder_ids) for s, _ in rows], of_encoders)
        token_ids = torch.cat([s.token_ids[part] for (s, _), part in zip(rows, parts, strict=True)])
        positions = torch.cat([torch.arange(part.start, part.stop) for part in parts])
        metadata = [
            None,
            self.backends[AttentionType.DECODER].build(decoder),
            self.backends[AttentionType.CROSS].build(cross),
        ]
        with forward_context(ForwardContext(self.bindings, metadata)):
            states = self.model(token_ids, positions, encoder_hidden_states=encoder_hidden_states)
        for (sequence, count), logits in zip(
            rows, self.model.compute_logits(states).split(counts), strict=True
        ):
            sequence.logits.append(logits)
            sequence.num_computed += count

    def _encode(self, sequences):
        lengths = [len(sequence) for sequence in sequences]
        meta = self.backends[AttentionType.ENCODER].build(
            view(lengths, lengths, [0] * len(lengths))
        )
        with forward_context(ForwardContext(self.bindings, [meta, None, None])):
            return self.model.encode(
                torch.cat(sequences), torch.cat([torch.arange(length) for length in lengths])
            )

    def _batch(self, rows, group, lengths, parts):
        """Batch of a group; `parts`: for each row, the keys that the step writes."""
        for (sequence, _), length in zip(rows, lengths, strict=True):
            table = sequence.tables.setdefault(group, [])
            while len(table) * BLOCK_SIZE < length:
                table.append(self.free[group].pop())
        tables = torch.zeros(
            len(rows), max(len(s.tables[group]) for s, _ in rows), dtype=torch.int32
        )
        for row, (sequence, _) in enumerate(rows):
            tables[row, : len(sequence.tables[group])] = torch.tensor(sequence.tables[group])
        slots = [
            tables[row, index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE
            for row, part in enumerate(parts)
            for index in range(part.start, part.stop)
        ]
        return view(
            [n for _, n in rows],
            lengths,
            [s.num_computed for s, _ in rows],
            tables,
            torch.tensor(slots, dtype=torch.int64),
        )


def view(counts, lengths, starts, table=None, slots=None):
    query_start = np.cumsum([0, *counts], dtype=np.int32)
    seq_lens = np.array(lengths, np.int32)
    return BatchView(
        query_start=query_start,
        seq_lens=seq_lens,
        starts=np.array(starts),
        query_start_device=torch.from_numpy(query_start),
        seq_lens_device=torch.from_numpy(seq_lens),
        block_table=table,
        slot_mapping=slots,
        max_query_len=max(counts),
        max_seq_len=max(lengths),
    )
