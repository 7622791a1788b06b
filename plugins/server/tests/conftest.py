"""A fake engine for unit tests, and a small random checkpoint with a real server process for the
tests from end to end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing

import httpx
import pytest
from fastapi import FastAPI
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm.frontend import Health
from toolkit_lm.outputs import CompletionOutput, Logprob, RequestOutput
from toolkit_lm.params import RequestOutputKind
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.validation import check_options, check_token_ids
from toolkit_lm.renderer import Rendered, Renderer
from toolkit_lm_server.app import create_app


class CharRenderer(Renderer):
    """One token per character."""

    vocab_size = 128
    eos_token_ids = [0]

    def render_conversation(self, messages, **kwargs):
        self.kwargs = kwargs
        if messages[0].get("role") == "bad":
            raise RequestError("the chat template refuses this conversation", "messages")
        return self.render_prompt("".join(f"{m['role']}:{m['content']};" for m in messages))

    def render_prompt(self, prompt, *, add_special_tokens=True):
        if isinstance(prompt, str):
            prompt = {"prompt_token_ids": [ord(char) for char in prompt]}
        token_ids = prompt["prompt_token_ids"]
        if not token_ids:
            raise RequestError("the prompt is empty.", "prompt")
        return Rendered(token_ids)

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens=False):
        return "".join(map(chr, token_ids))

    def token_texts(self, token_ids):
        return [chr(token_id) for token_id in token_ids]

    def vocabulary_texts(self, token_ids):
        return [f"<{chr(token_id)}>" for token_id in token_ids]


class FakeEngine:
    """Answers with the prompt in capitals, one character at a time. A prompt with "hang" waits for
    ever after its second character."""

    def __init__(self, plugins: Sequence[object] = (), **options) -> None:
        self.config = VllmConfig.default(model="fake", **{"max_model_len": 64, **options})
        self.renderer = CharRenderer(self.config)
        self.served_model_name = self.config.served_model_name
        self.tasks = ("generate",)
        self.plugins = Plugins.load(PluginsConfig(plugins=["server"]), plugins)
        self.error = None
        self.status = "ready"
        self.reason = ""
        self.num_resets = 0
        self.num_restarts = 2
        self.num_queued_tokens = 9
        self.asked = []
        self.num_open = 0
        self.failure: Exception | None = None

    def health(self):
        return Health(self.status, self.reason)

    async def reset_prefix_cache(self):
        self.num_resets += 1

    async def chat_many(self, conversations, params, *, options, **render_options):
        prompts = [
            self.renderer.render_conversation(messages, **render_options).token_ids
            for messages in conversations
        ]
        async with aclosing(
            self.generate_many([{"prompt_token_ids": one} for one in prompts], params, **options)
        ) as outputs:
            async for found in outputs:
                yield found

    async def generate_many(self, prompts, params, **options):
        check_options(options)
        rendered = [self.renderer.render_prompt(prompt).token_ids for prompt in prompts]
        for token_ids in rendered:
            check_token_ids(token_ids, self.renderer.vocab_size)
            if len(token_ids) >= self.config.max_model_len:
                most = self.config.max_model_len
                raise ContextLengthError(
                    f"the prompt has {len(token_ids)} tokens; this model's maximum context "
                    f"length is {most}.",
                    "prompt",
                )
            self.asked.append(({"prompt_token_ids": token_ids}, params, options))
            if "refuse" in self.renderer.decode(token_ids):
                raise RequestError("n is too high", "n")
        streams = {
            number: self._answer(token_ids, params, options)
            for number, token_ids in enumerate(rendered)
        }
        try:
            # A prompt that hangs is asked last, so that the others end.
            for number in sorted(
                streams, key=lambda number: "hang" in self.renderer.decode(rendered[number])
            ):
                async for output in streams[number]:
                    if output.finished or params.output_kind is RequestOutputKind.DELTA:
                        yield [(number, output)]
        finally:
            for stream in streams.values():
                await stream.aclose()

    async def _answer(self, known, params, options):
        text = self.renderer.decode(known)
        answer = text.upper()[: params.max_tokens]
        is_delta = params.output_kind is RequestOutputKind.DELTA
        self.num_open += 1
        try:
            for size in range(1, len(answer) + 1):
                await asyncio.sleep(0)
                if self.failure and size == 2:
                    raise self.failure
                if "hang" in text and size == 3:
                    await asyncio.Event().wait()
                done = size == len(answer)
                reason = None
                if done:
                    reason = "error" if "broken" in text else "stop"
                if options["timeout"] is not None and size == 1 and "late" in text:
                    yield RequestOutput(
                        "id",
                        text,
                        known,
                        [CompletionOutput(0, "", [], finish_reason="timeout")],
                        True,
                    )
                    return
                if options["timeout"] is not None and size == 3:
                    reason = "timeout"
                    done = True
                new = answer[size - 1 : size] if is_delta else answer[:size]
                outputs = [self._sequence(i, new, params, reason) for i in range(params.n)]
                logprobs = (
                    None
                    if params.prompt_logprobs is None
                    else [None, *({i: Logprob(-2.5, 3, chr(i))} for i in known[1:])]
                )
                yield RequestOutput(
                    "id",
                    text,
                    known,
                    outputs,
                    done,
                    num_cached_tokens=1,
                    error="NaN logits",
                    prompt_logprobs=logprobs,
                )
                if done:
                    return
        finally:
            self.num_open -= 1

    def _sequence(self, index, text, params, reason):
        table = None
        if params.logprobs is not None:
            # The chosen token is the second likeliest.
            table = [
                {
                    ord(c): Logprob(-1.5, 2, c),
                    ord("~"): Logprob(-0.5, 1, "~"),
                    ord("!"): Logprob(float("-inf"), 3, "!"),
                }
                for c in text
            ]
        return CompletionOutput(index, text, [ord(c) for c in text], table, finish_reason=reason)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture(scope="session")
def shared() -> tuple[FakeEngine, FastAPI]:
    """An engine and its app, which takes longer to make than most tests."""
    engine = FakeEngine()
    return engine, create_app(engine)


@pytest.fixture
def engine(shared) -> Iterator[FakeEngine]:
    """The shared engine, as it was when it was made."""
    engine, _ = shared
    before = dict(vars(engine))
    engine.asked = []
    engine.renderer = CharRenderer(engine.config)
    yield engine
    vars(engine).clear()
    vars(engine).update(before)


@pytest.fixture
def client_of():
    """client_of(app): an HTTP client of an app in this process."""
    return lambda app: httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
async def client(engine, shared, client_of):
    """A client of the app over `engine`."""
    async with client_of(shared[1]) as one:
        yield one
