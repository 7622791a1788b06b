"""LLM with vLLM's methods."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from toolkit_lm import PoolingRequestOutput, RequestOutput
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.prompts import Prompt, each_of, listed

from toolkit_lm_vllm_names.absent import SaysWhatToUse
from toolkit_lm_vllm_names.arguments import with_arguments
from toolkit_lm_vllm_names.beam_search import BeamSearchOutput, BeamSearchParams
from toolkit_lm_vllm_names.config_view import ModelView
from toolkit_lm_vllm_names.driver_weights import ModelExecutor
from toolkit_lm_vllm_names.engine_args import EngineArgs
from toolkit_lm_vllm_names.engines import LLMEngine, checked
from toolkit_lm_vllm_names.metrics import Metric, figures, snapshot
from toolkit_lm_vllm_names.pairs import pair_prompts
from toolkit_lm_vllm_names.profiling import Profiler
from toolkit_lm_vllm_names.prompt_embeds import with_embeds
from toolkit_lm_vllm_names.seeds import Seeds
from toolkit_lm_vllm_names.sharded_state import EngineCore
from toolkit_lm_vllm_names.sleeping import Sleeps
from toolkit_lm_vllm_names.table import engine_options

_OF_CHAT = ("use_tqdm", "lora_request")
"""Arguments of `chat` after the sampling parameters, by their places."""
_AS_THE_TEMPLATE = ("chat_template_content_format",)


class LLM(Sleeps, SaysWhatToUse):
    """toolkit_lm.LLM with vLLM's methods. A type checker takes vLLM's options."""

    engine_class = LLMEngine

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Takes options by vLLM's names or ours, otherwise like toolkit_lm.LLM. Raises
        ToolkitError."""
        profiler = options.pop("profiler_config", None) or {}
        if not isinstance(profiler, Mapping):
            profiler = vars(profiler)
        self._profiler = Profiler(profiler)
        if options.get("disable_log_stats") is False:
            options["plugins"] = [*options.get("plugins", ()), *figures()]
        self._chat_template = options.pop("chat_template", None)
        self._queued: list[str] = []
        # Values that vLLM spells otherwise are translated, too: generation_config="vllm".
        named = options if model is None else {"model": model, **options}
        super().__init__(**engine_options(named))
        assert isinstance(self.engine, LLMEngine), "engine_class makes it"
        self.engine.after_step = self._profiler.after_step
        self.engine.model_executor = ModelExecutor(self, self.stage_weights)
        self.engine.engine_core = EngineCore(self)
        self._seeds = Seeds(self.config.model.seed)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An LLM of these options. Raises ToolkitError."""
        stated = {name: value for name, value in vars(engine_args).items() if value is not None}
        return cls(**stated)

    # The engine, as vLLM tells of it.

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """Tasks that the model serves."""
        return self.engine.tasks

    @property
    def model_config(self) -> ModelView:
        """The section of the model: max_model_len, hf_config, ..."""
        return ModelView(self.config)

    @property
    def runner_type(self) -> str:
        """ "generate" or "pooling"."""
        return "generate" if "generate" in self.engine.tasks else "pooling"

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of workers; without `include_dp`, those of one engine."""
        parallel = self.config.parallel
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return size * (parallel.data_parallel_size if include_dp else 1)

    def get_metrics(self) -> list[Metric]:
        """Figures under vLLM's names. Raises ToolkitError without `disable_log_stats=False`."""
        return snapshot(self.engine.plugins, self.config.served_model_name)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Result of a function of the model, a torch module. The model is in this process: raises
        UnsupportedError where it is in another."""
        executor = getattr(getattr(self.engine.client, "core", None), "executor", None)
        runner = getattr(executor, "runner", None)
        if runner is None:
            raise UnsupportedError(
                "apply_model calls a function on a model in this process: make the engine with one "
                "worker, and without engine_process; or name a class by worker_extension_cls, and "
                "call its methods by collective_rpc."
            )
        with self._lock:
            self._check_idle()
            return [func(runner.model)]

    # Requests.

    def generate(
        self, prompts: Any, sampling_params: Any = None, *args: Any, **options: Any
    ) -> list[RequestOutput]:
        """Completes prompts, as toolkit_lm.LLM does."""
        options.update(zip(("use_tqdm", "lora_request"), args, strict=False))
        self._finish_weights()
        many: Any = list(prompts) if isinstance(prompts, tuple) else listed(prompts)
        params = self._seeds.seeded(self._params_of(sampling_params), len(many))
        many, params = with_embeds(many, params)
        return super().generate(many, params, **_options(options))

    def chat(
        self, messages: Any, sampling_params: Any = None, *args: Any, **options: Any
    ) -> list[RequestOutput]:
        """Answers conversations, as toolkit_lm.LLM does."""
        options.update(zip(_OF_CHAT, args, strict=False))
        if self._chat_template is not None:
            options.setdefault("chat_template", self._chat_template)
        for name in _AS_THE_TEMPLATE:
            options.pop(name, None)
        self._finish_weights()
        is_one = not messages or isinstance(messages[0], Mapping)
        count = 1 if is_one else len(messages)
        params = self._seeds.seeded(self._params_of(sampling_params), count)
        return super().chat(messages, params, **_options(options))

    def score(
        self,
        data_1: Any,
        data_2: Any,
        pooling_params: Any = None,
        *,
        chat_template: str | None = None,
        **options: Any,
    ) -> list[PoolingRequestOutput]:
        """Scores pairs of texts, as toolkit_lm.LLM does. `chat_template`: the prompt of a
        cross-encoder, in which a pair is two messages of the roles "query" and "document"."""
        kept = _options(options)
        if chat_template is None:
            return super().score(data_1, data_2, pooling_params, **kept)
        prompts = pair_prompts(data_1, data_2, chat_template, self.engine)
        return self.encode(prompts, pooling_params, pooling_task="classify", **kept)

    def encode(
        self, prompts: Any, pooling_params: Any = None, *args: Any, **options: Any
    ) -> list[PoolingRequestOutput]:
        """Runs a pooling task of the model, as toolkit_lm.LLM does."""
        options.update(zip(("use_tqdm", "lora_request"), args, strict=False))
        from toolkit_lm_vllm_names.tensors import as_tensors

        self._finish_weights()
        return as_tensors(super().encode(prompts, pooling_params, **_options(options)))

    def _params_of(self, params: Any) -> Any:
        """Sampling parameters, with the arguments of logits processors of vLLM's form."""
        if isinstance(params, list | tuple):
            return [with_arguments(entry, self.engine) for entry in params]
        return with_arguments(params or self.engine.processor.default_params, self.engine)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, **options: Any
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences of each prompt. `options` are those of `generate`."""
        options.pop("concurrency_limit", None)
        outputs = self.generate(prompts, params.sampling_params(), **options)
        return [params.result(output) for output in outputs]

    def enqueue(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Any = None, **options: Any
    ) -> list[str]:
        """Queues prompts for `wait_for_completion`, and returns the requests' ids. Raises
        RequestError; then none is queued."""
        self._finish_weights()
        many: list[Any] = listed(prompts)
        params = self._seeds.seeded(
            sampling_params or self.get_default_sampling_params(), len(many)
        )
        kept = {name: value for name, value in checked(options).items() if name != "use_tqdm"}
        queued: list[str] = []
        try:
            each = each_of(params, "sampling_params", len(many))
            for prompt, entry in zip(many, each, strict=True):
                request_id = f"queued-{uuid.uuid4().hex}"
                self.engine.add_request(request_id, prompt, entry, **kept)
                queued.append(request_id)
        except BaseException:
            self.engine.abort(queued)
            raise
        self._queued += queued
        return queued

    def wait_for_completion(
        self, output_type: object = None, *, use_tqdm: object = True
    ) -> list[RequestOutput | PoolingRequestOutput]:
        """Outputs of all queued requests, in their order."""
        done: dict[str, RequestOutput | PoolingRequestOutput] = {}
        while self.engine.has_unfinished_requests():
            found = self.engine.step()
            done |= {output.request_id: output for output in found if output.finished}
        queued, self._queued = self._queued, []
        return [done[request_id] for request_id in queued if request_id in done]

    # The cache, and profiles.

    # mypy: vLLM's says that it has.
    def reset_prefix_cache(  # type: ignore[override]
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forgets all cached prefixes. Between calls no request runs."""
        self._finish_weights()
        super().reset_prefix_cache()
        return True

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begins a trace of PyTorch's profiler. Raises UnsupportedError where the engine is in
        another process."""
        if self.config.engine.engine_process or self.get_world_size() > 1:
            raise UnsupportedError(
                "a profile is of this process: make the engine with one worker, and without "
                "engine_process."
            )
        self._profiler.start(profile_prefix)

    def stop_profile(self) -> None:
        """Ends the trace, and writes it."""
        self._profiler.stop()


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a call. For a bar that vLLM is given as a function, there is ours."""
    kept = checked(options)
    return kept | {"use_tqdm": bool(kept["use_tqdm"])} if "use_tqdm" in kept else kept
