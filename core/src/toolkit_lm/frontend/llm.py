"""LLM: the offline face. The same loop as the server's, driven until all requests have finished."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any, Unpack

from toolkit_lm.config import LLMOptions, PluginsConfig, VllmConfig, load_options
from toolkit_lm.errors import ConfigError, RequestError, ToolkitError
from toolkit_lm.frontend.calls import Answer
from toolkit_lm.frontend.llm_engine import LLMEngine
from toolkit_lm.frontend.pooling_mixin import NoOptions, PoolingMixin, Progress, check_names
from toolkit_lm.outputs import RequestOutput
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.requests import PreparedRequest, RequestOptions
from toolkit_lm.prompts import Conversation, Prompt, each_of, listed
from toolkit_lm.renderer import ConversationOptions
from toolkit_lm.resolution.no_effect import without_effect_offline

logger = logging.getLogger(__name__)


class LLM(PoolingMixin):
    """Generates for whole lists of prompts.

    llm = LLM(model="tiny")
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)
    """

    engine_class = LLMEngine

    def __init__(
        self,
        model: str | None = None,
        *,
        config: VllmConfig | None = None,
        plugins: Plugins | Sequence[object] | Sequence[str] = (),
        **options: Unpack[LLMOptions],
    ) -> None:
        """Loads a model: in this process, unless the option `engine_process` is True.

        `options` are those of VllmConfig, by name; TOOLKIT_LM_* variables supply the others. A type
        checker knows these names. Other projects' names, and options that must not be type-checked,
        come from a dict[str, Any]: `LLM("tiny", **options)`.

        `config` replaces all of these. `plugins` are names of installed plugins to load, or plugin
        objects from code, or loaded Plugins. Raises ToolkitError.
        """
        arguments: dict[str, Any] = {**options} if model is None else {"model": model, **options}
        if (
            not isinstance(plugins, Plugins)
            and plugins
            and all(isinstance(p, str) for p in plugins)
        ):
            arguments["plugins"], plugins = list(plugins), ()
        if config is not None and arguments:
            raise ConfigError(f"give either config or options, not both: {', '.join(arguments)}.")
        if config is None:
            try:
                config = _config_of(arguments)
            except ConfigError:
                # vLLM's option names are tried only if ours fail.
                own = {
                    name: arguments[name]
                    for name in PluginsConfig.__struct_fields__
                    if name in arguments
                }
                loaded = (
                    plugins
                    if isinstance(plugins, Plugins)
                    else Plugins.load(_config_of(own).plugins, plugins)
                )
                config = _config_of(loaded.option_names.translate(arguments))
                # The translation may have set options of plugins.
                if loaded.config == config.plugins:
                    plugins = loaded
        for option in without_effect_offline(config):
            logger.warning("%s", option)
        self.engine = self.llm_engine = self.engine_class(config, plugins=plugins)
        self._ids = count()
        self._lock = threading.Lock()

    @property
    def config(self) -> VllmConfig:
        """The resolved config."""
        return self.engine.config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
        progress: Progress | None = None,
        **none: Unpack[NoOptions],
    ) -> list[RequestOutput]:
        """Completes prompts: texts, {"prompt": text}, [ids] or {"prompt_token_ids": [ids]}. Outputs
        are in the prompts' order.

        `sampling_params`, `priority` and `cache_salt` apply to all, or there is one per prompt.
        Only requests with the same `cache_salt` share cached prefixes. Raises RequestError for a
        bad prompt, before anything is computed. Calls from several threads run one after another.
        Other keywords of vLLM's are accepted if they are None, or if a plugin's part has them.
        """
        many: Any = list(prompts) if isinstance(prompts, tuple) else listed(prompts)
        each = self._params(sampling_params, len(many))
        contexts, others = self._contexts(none, len(many))
        if others:
            check_names(self.generate, others)
        priorities = each_of(0 if priority is None else priority, "priority", len(many))
        salts = each_of(cache_salt, "cache_salt", len(many))
        prepare = self.engine.processor.prepare
        prepared = [
            prepare(
                self._next_id(), p, s, RequestOptions(priority=n, cache_salt=salt, context=context)
            )
            for p, s, n, salt, context in zip(many, each, priorities, salts, contexts, strict=True)
        ]
        return self._run(prepared, use_tqdm, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        use_tqdm: bool = True,
        progress: Progress | None = None,
        **render_options: Unpack[ConversationOptions],
    ) -> list[RequestOutput]:
        """Answers a conversation, or each of several, with the chat template. `cache_salt`: as in
        `generate`.

        Further options of a plugin's renderer come from a dict[str, Any], for type checkers.
        """
        conversations: list[Any] = (
            [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)
        )
        each = self._params(sampling_params, len(conversations))
        prepare = self.engine.processor.prepare_chat
        contexts, named = self._contexts(
            {name: value for name, value in render_options.items() if value not in (None, "auto")},
            len(conversations),
        )
        salts = each_of(cache_salt, "cache_salt", len(conversations))
        try:
            prepared = [
                prepare(
                    self._next_id(), c, s, RequestOptions(cache_salt=salt, context=context), **named
                )
                for c, s, salt, context in zip(conversations, each, salts, contexts, strict=True)
            ]
        except RequestError as error:
            if error.param in named:
                # A renderer knows its own options, and not those of this method.
                check_names(self.chat, {error.param: named[error.param]}, only_near=True)
            raise
        return self._run(prepared, use_tqdm, progress)

    def _contexts(
        self, keywords: Mapping[str, Any], count: int
    ) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Returns what `RequestParts.contexts` does."""
        if not keywords:
            return [{} for _ in range(count)], {}
        return self.engine.processor.parts.contexts(keywords, count)

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or self.engine.processor.default_params] * count
        if (
            not isinstance(params, list | tuple)
            or len(params) != count
            or not all(isinstance(p, SamplingParams) for p in params)
        ):
            raise RequestError(
                f"give SamplingParams, or a list of {count} of them, one for each prompt.",
                "sampling_params",
            )
        return list(params)

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling parameters used when a call gives none. The option `generation_config` controls
        whether they come from generation_config.json."""
        return self.engine.processor.default_params.replace()

    def get_tokenizer(self) -> Any:
        """The renderer's tokenizer. Raises UnsupportedError if it has none."""
        return self.engine.renderer.get_tokenizer()

    def _next_id(self) -> str:
        return f"llm-{next(self._ids)}"

    def _run(
        self, prepared: list[PreparedRequest], use_tqdm: bool, progress: Progress | None
    ) -> list[Any]:
        if progress is None and use_tqdm and prepared:
            return self._run_with_bar(prepared)
        ids = [p.message.request_id for p in prepared]
        with self._lock:
            self._check_idle()
            try:
                for entry in prepared:
                    self.engine.submit(entry)
                return self._drain(ids, progress)
            finally:
                # An interrupt in the middle must not leave requests behind for the next call.
                if self.engine.abort(ids):
                    self.engine.advance(timeout=0)

    def _check_idle(self) -> None:
        if self.engine.has_unfinished_requests():
            raise ToolkitError(
                "requests that engine.add_request() added are still running: finish them "
                "with engine.step() first."
            )

    def _drain(self, ids: list[str], progress: Progress | None) -> list[Any]:
        done: dict[str, Any] = {}
        while len(done) < len(ids):
            for state in self.engine.advance():
                if state.finished:
                    done[state.request_id] = state.snapshot()
                    if progress is not None:
                        progress(len(done), len(ids))
        return [done[request_id] for request_id in ids]

    def _run_with_bar(self, prepared: list[PreparedRequest]) -> list[Any]:
        from rich.console import Console
        from rich.progress import Progress as Bar

        with Bar(
            console=Console(stderr=True, markup=False, emoji=False),
            transient=True,
            disable=not sys.stderr.isatty(),
        ) as bar:
            task = bar.add_task("Processed prompts", total=len(prepared))
            return self._run(prepared, False, lambda done, total: bar.update(task, completed=done))

    def reset_prefix_cache(self) -> None:
        """Forgets all cached prefixes."""
        with self._lock:
            self.engine.reset_prefix_cache()

    def call_workers(
        self, method: str, payload: object = None, answer: type[Answer] | None = None
    ) -> list[Answer]:
        """Calls a method of a plugin's part, or of the model, on every worker: "lora.load". What
        each rank answers that has it, in the order of ranks; of several engines, one engine's after
        the other's.

        Methods are those that `toolkit_lm.step.worker_method` marks. `payload` is what msgspec
        encodes, at most 16 MiB. `answer` is the type of each answer; None: plain values. Raises
        RequestError for a method that no worker has, and for a payload or answer of another type;
        ToolkitError, with plugin, method and rank, for what the method raises; EngineDeadError.
        """
        with self._lock:
            self._check_idle()
            called = self.engine.call_workers(method, payload, answer)
            while not called.done():
                self.engine.advance(timeout=1)
            return called.result()

    def close(self) -> None:
        """Ends the engine and releases its memory. The object cannot be used after that. Safe to
        call twice."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _config_of(options: Mapping[str, Any]) -> VllmConfig:
    return VllmConfig.make(**load_options(VllmConfig.options(), options, environ=os.environ))
