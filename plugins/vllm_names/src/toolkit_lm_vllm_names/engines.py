"""LLMEngine and AsyncLLM with vLLM's methods."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable
from functools import cached_property
from typing import Any, Self

import toolkit_lm
from toolkit_lm import PoolingRequestOutput, RequestOutput
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError

from toolkit_lm_vllm_names.absent import SaysWhatToUse
from toolkit_lm_vllm_names.arguments import with_arguments
from toolkit_lm_vllm_names.config_view import ConfigView, ModelView
from toolkit_lm_vllm_names.driver_weights import ModelExecutor
from toolkit_lm_vllm_names.engine_args import EngineArgs
from toolkit_lm_vllm_names.metrics import Metric, counting, snapshot
from toolkit_lm_vllm_names.prompt_embeds import prompt_and_params
from toolkit_lm_vllm_names.sharded_state import EngineCore
from toolkit_lm_vllm_names.sleeping import SleepsAsync
from toolkit_lm_vllm_names.unfinished import OutputProcessor

_VLLMS = (
    *("arrival_time", "trace_headers", "tokenization_kwargs", "data_parallel_rank"),
    *("prompt_text", "reasoning_ended"),
)
_WITHOUT_EFFECT = ("arrival_time", "prompt_text")


def checked(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a request without vLLM's that ask for nothing. Raises RequestError for one that
    asks for what is not here."""
    kept = {}
    for name, value in options.items():
        if name not in _VLLMS:
            kept[name] = value
        elif value is not None and name not in _WITHOUT_EFFECT:
            raise RequestError(f"{name} must be None here.", name)
    return kept


class LLMEngine(toolkit_lm.LLMEngine, SaysWhatToUse):
    """toolkit_lm.LLMEngine, made from EngineArgs."""

    after_step: Callable[[], object] | None = None
    """Called when a step has been computed."""
    model_executor: ModelExecutor
    engine_core: EngineCore
    """The executor of an LLM's engine, for trainers in the same process."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **ignored: object) -> Self:
        """An engine of these options. Raises ToolkitError."""
        return cls(engine_args.create_engine_config(), plugins=counting(engine_args))

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig, **ignored: object) -> Self:
        """An engine of this config. Raises ToolkitError."""
        return cls(vllm_config)

    @property
    def vllm_config(self) -> ConfigView:
        """The resolved config, with vLLM's sections."""
        return ConfigView(self.config)

    @property
    def model_config(self) -> ModelView:
        """The section of the model: max_model_len, hf_config, ..."""
        return ModelView(self.config)

    def add_request(
        self, request_id: str, prompt: Any, params: Any = None, *args: Any, **options: Any
    ) -> None:
        """Queues a prompt. Raises RequestError."""
        options.update(zip(("arrival_time", "lora_request"), args, strict=False))
        if not isinstance(params, toolkit_lm.PoolingParams):
            params = with_arguments(params or self.processor.default_params, self)
            prompt, params = prompt_and_params(prompt, params)
        super().add_request(request_id, prompt, params, **checked(options))

    def advance(self, timeout: float | None = None) -> list[Any]:
        """Computes one step, as toolkit_lm.LLMEngine does."""
        states = super().advance(timeout)
        if self.after_step is not None:
            self.after_step()
        return states

    # mypy: vLLM's says that it has.
    def reset_prefix_cache(  # type: ignore[override]
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets all cached prefixes. Running requests go on with what they have computed, which
        no other request reads."""
        super().reset_prefix_cache()
        return True

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests."""
        self.abort(request_ids)

    def get_num_unfinished_requests(self) -> int:
        """Number of requests that run or wait."""
        return len(self._states)

    def get_tokenizer(self) -> Any:
        """The renderer's tokenizer. Raises UnsupportedError if it has none."""
        return self.renderer.get_tokenizer()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Tasks that the model serves."""
        return self.tasks

    def get_model_config(self) -> ModelView:
        """Alias of `model_config`."""
        return self.model_config

    def get_metrics(self) -> list[Metric]:
        """Figures under vLLM's names. Raises ToolkitError without `disable_log_stats=False`."""
        return snapshot(self.plugins, self.config.served_model_name)

    def do_log_stats(self) -> None:
        """Does nothing: figures are those of `get_metrics`."""


class Encoding:
    """A pooling request's outputs: iterated over as vLLM's, or awaited for the last of them."""

    def __init__(self, outputs: AsyncIterator[PoolingRequestOutput]) -> None:
        self._outputs = outputs

    def __aiter__(self) -> AsyncIterator[PoolingRequestOutput]:
        return self._outputs

    def __await__(self) -> Generator[Any, None, PoolingRequestOutput]:
        return anext(self._outputs).__await__()


class AsyncLLM(SleepsAsync, SaysWhatToUse):
    """toolkit_lm.AsyncLLM, made from EngineArgs."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **ignored: object) -> Self:
        """An engine of these options. Raises ToolkitError."""
        return cls(engine_args.create_engine_config(), plugins=counting(engine_args))

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig, **ignored: object) -> Self:
        """An engine of this config. Raises ToolkitError."""
        return cls(vllm_config)

    @property
    def vllm_config(self) -> ConfigView:
        """The resolved config, with vLLM's sections."""
        return ConfigView(self.config)

    @property
    def model_config(self) -> ModelView:
        """The section of the model: max_model_len, hf_config, ..."""
        return ModelView(self.config)

    def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs as they come, as toolkit_lm.AsyncLLM does."""
        if sampling_params is not None:
            sampling_params = with_arguments(sampling_params, self)
        prompt, sampling_params = prompt_and_params(
            prompt, sampling_params or self.processor.default_params
        )
        request_id = self._new_id() if request_id is None else request_id
        outputs = super().generate(prompt, sampling_params, request_id, **checked(options))
        return self.output_processor.counted(request_id, outputs)

    @cached_property
    def output_processor(self) -> OutputProcessor:
        """Requests of `generate` that have not ended."""
        return OutputProcessor()

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Waits until the requests of `generate` have ended. Raises TimeoutError after so many
        seconds."""
        await self.output_processor.drained(drain_timeout)

    # mypy: what is returned can be awaited, too.
    def encode(  # type: ignore[override]
        self, prompt: Any, pooling_params: Any = None, request_id: str | None = None, **options: Any
    ) -> Encoding:
        """Runs a pooling task. The result is iterated over, or awaited."""

        async def outputs() -> AsyncIterator[PoolingRequestOutput]:
            encode = super(AsyncLLM, self).encode
            yield await encode(prompt, pooling_params, request_id, **checked(options))

        return Encoding(outputs())

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends one request, or several."""
        for single in [request_id] if isinstance(request_id, str) else request_id:
            await super().abort(single)

    # mypy: vLLM's says that it has.
    async def reset_prefix_cache(  # type: ignore[override]
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets all cached prefixes. Running requests go on with what they have computed, which
        no other request reads."""
        await super().reset_prefix_cache()
        return True

    async def reset_mm_cache(self) -> None:
        """Does nothing: media are found by their content, so that none is out of date."""

    async def reset_encoder_cache(self) -> None:
        """Does nothing: new weights drop what encoders have made with the old ones."""

    @property
    def is_running(self) -> bool:
        """Whether the engine lives."""
        return self.error is None

    @property
    def is_stopped(self) -> bool:
        """Whether the engine is dead or closed."""
        return self.error is not None or self.health().status == "closed"

    @property
    def errored(self) -> bool:
        """Whether the engine has died."""
        return self.error is not None

    @property
    def dead_error(self) -> BaseException | None:
        """The error with which the engine died."""
        return self.error

    async def check_health(self) -> None:
        """Raises the error with which the engine died."""
        if self.error is not None:
            raise self.error

    async def get_tokenizer(self) -> Any:
        """The renderer's tokenizer. Raises UnsupportedError if it has none."""
        return self.renderer.get_tokenizer()

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Tasks that the model serves."""
        await self.wait_ready()
        return self.tasks

    async def get_model_config(self) -> ModelView:
        """Alias of `model_config`."""
        return self.model_config

    async def do_log_stats(self) -> None:
        """Does nothing: figures are those of the server."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Alias of `close`."""
        self.close()


EngineClient = AsyncLLM
