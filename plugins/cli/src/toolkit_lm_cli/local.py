"""A model in this process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.frontend import LLMEngine
from toolkit_lm.outputs import RequestOutput
from toolkit_lm.params import RequestOutputKind
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing import RequestOptions
from toolkit_lm.renderer import AnswerDelta, AnswerFormat, AnswerParser, prompt_end

from toolkit_lm_cli.sampling import SamplingFlags
from toolkit_lm_cli.screen import Thought
from toolkit_lm_cli.talker import Usage


class LocalTalker:
    """Runs the engine's loop for one request at a time."""

    usage: Usage | None = None

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        self._engine = LLMEngine(config, plugins=plugins)
        parsers = plugins.parsers
        template = self._engine.renderer.chat_template_source
        name = parsers.find_format("reasoning", template)
        self._format: AnswerFormat | None = None if name is None else parsers.make(name, template)
        """That of the model's reasoning, where it is known."""
        self._count = 0

    def facts(self) -> Mapping[str, str]:
        config = self._engine.config
        return {
            "model": config.model.model,
            "dtype": config.model.dtype,
            "context": f"{config.max_model_len:,} tokens of context",
            "device": config.device.device,
        }

    def max_model_len(self) -> int | None:
        return self._engine.config.max_model_len

    def chat(self, messages: list[dict[str, Any]], flags: SamplingFlags) -> Iterator[str]:
        params = flags.params(
            **{"max_tokens": None} | self._engine.config.sampling_defaults
        ).replace(output_kind=RequestOutputKind.DELTA)
        if self._format is not None and self._format.keeps_special_tokens:
            params = params.replace(skip_special_tokens=False)
        options = RequestOptions(
            stop_scope=None if self._format is None else self._format.stop_scope
        )
        self._engine.submit(
            self._engine.processor.prepare_chat(self._next_id(), messages, params, options)
        )
        return self._texts() if self._format is None else self._parts(self._format)

    def complete(self, prompt: str, flags: SamplingFlags) -> Iterator[str]:
        params = flags.params(**self._engine.config.sampling_defaults).replace(
            output_kind=RequestOutputKind.DELTA
        )
        self._engine.add_request(self._next_id(), prompt, params)
        return self._texts()

    def close(self) -> None:
        self._engine.close()

    def _next_id(self) -> str:
        self._count += 1
        return str(self._count)

    def _texts(self) -> Iterator[str]:
        with closing(self._outputs()) as outputs:
            for output in outputs:
                yield output.outputs[0].text

    def _parts(self, form: AnswerFormat) -> Iterator[str]:
        """Reasoning as thoughts, and the content."""
        parser: AnswerParser | None = None
        with closing(self._outputs()) as outputs:
            for output in outputs:
                completion = output.outputs[0]
                if parser is None:
                    parser = form.parser(
                        prompt_end(self._engine.renderer, output.prompt_token_ids), ()
                    )
                yield from _pieces(parser.push(completion.text))
                if completion.finish_reason is not None:
                    yield from _pieces(
                        parser.finish(
                            cut=completion.finish_reason != "stop"
                            or isinstance(completion.stop_reason, str)
                        )
                    )

    def _outputs(self) -> Generator[RequestOutput, None, None]:
        self.usage = Usage(0, 0)
        try:
            while self._engine.has_unfinished_requests():
                with _interrupts_after():
                    outputs = self._engine.step()
                for output in outputs:
                    assert isinstance(output, RequestOutput)
                    if output.error:
                        raise RequestError(output.error)
                    self.usage = Usage(
                        output.num_prompt_tokens,
                        self.usage.output + len(output.outputs[0].token_ids),
                    )
                    yield output
        finally:
            self._engine.abort([str(self._count)])


def _pieces(delta: AnswerDelta) -> Iterator[str]:
    if delta.reasoning:
        yield Thought(delta.reasoning)
    yield delta.content


@contextmanager
def _interrupts_after() -> Iterator[None]:
    """Holds ^C back until the work is done, which would else be left half done; a second one is not
    held back."""
    before = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or before is not signal.default_int_handler
    ):
        yield
        return
    asked = False

    def remember(*_: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt
