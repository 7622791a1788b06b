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
"""By logits processor, what it keeps of a sequence from draw to draw."""


class PoolingRules(Struct, frozen=True):
    """What a model allows the scheduler to do with a task's prompts."""

    chunkable: bool
    """They may be computed in several steps."""
    reads_prefix_cache: bool
    """They may begin after a cached prefix."""
    size: int | None
    """Of the last axis of its results; None: not known."""


class Array(Struct, frozen=True):
    """A tensor on its way between processes: C order, little-endian."""

    dtype: str
    """numpy's name of it, such as "float32"."""
    shape: list[int]
    data: memoryview
    """A view of the tensor's own memory, or of the message's: it is not copied on the way in."""

    @classmethod
    def of(cls, values: np.ndarray) -> Array:
        """Of a contiguous array."""
        # An empty array has no memory to look at.
        data = values.reshape(-1).data.cast("B") if values.size else memoryview(b"")
        return cls(str(values.dtype), list(values.shape), data)

    def to_numpy(self) -> np.ndarray:
        """A view, read-only."""
        import numpy as np

        values = np.frombuffer(self.data, self.dtype).reshape(self.shape)
        values.flags.writeable = False
        return values


class ForbiddenTexts(Struct, frozen=True):
    """Texts that no drawn token may complete, as an automaton over tokens. State 0 is always
    active; others follow from drawn tokens."""

    steps: Array
    """[N, 3] int32, in order: a token, a state that it is drawn in, and the state that follows."""
    ends: Array
    """[M, 2] int32, in order: a state, and a token that is not to be drawn in it."""
    silent: Array
    """Packed bits, one for each token of the vocabulary: tokens without text, which change no
    state."""
    longest: int
    """Most tokens that one of the texts can have."""


class SequenceInputs(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the runner needs of a request beside its tokens and parameters. The scheduler carries
    it, and never reads it."""

    bad_words: list[list[int]] = field(default_factory=list)
    """Sequences of tokens of which the last is not to be drawn after the others."""
    forbidden_texts: ForbiddenTexts | None = None
    """What the request's own bad_words are."""
    forced_tokens: dict[int, int] = field(default_factory=dict)
    """By place in the output, from 0 on, the token that is drawn there whatever the logits are."""
    logits_processors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, the arguments of the plugins' logits processors that are applied."""
    model_arguments: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By name, the arguments of plugins' parameters that the model reads, by its StepPart. They
    are in the cache keys."""
    pooling: PoolingParams | None = None
    """Set: the prompt is pooled, and the sampling parameters have no meaning."""
    second_text_start: int | None = None
    """Of a pair of texts: the position of the first token of the second (token type 1, where the
    model has types)."""
    pooling_start: int = 0
    """Position of the first token that is pooled. Those before, of the checkpoint's prompt, are
    read and left out of the vector."""
    num_attended: int | None = None
    """Of an encoder's prompt: only so many tokens, from the first on, are seen, by all of them;
    None: all."""
    parts: dict[str, Raw] = field(default_factory=dict)
    """By name, what the front has prepared of the request for the part, in msgpack."""


class CacheKey(Struct, array_like=True, frozen=True):
    """What keys and values of tokens [start, end) depend on beside the tokens up to them: a
    tenant's salt, the hash of a picture."""

    start: int
    end: int
    key: str


class EncoderInput(Struct, kw_only=True, frozen=True):
    """What the encoder of an encoder-decoder model reads, as a whole, before its decoder begins:
    tokens, or features."""

    num_tokens: int
    """States that it makes of it, whose keys and values cross attention reads."""
    token_ids: list[int] = field(default_factory=list)
    features: Array | None = None
    """Of a recording, say."""

    @classmethod
    def of_tokens(cls, token_ids: list[int]) -> EncoderInput:
        """One state for each."""
        return cls(num_tokens=len(token_ids), token_ids=token_ids)


class PlaceholderRange(Struct, frozen=True):
    """Where an item of media stands among a prompt's tokens."""

    offset: int
    length: int
    mask: list[bool] | None = None
    """Which of its tokens the item's embeddings replace; None: all. The others, such as ends of
    rows, are tokens like any."""

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Embeddings of the item."""
        return self.length if self.mask is None else sum(self.mask)


class MultiModalFeatureSpec(Struct, kw_only=True, frozen=True):
    """One item of media in a prompt: five images are five of them. Needs no torch."""

    modality: str
    """Such as "image", "video", "audio"."""
    mm_identifier: str
    """Of its content: equal ones have equal data, whoever sent them."""
    mm_position: PlaceholderRange
    data: dict[str, Array] | None = None
    """The arrays that the model's encoder reads; or `embeds` [n, hidden size] alone, what it would
    give. None: the engine holds them."""
    layout: dict[str, list[float]] = field(default_factory=dict)
    """Small facts that the positions of its tokens depend on, such as a grid of patches."""


class BegunSequence(Struct, frozen=True):
    """What a sequence has had of an engine that has ended. It goes on from there, as after a
    preemption."""

    token_ids: list[int]
    """Its output."""
    sampler_state: SamplerState
    """What came with the last of them."""
    finish_reason: FinishReason | None
    """Set: it has ended."""


class EngineRequest(Struct, kw_only=True):
    """Tokens in. All preparation of input has ended: no text from here on."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    encoder: EncoderInput | None = None
    """Of an encoder-decoder model; `prompt_token_ids` are then the decoder's."""
    features: list[MultiModalFeatureSpec] = field(default_factory=list)
    """By offset; none overlap."""
    eos_token_ids: list[int] = field(default_factory=list)
    """End a sequence unless params.ignore_eos."""
    inputs: SequenceInputs = field(default_factory=SequenceInputs)
    max_output_tokens: int = 0
    """Most tokens that each sequence draws, as `RequestLimits.check` gave it."""
    draws_tokens: bool = True
    """False: it ends with a result of its prompt."""
    chunkable: bool = True
    """Its prompt may be computed in several steps."""
    reads_prefix_cache: bool = True
    """It may begin after a cached prefix."""
    swappable: bool = True
    """Nothing but its tokens and its blocks is lost when it leaves the batch."""
    priority: int = 0
    """Smaller is served first, under the policy 'priority'."""
    arrival_time: float = 0.0
    """time.monotonic() of the front."""
    deadline: float | None = None
    """time.monotonic() at which it ends with "timeout", wherever it is."""
    cache_keys: list[CacheKey] = field(default_factory=list)
    """What else decides on the prompt's keys and values. Requests share no cached prefix that goes
    beyond a place where they differ."""
    context: dict[str, str] = field(default_factory=dict)
    """For events: what the caller attached."""
    begun: list[BegunSequence] = field(default_factory=list)
    """By index, its sequences, where another engine has begun it. Not all of them have ended. None
    of a beam search, which begins anew."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log probabilities that engine gave."""


class TokenLogprobs(Struct):
    """Log probabilities of one token, sampled or of the prompt.

    Natural logarithms of the model's own distribution, before any sampling parameter.
    """

    token_ids: list[int]
    """The token, then the others: the likeliest ones in order, or those that the request names."""
    logprobs: list[float]
    rank: int
    """Rank of the token, 1 for the likeliest."""
    ranks: list[int] | None = None
    """Of the others, where the request names them. None: they are the likeliest ones."""


class Candidates(Struct):
    """The likeliest next tokens of one sequence, in order. Log probabilities are those of the
    tokens that the request allows."""

    token_ids: list[int]
    logprobs: list[float]


class EngineOutput(Struct, kw_only=True):
    """Tokens out: what one step gave to one sequence."""

    request_id: str
    index: int
    """Which of the request's n sequences."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One per token of token_ids, where the request asked for them."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's next tokens, from its second token on, where the request asked for them."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the sequence, when one of params.stop_token_ids did."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the cache."""
    cumulative_logprob: float | None = None
    """Of a sequence that a beam search has found: it comes whole."""
    score: float | None = None
    """What the beam search ranks it by."""
    error: str | None = None
    """What went wrong, when finish_reason is "error"."""
    pooled: Array | None = None
    """A pooling request's result."""
    sampler_state: SamplerState = field(default_factory=dict)
    """What the sampler is to have back, should the sequence go on elsewhere."""


class EngineOutputs(Struct, kw_only=True):
    """What one step, or one call between steps, gave."""

    time: float
    """time.monotonic() at which the engine gave it."""
    outputs: list[EngineOutput] = field(default_factory=list)
    admitted: list[str] = field(default_factory=list)
    """Requests that left the queue for the batch, for the first time."""
    events: list[Event] = field(default_factory=list)
    """In order; empty when nobody listens."""
    missing: dict[str, list[str]] | None = None
    """By request, which it does not take, items of media: it was sent none of their data, and does
    not hold it."""


class NewSequence(Struct, kw_only=True):
    """A sequence that the runner does not hold: admitted now, forked, or back from a preemption."""

    seq_id: int
    token_ids: list[int]
    """All known tokens: the prompt, then the output so far."""
    num_prompt_tokens: int
    block_tables: list[list[int]]
    """Per KV group, the ids of its blocks."""
    params: SamplingParams
    seed: int
    """Resolved: the request's own, or one drawn for it."""
    stop_token_ids: list[int]
    """All tokens that end it; they are kept from being drawn while fewer than min_tokens are
    out."""
    inputs: SequenceInputs = field(default_factory=SequenceInputs)
    sampler_state: SamplerState = field(default_factory=dict)
    """What the sampler returned with the sequence's last token. Empty before the first."""
    num_prompt_logprobs: int = 0
    """Prompt tokens whose log probabilities were returned before: they are not computed again."""
    num_candidates: int = 0
    """Of a beam: how many of the likeliest tokens are returned where others draw one."""
    encoder_id: int | None = None
    """The encoder sequence whose keys and values its cross attention reads."""
    features: list[MultiModalFeatureSpec] = field(default_factory=list)
    """The items of media in its prompt, without their data."""


class NewEncoder(Struct, kw_only=True):
    """An encoder sequence that the runner does not hold."""

    encoder_id: int
    """Of the same numbers as `seq_id`."""
    num_tokens: int
    block_tables: list[list[int]]
    """Per KV group; empty but for those of cross attention."""
    input: EncoderInput | None
    """What this step is to compute; None: its keys and values are in its blocks."""


class ScheduledSequence(Struct):
    """One row of the flat batch."""

    seq_id: int
    start: int
    """The first token to compute now: so many are computed already."""
    num_tokens: int
    new_blocks: list[list[int]]
    """Per KV group, block ids to append to the table; for a NewSequence of the same plan these are
    in its block_tables already."""
    samples: bool
    """True when the sequence's last token is among these: a next token is drawn, or a beam search's
    candidates are returned."""
    tokens: list[int] = field(default_factory=list)
    """The tokens to compute, where workers cannot know them: the last pipeline stage alone has
    drawn them, or they are drafts."""
    num_drafts: int = 0
    """How many of `tokens`, at their end, are drafts. A worker draws as many tokens as agree with
    them, and one more."""


class BlockCopy(Struct):
    """Copy a block's keys and values, in all layers of a KV group, before the step writes (copy on
    write)."""

    group: int
    source: int
    target: int


class BlockMove(Struct):
    """Replace an entry of a sequence's block table: it now owns a copy."""

    seq_id: int
    group: int
    index: int
    block: int


TierKey = int | bytes
"""Under which a KV tier keeps a block: a place that it has for it, or the digest of its
contents."""


class TierBlock(Struct, array_like=True):
    """A block on its way between the device and a KV tier."""

    tier: str
    group: int
    key: TierKey
    block: int
    """On the device; -1: on none."""


class TierLoad(Struct, array_like=True):
    """Blocks that are filled together: a prefix of a request that waits for them."""

    ticket: int
    """A number of its own, which `StepResult.loads` names it by."""
    blocks: list[TierBlock]


class TierWork(Struct, kw_only=True):
    """What a step does for KV tiers, in this order, before it writes anything else."""

    cancelled: list[int] = field(default_factory=list)
    """Tickets of loads that write nothing from now on. Those that have ended are no error."""
    dropped: list[TierBlock] = field(default_factory=list)
    """What tiers may forget."""
    stores: list[TierBlock] = field(default_factory=list)
    """From the device to their tiers."""
    loads: list[TierLoad] = field(default_factory=list)
    """Begin now. This step and later ones write what has come."""
    waits: bool = False
    """There is nothing else to do: the step waits a little for a load to end."""


class EncoderItem(Struct):
    """An item of media that a step encodes. Its embeddings stay on the worker until a plan drops
    them."""

    identifier: str
    modality: str
    data: dict[str, Array]


class StepPlan(Struct, kw_only=True, omit_defaults=True):
    """What the scheduler tells the workers to do in one step."""

    dropped_items: list[str] = field(default_factory=list)
    """Items of media whose embeddings the runner forgets first. Unknown ones are no error."""
    encode: list[EncoderItem] = field(default_factory=list)
    """Next: what the step's rows read of them is there then."""
    encoders: list[NewEncoder] = field(default_factory=list)
    """Before `new`, whose sequences may name them."""
    new: list[NewSequence] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    """Sequences and encoder sequences that the runner forgets first: finished, aborted or
    preempted."""
    after_failure: bool = False
    """The step before it has failed on some rank: ranks may differ in what they still have."""
    swap_out: list[BlockCopy] = field(default_factory=list)
    """From the device's pool (source) to the host's (target), before anything else is written."""
    swap_in: list[BlockCopy] = field(default_factory=list)
    """From the host's pool (source) to the device's (target), next."""
    tiers: TierWork | None = None
    """Around them: what goes out goes before what comes in."""
    copies: list[BlockCopy] = field(default_factory=list)
    moves: list[BlockMove] = field(default_factory=list)
    parts: dict[str, Raw] = field(default_factory=dict)
    """By name, what its planner tells the part, in msgpack."""

    @property
    def num_tokens(self) -> int:
        total = 0
        for row in self.scheduled:
            total += row.num_tokens
        for encoder in self.encoders:
            total += encoder.num_tokens if encoder.input is not None else 0
        return total


class StepResult(Struct, kw_only=True, omit_defaults=True):
    """What came of a step, in the order of `plan.scheduled`."""

    token_ids: list[list[int]]
    """Per row, the drawn tokens: none for a chunk that ends before the sequence does, nor for a
    beam; else one, and one more for each draft that it agrees with.
    """
    logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    """Per row, one for each drawn token where the row asked for them; empty when no row did."""
    drafts: dict[int, list[int]] = field(default_factory=dict)
    """By seq_id, guesses at the tokens after the drawn ones, for the next step to verify."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """By seq_id, of the prompt tokens that follow the computed ones, where the request asked for
    them."""
    sampler_state: dict[int, SamplerState] = field(default_factory=dict)
    """By seq_id, what NewSequence is to bring back after a preemption. Only the sampler knows what
    it means."""
    candidates: dict[int, Candidates] = field(default_factory=dict)
    """By seq_id, of the rows of beam searches. They draw no token."""
    pooled: dict[int, Array] = field(default_factory=dict)
    """By seq_id, of the pooling sequences whose last token was computed."""
    errors: dict[int, str] = field(default_factory=dict)
    """By seq_id, rows that failed alone (for example NaN logits): their sequence ends, the others
    go on."""
    num_compilations: int = 0
    """Graphs that torch compiled meanwhile. After the warm-up there should be none."""
    loads: dict[int, str] = field(default_factory=dict)
    """By ticket, the loads that have ended: "", or why not all of their blocks are filled."""
    parts: dict[str, Raw] = field(default_factory=dict)
    """By name, what the part answers its planner, in msgpack."""
