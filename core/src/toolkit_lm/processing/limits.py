"""Limits of the requests that an engine can serve at all, whatever its load."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import PoolingTask, Task, way_to_serve
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.messages import EngineRequest, PoolingRules

_CUT = "Please reduce the length of the input prompt, or have it cut: truncate_prompt_tokens."


class RequestLimits:
    """Bounds of requests. Thread-safe. The front checks them, and the engine relies on that."""

    def __init__(
        self,
        config: VllmConfig,
        kv_cache: KVCacheConfig,
        pooling: Mapping[PoolingTask, PoolingRules] = MappingProxyType({}),
        *,
        whole_items: bool = False,
    ) -> None:
        """`pooling`: the pooling tasks that the model serves. `whole_items`: a step computes all
        tokens of a multimodal item, or none."""
        self.generates = config.model.runner != "pooling"
        self.pooling = pooling
        self.max_model_len = config.max_model_len
        self.max_encoder_len = config.max_encoder_len
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.max_num_batched_tokens = config.scheduler.token_budget
        self.chunked = config.scheduler.enable_chunked_prefill is not False
        self.whole_items = whole_items
        self._forks_anywhere = all(group.spec.forks_anywhere for group in kv_cache.groups)
        self.most_embeds = config.encoder_cache_embeds
        self.kv_cache = kv_cache
        self._one_fits = (
            self._too_many_blocks(self.max_model_len, 1, 1, self.max_encoder_len) is None
        )
        """A single sequence of any length fits, so its blocks need not be counted."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Tasks that the model serves."""
        generates: tuple[Task, ...] = ("generate",) if self.generates else ()
        return (*generates, *self.pooling)

    def check(self, message: EngineRequest) -> int:
        """Returns the `max_output_tokens` of a request. Raises RequestError if it could never be
        served."""
        prompt = len(message.prompt_token_ids)
        params = message.params
        if prompt == 0:
            raise RequestError("the prompt is empty: it needs at least one token.", "prompt")
        encoded = message.encoder.num_tokens if message.encoder is not None else 0
        if message.encoder is not None and encoded == 0:
            raise RequestError(
                "the encoder prompt is empty: it needs at least one token.", "prompt"
            )
        if encoded > self.max_encoder_len:
            raise ContextLengthError(
                f"the encoder prompt has {encoded} tokens; this model's maximum context length "
                f"is {self.max_encoder_len} tokens for its "
                f"encoder (max_encoder_len). {_CUT}",
                "prompt",
            )
        if message.features:
            self._check_items(message, encoded)
        if message.inputs.pooling is not None:
            return self._check_pooling(
                message.inputs.pooling.task, prompt, message.inputs.pooling_start
            )
        if not self.generates:
            raise RequestError(f"this model generates no text. Supported: {self._served}.", "task")
        # The last token is sampled and left out: it is never stored.
        room = self.max_model_len - prompt + (params.max_tokens == 0)
        if room < 1:
            raise ContextLengthError(
                f"{self._too_long(prompt)}, output included. Please reduce the length of the "
                "input prompt.",
                "prompt",
            )
        max_tokens = room if params.max_tokens is None else min(max(params.max_tokens, 1), room)
        if params.min_tokens > max_tokens:
            left = f"after a prompt of {prompt} tokens max_model_len leaves room for {max_tokens}"
            raise RequestError(f"min_tokens is {params.min_tokens}, but {left}.", "min_tokens")
        param, width = params.widest
        if width > self.max_num_seqs:
            raise RequestError(
                f"{param} is {width}, but a step holds at most {self.max_num_seqs} sequences "
                "(max_num_seqs).",
                param,
            )
        if width == 1 and self._one_fits:
            return max_tokens
        if (excess := self._too_many_blocks(prompt, max_tokens, width, encoded)) is not None:
            raise RequestError(
                f"{width} sequences of up to {prompt + max_tokens} tokens take {excess}: lower "
                f"{param} or max_tokens.",
                param if width > 1 else "max_tokens",
            )
        return max_tokens

    def rules(self, task: PoolingTask) -> PoolingRules:
        """The rules of a pooling task. Raises RequestError if the model does not serve it."""
        if task not in self.pooling:
            way_out = f" {way_to_serve(task)}" if self.generates else ""
            raise RequestError(
                f"Unsupported task: {task!r}. Supported: {self._served}.{way_out}", "task"
            )
        return self.pooling[task]

    def _check_items(self, message: EngineRequest, encoded: int) -> None:
        """Checks the multimodal items. `encoded`: tokens of the encoder, which the same step may
        compute."""
        features = message.features
        for number, feature in enumerate(features, 1):
            item = f"item {number} of the prompt ({feature.modality})"
            place = feature.mm_position
            length = len(message.prompt_token_ids) if message.whole_prompt else place.length
            if place.num_embeds > self.most_embeds:
                held = f"the encoder cache holds {self.most_embeds} (encoder_cache_memory)"
                raise ContextLengthError(
                    f"{item} takes {place.num_embeds} embeddings, and {held}. Make it smaller.",
                    "prompt",
                )
            if self.whole_items and length + encoded > self.max_num_batched_tokens:
                encoder_share = f" beside the encoder's {encoded}" if encoded else ""
                limit = (
                    f"the model needs them all in one step{encoder_share}, which takes "
                    f"{self.max_num_batched_tokens} (max_num_batched_tokens)"
                )
                raise ContextLengthError(
                    f"{item} has {length} tokens, and {limit}. Make it smaller.", "prompt"
                )
        sizes = {feature.mm_identifier: feature.mm_position.num_embeds for feature in features}
        if not self.chunked and (total := sum(sizes.values())) > self.most_embeds:
            held = (
                "without chunked prefill the encoder cache must hold all, and has room for "
                f"{self.most_embeds} (encoder_cache_memory)"
            )
            raise ContextLengthError(
                f"the {len(features)} items of the prompt take {total} embeddings; {held}. Give "
                "fewer.",
                "prompt",
            )
        if (
            features[-1].mm_position.end == len(message.prompt_token_ids)
            and message.params.widest[1] > 1
            and self.whole_items
            and not self._forks_anywhere
        ):
            raise RequestError(
                "a prompt whose last token is of an item of media has one output: add text after "
                "it.",
                "n",
            )

    @property
    def _served(self) -> str:
        return ", ".join(self.pooling) or "generate"

    def _check_pooling(self, task: PoolingTask, prompt: int, start: int) -> int:
        """Checks a pooling request. Returns 0: it has no output tokens."""
        rules = self.rules(task)
        if start >= prompt:
            raise RequestError(
                f"none of the {prompt} tokens is left to pool: {start} belong to the "
                "checkpoint's prompt, which pooling leaves out "
                "(include_prompt: false). Give a longer text, or allow more tokens.",
                "prompt",
            )
        if prompt > self.max_model_len:
            raise ContextLengthError(f"{self._too_long(prompt)}. {_CUT}", "prompt")
        if not rules.chunkable and prompt > self.max_num_batched_tokens:
            limit = (
                f"{task} needs them all in one step, which takes {self.max_num_batched_tokens} "
                "(max_num_batched_tokens)"
            )
            raise ContextLengthError(f"the prompt has {prompt} tokens; {limit}. {_CUT}", "prompt")
        if (excess := self._too_many_blocks(prompt, 1, 1, 0)) is not None:
            raise RequestError(f"a prompt of {prompt} tokens takes {excess}.", "prompt")
        return 0

    def _too_long(self, prompt: int) -> str:
        """Error message for a long prompt. Clients look for "maximum context length"."""
        return (
            f"the prompt has {prompt} tokens; this model's maximum context length is "
            f"{self.max_model_len} tokens (max_model_len)"
        )

    def _too_many_blocks(self, prompt: int, max_tokens: int, n: int, encoded: int) -> str | None:
        """Error message if a request can come to own more blocks than exist; otherwise None. The
        last output token is never stored."""
        num_tokens = prompt + max_tokens - 1
        needed = [0] * len(self.kv_cache.pools)
        for group in self.kv_cache.groups:
            if group.spec.of_encoder:
                needed[group.pool] += group.spec.max_blocks(encoded, encoded)
                continue
            each = group.spec.max_blocks(num_tokens, self.max_num_batched_tokens)
            shared = (
                (prompt - 1) // group.spec.block_size
                if n > 1 and each == group.spec.num_blocks(num_tokens)
                else 0
            )
            needed[group.pool] += shared + n * (each - shared)
        for count, pool in zip(needed, self.kv_cache.pools, strict=True):
            if count > pool.num_blocks:
                return f"{count} KV cache blocks, but there are {pool.num_blocks}"
        return None
