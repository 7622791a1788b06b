"""How a prompt is prepared for event loops: by renderers that can be awaited, and by those that
cannot."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from toolkit_lm import SamplingParams, VllmConfig
from toolkit_lm.config import PluginsConfig
from toolkit_lm.errors import PluginError, RequestError
from toolkit_lm.frontend.preparation import Preparation
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing import RequestLimits
from toolkit_lm.processing.processor import Processor
from toolkit_lm.prompts import parse_prompt
from toolkit_lm.renderer import Rendered, Renderer

CHAT = [{"role": "user", "content": "abc"}]


class Plain(Renderer):
    """One token per character. It notes who called what."""

    vocab_size = 256
    eos_token_ids = [0]

    def __init__(self, config):
        super().__init__(config)
        self.calls = []

    def render_conversation(self, messages, **kwargs):
        self.calls.append(("conversation", threading.current_thread() is threading.main_thread()))
        return self.tokens(messages[0]["content"])

    def render_prompt(self, prompt, *, add_special_tokens=True):
        self.calls.append(("prompt", threading.current_thread() is threading.main_thread()))
        return self.tokens(prompt)

    def tokens(self, prompt):
        parsed = parse_prompt(prompt)
        if parsed.get("prompt") == "bad":
            raise RequestError("it is bad.", "prompt")
        if parsed.get("prompt") == "broken":
            raise KeyError("broken")
        return Rendered(parsed.get("prompt_token_ids") or [ord(char) for char in parsed["prompt"]])

    def decode_stream(self, prompt_token_ids=(), *, skip_special_tokens=True):
        raise AssertionError("nothing is decoded here")

    decode = token_texts = decode_stream


class Own(Plain):
    """It can be awaited: each rendering waits until `let`."""

    def __init__(self, config):
        super().__init__(config)
        self.let = asyncio.Event()
        self.waiting = 0
        self.left = 0

    async def wait(self):
        self.waiting += 1
        try:
            await self.let.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def render_conversation_async(self, messages, **kwargs):
        await self.wait()
        return self.tokens(messages[0]["content"])

    async def render_prompt_async(self, prompt, *, add_special_tokens=True):
        await self.wait()
        return self.tokens(prompt)


class OfChats(Plain):
    """Only its conversations can be awaited."""

    async def render_conversation_async(self, messages, **kwargs):
        return self.tokens(messages[0]["content"])


def made(kind):
    config = VllmConfig.default(max_model_len=64)
    processor = Processor(config, kind(config), Plugins.load(PluginsConfig(plugins=[])))
    processor.set_limits(RequestLimits(config, KVCacheConfig([], [])))
    return Preparation(processor), processor.renderer


def ids(prepared):
    return [one.message.prompt_token_ids for one in prepared]


def test_a_renderer_that_overrides_nothing_is_called_in_a_thread():
    async def main():
        preparation, renderer = made(Plain)
        assert preparation.is_one_piece
        assert ids(await preparation.prepare_batch(["1"], ["ab"], None, None)) == [[97, 98]]
        assert ids(await preparation.prepare_chat_batch(["2"], [CHAT], None, None)) == [
            [97, 98, 99]
        ]
        assert renderer.calls == [("prompt", False), ("conversation", False)]
        renderer.calls.clear()
        assert await renderer.render_prompt_async("ab") == renderer.tokens("ab")
        assert await renderer.render_conversation_async(CHAT) == renderer.tokens("abc")
        assert renderer.calls == [("prompt", False), ("conversation", False)]

    asyncio.run(main())


def test_a_renderer_that_can_be_awaited_is_not_called_in_any():
    async def main():
        preparation, renderer = made(Own)
        renderer.let.set()
        [first, second] = await preparation.prepare_batch(
            ["1", "2"], ["ab", {"prompt_token_ids": [7]}], None, {"cache_salt": "me"}
        )
        assert ids([first, second]) == [[97, 98], [7]]
        assert (first.prompt, second.prompt, first.message.cache_keys[0].key) == ("ab", None, "me")
        assert ids(await preparation.prepare_chat_batch(["3"], [CHAT], None, None)) == [
            [97, 98, 99]
        ]
        assert renderer.calls == []

    asyncio.run(main())


def test_one_method_of_its_own_is_enough():
    async def main():
        preparation, renderer = made(OfChats)
        assert ids(await preparation.prepare_chat_batch(["1"], [CHAT], None, None)) == [
            [97, 98, 99]
        ]
        assert renderer.calls == []
        assert ids(await preparation.prepare_batch(["2"], ["ab"], None, None)) == [[97, 98]]
        assert renderer.calls == [("prompt", False)]

    asyncio.run(main())


def test_prompts_are_rendered_side_by_side_and_all_of_them_are_left():
    async def main():
        preparation, renderer = made(Own)
        asked = asyncio.ensure_future(
            preparation.prepare_batch(["1", "2", "3"], ["a", "b", "c"], None, None)
        )
        while renderer.waiting < 3:
            await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert renderer.left == 3

    asyncio.run(main())


@pytest.mark.filterwarnings("error")
def test_of_a_large_batch_sixteen_are_rendered_at_a_time():
    async def main():
        preparation, renderer = made(Own)
        names = [str(number) for number in range(40)]
        for is_cancelled in (True, False):
            renderer.waiting = renderer.left = 0
            asked = asyncio.ensure_future(preparation.prepare_batch(names, ["a"] * 40, None, None))
            while renderer.waiting < 16:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            assert renderer.waiting == 16
            if is_cancelled:
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
                # The first that left has made place for another.
                assert renderer.left == renderer.waiting <= 17
        renderer.let.set()
        assert ids(await asked) == [[97]] * 40

    asyncio.run(main())


def test_the_first_bad_prompt_is_told():
    async def main():
        preparation, renderer = made(Own)
        renderer.let.set()
        with pytest.raises(RequestError, match=r"it is bad\."):
            await preparation.prepare_batch(["1", "2", "3"], ["a", "bad", 5], None, None)
        with pytest.raises(KeyError):
            await preparation.prepare_batch(["1", "2"], ["broken", "bad"], None, None)
        assert ids(await preparation.prepare_batch(["1"], ["a"], None, None)) == [[97]]

    asyncio.run(main())


def test_bad_parameters_are_told_before_anything_is_rendered():
    async def main():
        preparation, renderer = made(Own)
        with pytest.raises(RequestError, match="max_n"):
            await preparation.prepare_batch(["1"], ["a"], SamplingParams(n=1000), None)
        assert renderer.waiting == 0

    asyncio.run(main())


def test_an_error_of_a_plugins_renderer_names_the_plugin():
    class Broken(Own):
        async def render_prompt_async(self, prompt, *, add_special_tokens=True):
            raise KeyError("broken")

    async def main():
        config = VllmConfig.default(max_model_len=64)
        plugins = Plugins.load(PluginsConfig(plugins=[]), [Broken(config)])
        processor = Processor(config, Broken(config), plugins)
        with pytest.raises(PluginError, match="'Broken'"):
            await Preparation(processor).prepare_batch(["1"], ["a"], None, None)

    asyncio.run(main())


def test_parameters_are_those_of_the_time_of_the_call():
    async def main():
        preparation, renderer = made(Own)
        params = SamplingParams(max_tokens=3)
        asked = asyncio.ensure_future(preparation.prepare_batch(["1"], ["a"], params, None))
        end = time.monotonic() + 10
        while not renderer.waiting and time.monotonic() < end:
            await asyncio.sleep(0.01)
        params.max_tokens = 5
        renderer.let.set()
        [prepared] = await asked
        assert prepared.message.params.max_tokens == 3

    asyncio.run(main())
