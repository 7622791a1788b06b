"""Everything that crosses a process boundary: msgspec structs, never pickle.

front → engine: EngineRequest, abort ids. engine → front: EngineOutputs. engine → worker: StepPlan.
worker → engine: StepResult.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Raw, Struct, field

from toolkit_lm.events import Event
from toolkit_lm.params import FinishReason, SamplingParams
from toolkit_lm.pooling_params import PoolingParams

if TYPE_CHECKING:
    import numpy as np

SamplerState = dict[str, dict[str, float]]
"""State that each logits processor keeps for a sequence between samplings, by processor name."""


class PoolingRules(Struct, frozen=True):
    """Limits that a model sets on how the scheduler computes the prompts of a pooling task."""

    chunkable: bool
    """The prompts may be computed in several steps."""
    reads_prefix_cache: bool
    """The prompts may begin after a cached prefix."""
    size: int | None
    """Size of the last axis of the results; None: unknown."""


class Array(Struct, frozen=True):
    """A tensor sent between processes: C order, little-endian."""

    dtype: str
    """The NumPy name of the dtype, such as "float32"."""
    shape: list[int]
    data: memoryview
    """A view of the tensor's memory, or of the received message's. Decoding does not copy it."""

    @classmethod
    def of(cls, values: np.ndarray) -> Array:
        """Wraps a contiguous array without a copy."""
        # An empty array has no memory to view.
        data = values.reshape(-1).data.cast("B") if values.size else memoryview(b"")
        return cls(str(values.dtype), list(values.shape), data)

    def to_numpy(self) -> np.ndarray:
        """Returns a read-only view."""
        import numpy as np

        values = np.frombuffer(self.data, self.dtype).reshape(self.shape)
        values.flags.writeable = False
        return values


class ForbiddenTexts(Struct, frozen=True):
    """Texts that no sampled token may complete, as an automaton over tokens. State 0 is always
    active. Sampled tokens activate the others."""

    steps: Array
    """[N, 3] int32, sorted: a token, the state in which it is sampled, and the state that
    follows."""
    ends: Array
    """[M, 2] int32, sorted: a state, and a token that must not be sampled in it."""
    silent: Array
    """Packed bits, one per token of the vocabulary. A set bit marks a token without text, which
    changes no state."""
    longest: int
    """Most tokens that a forbidden text can have."""


class SequenceInputs(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Runner inputs of a request, other than its tokens and sampling parameters. The scheduler
    passes them on unread."""

    bad_words: list[list[int]] = field(default_factory=list)
    """Forbidden token sequences: after all but the last token, the last is masked."""
    forbidden_texts: ForbiddenTexts | None = None
    """The request's `bad_words`, compiled to an automaton."""
    forced_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens that are sampled whatever the logits are, by index in the output, from 0 on."""
    logits_processors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments of the plugins' logits processors that apply to the request, by processor name."""
    model_arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Arguments of plugins' parameters that the model reads through its StepPart, by parameter
    name. They are part of the cache keys."""
    pooling: PoolingParams | None = None
    """Set for a pooling request: the prompt is pooled, and the sampling parameters are unused."""
    second_text_start: int | None = None
    """Position of the first token of the second text, if the prompt is a pair of texts. Tokens from
    there on have token type 1, if the model has types."""
    pooling_start: int = 0
    """Position of the first token that is pooled. Earlier tokens, from the checkpoint's prompt, are
    computed but left out of the vector."""
    num_attended: int | None = None
    """Number of leading tokens of an encoder's prompt that all tokens attend to; None: all."""
    parts: dict[str, Raw] = field(default_factory=dict)
    """Data that the front prepared for each part, as msgpack, by part name."""


class DraftRequest(Struct, frozen=True, omit_defaults=True):
    """A request's data for its drafters: `SequenceInputs.parts["drafter"]`."""

    max_draft_tokens: int | None = None
    """Most drafts of a sequence in a step; None: no limit but the drafter's own."""
    scope: str = ""
    """Name of the requests whose tokens may be drafted, such as those of one tenant."""


class CacheKey(Struct, array_like=True, frozen=True):
    """A dependency of the keys and values of tokens [start, end) other than the tokens up to them.
    Examples are a tenant's salt and the hash of an image."""

    start: int
    end: int
    key: str


class EncoderInput(Struct, kw_only=True, frozen=True):
    """Input of an encoder-decoder model's encoder: tokens, features, or both. The encoder reads all
    of it before the decoder begins."""

    num_tokens: int
    """Number of encoder states. Cross attention reads their keys and values."""
    token_ids: list[int] = field(default_factory=list)
    features: Array | None = None
    """Features in place of tokens, for instance of a recording; or of a picture, beside tokens that
    are its places."""

    @classmethod
    def of_tokens(cls, token_ids: list[int]) -> EncoderInput:
        """Makes an input with one state per token."""
        return cls(num_tokens=len(token_ids), token_ids=token_ids)


class PlaceholderRange(Struct, frozen=True):
    """Position of a multimodal item among a prompt's tokens."""

    offset: int
    length: int
    mask: list[bool] | None = None
    """Marks the tokens of the range that the item's embeddings replace; None: all. The other
    tokens, such as row ends, are ordinary ones."""

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Number of the item's embeddings."""
        return self.length if self.mask is None else sum(self.mask)


class MultiModalFeatureSpec(Struct, kw_only=True, frozen=True):
    """One multimodal item of a prompt. Five images are five items. Needs no torch."""

    modality: str
    """The kind of item, such as "image", "video" or "audio"."""
    mm_identifier: str
    """Identifier of the item's content. Equal identifiers have equal data."""
    mm_position: PlaceholderRange
    data: dict[str, Array] | None = None
    """The arrays that the model's encoder reads. Alternatively `embeds` [n, hidden size] alone, the
    encoder's output. None: the engine holds the data."""
    layout: dict[str, list[float]] = field(default_factory=dict)
    """Small values that the positions of the item's tokens depend on, such as a grid of patches."""


class BegunSequence(Struct, frozen=True):
    """Output of a sequence so far, from an engine that has ended. Another engine resumes it as
    after a preemption."""

    token_ids: list[int]
    """Output tokens so far."""
    sampler_state: SamplerState
    """Sampler state that came with the last token of `token_ids`."""
    finish_reason: FinishReason | None
    """Set if the sequence has finished."""


class EngineRequest(Struct, kw_only=True):
    """A request as the engine gets it: tokens only. Preprocessing is complete."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    encoder: EncoderInput | None = None
    """Encoder input of an encoder-decoder model. `prompt_token_ids` are then the decoder's."""
    features: list[MultiModalFeatureSpec] = field(default_factory=list)
    """Multimodal items of the prompt, by offset. They do not overlap."""
    eos_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a sequence unless params.ignore_eos is set."""
    inputs: SequenceInputs = field(default_factory=SequenceInputs)
    max_output_tokens: int = 0
    """Most tokens that each sequence samples, as computed by `RequestLimits.check`."""
    draws_tokens: bool = True
    """False: the request ends with a result of its prompt, such as a pooled vector."""
    chunkable: bool = True
    """The prompt may be computed in several steps."""
    whole_prompt: bool = False
    """Tokens of the prompt see later ones: one step computes all of it."""
    reads_prefix_cache: bool = True
    """The request may begin after a cached prefix."""
    swappable: bool = True
    """The request can be swapped out: its state on the worker is its tokens and blocks."""
    priority: int = 0
    """Smaller values are served first under the policy 'priority'."""
    arrival_time: float = 0.0
    """time.monotonic() at which the front received the request."""
    deadline: float | None = None
    """time.monotonic() at which the request ends with "timeout", running or waiting."""
    cache_keys: list[CacheKey] = field(default_factory=list)
    """Dependencies of keys and values other than tokens. Prefixes with equal ones are shared."""
    context: dict[str, str] = field(default_factory=dict)
    """Values that the caller attached, for events."""
    begun: list[BegunSequence] = field(default_factory=list)
    """Sequences that another engine has begun, by index. At least one is unfinished. Empty for a
    beam search, which starts over."""
    num_prompt_logprobs: int = 0
    """Number of prompt tokens whose log probabilities the earlier engine returned."""


class TokenLogprobs(Struct):
    """Log probabilities of one token, sampled or of the prompt, in the engine's logprobs_mode."""

    token_ids: list[int]
    """The token first, then the likeliest ones in order, or those that the request names."""
    logprobs: list[float]
    rank: int
    """Rank of the token; 1 is the likeliest."""
    ranks: list[int] | None = None
    """Ranks of the alternatives, if the request names them. None: they are the likeliest ones."""


class Candidates(Struct):
    """The likeliest next tokens of one sequence, in order. Log probabilities are taken over the
    tokens that the request allows."""

    token_ids: list[int]
    logprobs: list[float]


class EngineOutput(Struct, kw_only=True):
    """Output of one step for one sequence."""

    request_id: str
    index: int
    """Index of the sequence among the request's n."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One entry per token of `token_ids`, if the request asked for log probabilities."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the next prompt tokens, from the second token on, if asked for."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the sequence, if it is one of params.stop_token_ids."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    num_draft_tokens: int = 0
    """Drafts of the sequence that the step verified."""
    num_accepted_tokens: int = 0
    """Drafts of these that were sampled."""
    drafters: list[tuple[str, int, int]] = []
    """The same by drafter, its name first. Tokens that a grammar forces have none."""
    cumulative_logprob: float | None = None
    """Sum of log probabilities of a beam search's sequence, which is returned as a whole."""
    score: float | None = None
    """Score by which the beam search ranks the sequence."""
    error: str | None = None
    """Error message, if finish_reason is "error"."""
    pooled: Array | None = None
    """Result of a pooling request."""
    sampler_state: SamplerState = field(default_factory=dict)
    """Sampler state to restore if the sequence resumes on another engine."""
    weight_version: str = ""
    """Version of the weights that sampled the tokens; empty: those of the checkpoint."""
    arrays: dict[str, Array] = field(default_factory=dict)
    """Arrays of a sequence that has ended, by name: `Sequence.arrays`."""


class EngineOutputs(Struct, kw_only=True):
    """Outputs of one step, or of one call between steps."""

    time: float
    """time.monotonic() at which the engine made the outputs."""
    outputs: list[EngineOutput] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    """Requests that were scheduled for the first time."""
    events: list[Event] = field(default_factory=list)
    """Events in order; empty if nothing listens."""
    missing: dict[str, list[str]] | None = None
    """Multimodal items that the engine lacks, by id of the request that it rejects for them. They
    came without data, and the engine does not hold them."""


class NewSequence(Struct, kw_only=True):
    """A sequence that the runner does not hold: new, forked, or resumed after a preemption."""

    seq_id: int
    token_ids: list[int]
    """All known tokens: the prompt, then the output so far."""
    num_prompt_tokens: int
    block_tables: list[list[int]]
    """Block ids, per KV group."""
    params: SamplingParams
    seed: int
    """The request's own seed, or a random one."""
    stop_token_ids: list[int]
    """All tokens that end the sequence. They are masked until min_tokens are sampled."""
    inputs: SequenceInputs = field(default_factory=SequenceInputs)
    sampler_state: SamplerState = field(default_factory=dict)
    """Sampler state that was returned with the sequence's last token. Empty before the first."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log probabilities were returned before, and are not computed again."""
    num_candidates: int = 0
    """Number of likeliest tokens that a beam returns; 0 for a sequence that samples a token."""
    encoder_id: int | None = None
    """Id of the encoder sequence whose keys and values cross attention reads."""
    features: list[MultiModalFeatureSpec] = field(default_factory=list)
    """Multimodal items of the prompt, without their data."""


class NewEncoder(Struct, kw_only=True):
    """An encoder sequence that the runner does not hold."""

    encoder_id: int
    """Id from the same range as `seq_id`; no sequence has the same."""
    num_tokens: int
    block_tables: list[list[int]]
    """Block ids, per KV group. Empty except for groups of cross attention."""
    input: EncoderInput | None
    """Input that this step encodes; None: the keys and values are in the blocks."""


class ScheduledSequence(Struct):
    """One row of the flat batch."""

    seq_id: int
    start: int
    """Index of the first token to compute, equal to the number of computed tokens."""
    num_tokens: int
    new_blocks: list[list[int]]
    """Block ids to append to the block table, per KV group. A NewSequence of the same plan has them
    in its block_tables already."""
    samples: bool
    """True if the sequence's last token is computed. The row then samples a next token, or returns
    a beam search's candidates."""
    tokens: list[int] = field(default_factory=list)
    """The tokens to compute, if the workers cannot know them: drafts, and tokens that only the last
    pipeline stage has sampled."""
    num_drafts: int = 0
    """Number of drafts at the end of `tokens`. A worker samples as many tokens as agree with them,
    and one more."""


class BlockCopy(Struct):
    """Copies a block's keys and values, in all layers of a KV group, before the step writes (copy
    on write)."""

    group: int
    source: int
    target: int


class BlockMove(Struct):
    """Replaces an entry of a sequence's block table with a copy that the sequence owns."""

    seq_id: int
    group: int
    index: int
    block: int


TierKey = int | bytes
"""Key of a block in a KV tier: an index of the tier, or the digest of the block's contents."""


class TierBlock(Struct, array_like=True):
    """A block that is transferred between the device and a KV tier."""

    tier: str
    group: int
    key: TierKey
    block: int
    """Block id on the device; -1: none."""


class TierLoad(Struct, array_like=True):
    """Blocks that are loaded together: a prefix of one waiting request."""

    ticket: int
    """Unique number of the load; `StepResult.loads` refers to it."""
    blocks: list[TierBlock]


class TierWork(Struct, kw_only=True):
    """Transfers of a step for KV tiers. They run in this order, before the step writes anything
    else."""

    dropped: list[TierBlock] = field(default_factory=list)
    """Blocks that the tiers may forget."""
    stores: list[TierBlock] = field(default_factory=list)
    """Blocks to copy from the device to their tiers."""
    loads: list[TierLoad] = field(default_factory=list)
    """Loads that begin now. This step and later ones write the blocks that have arrived."""
    loading: list[int] = field(default_factory=list)
    """Tickets of all loads under way, with those of `loads`. Workers give up all other loads."""
    waits: bool = False
    """There is nothing else to do: the step waits a little for a load to end."""


class EncoderItem(Struct):
    """An item of media that a step encodes. Its embeddings stay on the worker until a plan drops
    them."""

    identifier: str
    modality: str
    data: dict[str, Array]


class StepPlan(Struct, kw_only=True, omit_defaults=True):
    """Work of the workers for one step, as planned by the scheduler."""

    dropped_items: list[str] = field(default_factory=list)
    """Multimodal items whose embeddings the runner forgets first. Unknown ones are accepted."""
    encode: list[EncoderItem] = field(default_factory=list)
    """Items to encode next. The step's rows can then read their embeddings."""
    encoders: list[NewEncoder] = field(default_factory=list)
    """Encoder sequences to add before `new`, whose sequences may refer to them."""
    new: list[NewSequence] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Sequences and encoder sequences that the runner forgets first: finished, aborted or
    preempted."""
    after_failure: bool = False
    """The step before failed on some rank, so ranks may hold different state."""
    swap_out: list[BlockCopy] = field(default_factory=list)
    """Copies from the device's pool (source) to the host's (target), before anything else is
    written."""
    swap_in: list[BlockCopy] = field(default_factory=list)
    """Copies from the host's pool (source) to the device's (target), after `swap_out`."""
    tiers: TierWork | None = None
    """Transfers of KV tiers. Their stores run with `swap_out`, and their loads with `swap_in`."""
    copies: list[BlockCopy] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    parts: dict[str, Raw] = field(default_factory=dict)
    """Data from each part's planner for its worker half, as msgpack, by part name."""
    asks_drafters: bool = True
    """Drafters are asked for drafts, which the next step verifies."""
    max_drafts: dict[int, int] = field(default_factory=dict)
    """Most drafts that the next step verifies, by seq_id. Missing: no limit."""

    @property
    def num_tokens(self) -> int:
        total = 0
        for row in self.scheduled:
            total += row.num_tokens
        for encoder in self.encoders:
            total += encoder.num_tokens if encoder.input is not None else 0
        return total


class StepResult(Struct, kw_only=True, omit_defaults=True):
    """Results of a step, in the order of `plan.scheduled`."""

    token_ids: list[list[int]]
    """Sampled tokens per row. Empty for a chunk that ends before the sequence does, and for a beam.
    Otherwise one token, and one more for each draft that it agrees with."""
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    """One entry per sampled token of each row that asked for them; empty if no row did."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """Guesses of the tokens after the sampled ones, by seq_id. The next step verifies them."""
    forced: list[int] = field(default_factory=list)
    """Sequences whose drafts must follow, because a logits processor allows no other tokens."""
    drafters: dict[int, list[tuple[str, int, int]]] = field(default_factory=dict)
    """`EngineOutput.drafters` by seq_id."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Log probabilities of the prompt tokens after the computed ones, by seq_id, if asked for."""
    sampler_state: dict[int, SamplerState] = field(default_factory=dict)
    """Sampler state by seq_id. NewSequence brings it back after a preemption. Only the sampler can
    read it."""
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """Candidates of the rows of beam searches, by seq_id. These rows sample no token."""
    pooled: dict[int, Array] = field(default_factory=dict)
    """Pooled results of sequences whose last token was computed, by seq_id."""
    errors: dict[int, str] = field(default_factory=dict)
    """Error messages of rows that failed alone, for example for NaN logits, by seq_id. Their
    sequences end, and the others continue."""
    num_compilations: int = 0
    """Number of graphs that torch compiled during the step. After the warm-up it should be 0."""
    loads: dict[int, bool] = field(default_factory=dict)
    """Loads that have ended, by ticket: whether all ranks have filled all blocks. A load that fails
    on one rank has failed."""
    parts: dict[str, Raw] = field(default_factory=dict)
    """Answers of each part's worker half to its planner, as msgpack, by part name."""
