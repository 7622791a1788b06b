"""What a request could cost is told before any work, on every route that reaches the engine."""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from toolkit_lm.errors import QueueFullError, RequestError
from toolkit_lm.params import RequestOutputKind, SamplingParams
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm_server.app import create_app
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.limits.key_limits import ApiKey
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_serving.budget import BudgetedLLM, CostBudget
from toolkit_lm_serving.cost import generation_cost, pooling_cost, rendering_cost
from toolkit_lm_serving.engine import ServingEngine

MIB = 2**20


@pytest.mark.parametrize(
    ("fields", "prompts", "factor"),
    [
        ({"n": 128, "max_tokens": 4096}, 128, "prompts x n x max_tokens ("),
        (
            {"best_of": 64, "max_tokens": 4096, "logprobs": 20},
            1,
            "prompts x best_of x max_tokens x logprobs",
        ),
        ({"best_of": 128, "max_tokens": 4096}, 8, "prompts x best_of x max_tokens x logprobs"),
        (
            {"use_beam_search": True, "n": 128, "max_tokens": 4096, "temperature": 0},
            4,
            "prompts x n x max_tokens x logprobs",
        ),
        ({"prompt_logprobs": 20, "max_tokens": 1}, 256, "prompt x prompt_logprobs"),
        (
            {"allowed_token_ids": list(range(2**18)), "max_tokens": 1},
            64,
            "prompts x allowed_token_ids",
        ),
        ({"bad_words": ["x" * 256] * 300, "max_tokens": 1}, 256, "prompts x bad_words"),
        (
            {"extra_args": {"dry_sequence_breakers": ["x" * 100_000]}, "max_tokens": 1},
            256,
            "prompts x bad_words",
        ),
        ({"n": 128, "max_tokens": 1}, 1024, "prompts x n ("),
    ],
)
def test_each_product_has_a_bound(fields, prompts, factor):
    cost = generation_cost(["a" * 400] * prompts, SamplingParams(**fields), 4096)
    told = (
        r"the request could take [0-9,]+ MiB of memory, most of it for .*, and may take 256 MiB "
        r"\(max_request_cost\)\. Ask for less"
    )
    with pytest.raises(RequestError, match=told) as error, CostBudget(256 * MIB).spend(cost):
        raise AssertionError("it is let in")
    assert factor in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None, "logprobs": 20},
        {"n": 8, "max_tokens": 1024, "logprobs": 5},
        {"n": 128, "max_tokens": 128},
        {"stop": [f"{i:04}" * 256 for i in range(64)], "n": 128, "max_tokens": 64},
        {"allowed_token_ids": list(range(2**18))},
        {"prompt_logprobs": 5},
    ],
)
def test_usual_requests_are_let_in(fields):
    budget = CostBudget(256 * MIB, max_queued=64)
    cost = generation_cost(["a" * 16_000], SamplingParams(**fields), 8192)
    with budget.spend(cost):
        assert budget.num_requests == 1


def test_many_short_messages_cost_more_than_their_text():
    """Each is an object, which is read, checked and copied."""
    message = {"role": "user", "content": "a"}
    with (
        pytest.raises(RequestError, match="most of it for prompt"),
        CostBudget(256 * MIB).spend(conversation_cost([message] * 50_000)),
    ):
        raise AssertionError("it is let in")
    with CostBudget(256 * MIB).spend(
        conversation_cost([{**message, "content": "a" * 100}] * 5_000)
    ):
        pass


def image(size):
    url = {"url": f"data:image/png;base64,{'A' * size}"}
    return {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": url},
            {"type": "text", "text": "What is it?"},
        ],
    }


def test_an_image_costs_what_it_takes_and_not_what_so_much_text_would():
    with CostBudget(256 * MIB).spend(conversation_cost([image(12 * MIB)])):
        pass
    for messages in ([image(100)] * 9, [image(90 * MIB)]):
        with (
            pytest.raises(RequestError, match="most of it for images and other media"),
            CostBudget(256 * MIB).spend(conversation_cost(messages)),
        ):
            raise AssertionError("it is let in")
    text = {
        "role": "user",
        "content": [{"type": "text", "text": "a" * 8 * MIB}, image(1)["content"][0]],
    }
    with (
        pytest.raises(RequestError, match="most of it for prompt"),
        CostBudget(256 * MIB).spend(conversation_cost([text])),
    ):
        raise AssertionError("it is let in")
    embeds = {
        "type": "image_embeds",
        "image_embeds": {"embeds": {"dtype": "float32", "shape": [1], "data": "A" * 90 * MIB}},
    }
    cost = conversation_cost([{"role": "user", "content": [embeds]}])
    assert cost["images and other media"] > 256 * MIB
    for odd in (
        {"type": ["x"]},
        {"type": 5, "x": [["y" * MIB]]},
        {"type": "image", "image": {"a": {"b": {"c": {"d": {"e": "z" * MIB}}}}}},
    ):
        assert (
            conversation_cost([{"role": "user", "content": [odd, 5]}])["images and other media"]
            >= 32 * MIB
        )
    prompt = {"prompt": "a", "multi_modal_data": {"image": [b"a" * MIB] * 3, "video": b"a" * MIB}}
    cost = generation_cost([prompt], SamplingParams(max_tokens=16), 4096)["images and other media"]
    assert cost // MIB == 3 * (32 + 3) + 128 + 3
    watched = [
        {"role": "user", "content": [{"type": kind, kind: "a"}]}
        for kind in ("video", "video_url", "file", "video_embeds", "image_embeds")
    ]
    assert [conversation_cost([one])["images and other media"] // MIB for one in watched] == [
        128,
        128,
        128,
        0,
        0,
    ]


def test_the_renderer_knows_what_an_image_takes():
    """What is made of all of them, and what the largest one takes while it is read."""
    asked = []

    def measure(part, options):
        asked.append((part, options))
        return {"small": (MIB, 2 * MIB), "large": (5 * MIB, 7 * MIB), "odd": None}[part["image"]]

    parts = [{"type": "image", "image": one} for one in ("small", "large", "small", "odd")]
    options = {"max_pixels": 5}
    conversation = (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, *parts]}],
        {"mm_processor_kwargs": options},
    )
    prompt = {
        "prompt": "a",
        "multi_modal_data": {"image": [part["image"] for part in parts]},
        "mm_processor_kwargs": options,
    }
    for given in (conversation, prompt):
        cost = rendering_cost([given], measure)["images and other media"]
        assert cost // MIB == 1 + 5 + 1 + 32 + 7
        assert asked == [(part, options) for part in parts]
        asked.clear()
        assert (
            generation_cost([given], SamplingParams(max_tokens=1), 64, measure)[
                "images and other media"
            ]
            == cost
        )
        asked.clear()
    kept = 110 * (24 + 40)
    assert rendering_cost(["a" * 100, {"prompt_token_ids": [5] * 10}]) == {
        "images and other media": 0,
        "prompt": kept + 100 * 160,
    }
    assert rendering_cost(
        [([{"role": "user", "content": parts[:1]}], {"mm_processor_kwargs": 5})], measure
    )


def conversation_cost(messages):
    return generation_cost([(messages, {})], SamplingParams(max_tokens=16), 4096)


def test_a_long_conversation_costs_what_its_messages_do_in_few_calls():
    """The event loop waits while it is counted: 50,000 messages took it 110 ms."""
    kinds = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "é\n'\""},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "user", "content": [{"type": "text", "text": "ü"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "a" * 1000}]},
        {"role": "user"},
        5,
    ]

    def cost(messages):
        return rendering_cost([(messages, {})])["prompt"] - rendering_cost([([], {})])["prompt"]

    first = kinds[0]
    for kind in kinds:
        both = [first] * 300 + [kind] * 3
        assert cost(both) == 300 * cost([first]) + 3 * (cost([first, kind]) - cost([first]))
    calls = 0

    def see(frame, event, argument):
        nonlocal calls
        calls += event == "c_call" and argument is repr

    messages = [dict(first) for _ in range(10_000)]
    sys.setprofile(see)
    try:
        conversation_cost(messages)
    finally:
        sys.setprofile(None)
    assert 0 < calls < len(messages) / 100, "no message is written by itself"


def test_a_text_costs_by_its_bytes_each_of_which_may_be_a_token():
    costs = [
        generation_cost([text * 2**18], SamplingParams(max_tokens=1), 4096)["prompt"]
        for text in ("a", "é", "\U0001f600")
    ]
    assert [cost // costs[0] for cost in costs] == [1, 2, 4]
    how = {"cut": True, "size": 1, "per_token": False, "max_model_len": 512}
    few, many = (
        pooling_cost([f"{i} {'a' * 2**12}" for i in range(n)], **how)["text"] for n in (256, 1024)
    )
    assert many < 3 * few, "short texts are tokenized some at a time"


def test_a_long_text_costs_by_what_of_it_is_tokenized_at_a_time():
    """What a renderer tells, of the text of a prompt. A conversation counts whole: a template moves
    where its text is cut."""
    asked = []

    def at_once(text):
        asked.append(text)
        return 2**19

    text = "a b " * 2**18
    sides = {"encoder_prompt": text, "decoder_prompt": {"prompt": "c"}}
    for given, told in ((text, [text]), ({"prompt": text}, [text]), (sides, [text, "c"])):
        asked.clear()
        whole = rendering_cost([given])["prompt"]
        cut = rendering_cost([given], None, at_once)["prompt"]
        generated = [
            generation_cost([given], SamplingParams(max_tokens=1), 64, None, how)["prompt"]
            for how in (None, at_once)
        ]
        assert asked == [*told, *told]
        saved = (sum(map(len, told)) - 2**19 * len(told)) * 160
        assert (
            max(0, saved) <= whole - cut <= 2**19 * 160 + 160
            and generated[0] - generated[1] == whole - cut
        )
    chat = [([{"role": "user", "content": text}], {})]
    assert rendering_cost(chat, None, at_once) == rendering_cost(chat)
    asked.clear()
    short = ["a b"] * 10
    assert rendering_cost(short, None, at_once) == rendering_cost(short) and not asked, (
        "short texts are not looked at"
    )
    how = {"cut": True, "size": 1, "per_token": False, "max_model_len": 64}
    assert (
        pooling_cost([text], **how)["text"] - pooling_cost([text], **how, at_once=at_once)["text"]
        == 2**19 * 160
    )


def test_texts_that_are_given_often_count_once_but_for_their_tokens():
    query = "q" * 100_000
    size = {"size": 1, "per_token": False, "max_model_len": 512}
    documents = [(query, f"document {i}") for i in range(1000)]
    whole, cut = (pooling_cost(documents, cut=cut, **size) for cut in (False, True))
    assert sum(whole.values()) > 2**30 > 10 * sum(cut.values())
    per_token = pooling_cost(
        ["a" * 400] * 100, cut=False, size=4096, per_token=True, max_model_len=512
    )
    assert per_token["inputs x result"] == 100 * 400 * 4096 * 40


def test_pictures_of_pairs_count_for_each_pair():
    """A query's picture is read with each document, and a pair may have as many tokens as fit."""
    how = {"cut": False, "size": 1, "per_token": False, "max_model_len": 512}
    picture = {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    alone = pooling_cost([picture], **how)
    assert alone["images and other media"] > 2**24
    pairs = pooling_cost([(picture, "a"), (picture, "b"), ("c", picture)], **how)
    assert pairs["images and other media"] == 3 * alone["images and other media"]
    assert pairs["inputs x text"] == 3 * alone["inputs x text"]
    assert pooling_cost([("a", "b")], **how)["images and other media"] == 0


def test_what_is_under_way_is_bounded_together():
    budget = CostBudget(MIB)
    cost = {"all": MIB}
    full = pytest.raises(
        QueueFullError, match=r"2 MiB of memory are taken\. This takes 1 MiB of memory more"
    )
    with budget.spend(cost), budget.spend(cost), full, budget.spend(cost):
        raise AssertionError("it is let in")
    with budget.spend(cost), budget.spend(cost):
        pass


def test_who_comes_later_finds_some_left():
    budget = CostBudget(MIB, max_queued=1000)
    left = 1000
    with ExitStack() as flood:
        for client in "abcd":
            most = left * 7 // 8
            left -= most
            for _ in range(most):
                flood.enter_context(budget.spend({"all": 1}, client))
            with pytest.raises(QueueFullError) as error, budget.spend({"all": 1}, client):
                raise AssertionError("it is let in")
            own = f", {most} requests of them this client's" if client != "a" else ""
            assert str(error.value).startswith(
                f"the engine is busy: {1000 - left} requests are taken{own}. This takes 1 "
                "requests more."
            )
    with budget.spend({"all": 1}, "a", 875):
        pass
    alone = pytest.raises(
        RequestError, match="this takes 876 requests, and no client may take more than 875 requests"
    )
    with alone as error, budget.spend({"all": 1}, "a", 876):
        raise AssertionError("it is let in")
    assert not isinstance(error.value, QueueFullError), "another try would be in vain"
    with CostBudget(MIB, max_queued=3).spend({"all": 1}, "a", 100):
        pass


@pytest.mark.parametrize("counted", [False, True])
async def test_a_generation_is_paid_for_until_it_ends(engine, counted, anyio_backend):
    budget = CostBudget(MIB)
    keys = Keys([ApiKey(name="a", key="k", max_sequences=1)])
    llm = BudgetedLLM(engine, budget, keys.accounts)
    params = SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA)
    options = {
        "timeout": None,
        "priority": 0,
        "cache_salt": None,
        "context": {"client": "a" if counted else "b"},
    }
    for end in ("unread", "begun", "read", "closed"):
        outputs = llm.generate_many([{"prompt_token_ids": [97, 98]}], params, **options)
        assert budget._bytes._reserved
        if end != "unread":
            await anext(outputs)
        if end == "read":
            async for _ in outputs:
                pass
        elif end == "closed":
            await outputs.aclose()
        if end != "closed":
            del outputs
        assert not budget._bytes._reserved, end
        # The next one is let in: its key may have one sequence at a time.


async def test_requests_over_http_are_paid_for_until_they_end(engine, client_of, anyio_backend):
    """Whether they are streamed, refused, broken off, or fail."""
    others = [one for one in gc.get_objects() if type(one) is CostBudget]
    app = create_app(engine)
    budgets = [
        one
        for one in gc.get_objects()
        if type(one) is CostBudget and not any(one is other for other in others)
    ]
    bodies = [
        {"prompt": "abc"},
        {"prompt": "abc", "stream": True},
        {"prompt": "refuse"},
        {"prompt": "broken"},
        {"prompt": "broken", "stream": True},
    ]
    async with client_of(app) as client:
        for body in bodies:
            await client.post("/v1/completions", json={"max_tokens": 4, **body})
        hanging = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "a hang", "max_tokens": 9})
        )
        while not engine.num_open:
            await asyncio.sleep(0)
        assert any(one._bytes._reserved for one in budgets)
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        while engine.num_open:
            await asyncio.sleep(0)
    assert not any(one._bytes._reserved or one._requests._reserved for one in budgets)


def members(kind):
    """The public names of a class and its bases."""
    return {name for one in kind.__mro__ for name in vars(one) if name[0] != "_"}


FREE = frozenset(
    {
        *("abort", "config", "engines", "error", "health", "num_queued_tokens", "num_restarts"),
        *("plugins", "processor", "renderer", "reset_prefix_cache", "served_model_name"),
        *("tasks", "wait_ready"),
    }
)
"""What computes nothing: a budget hands it on."""
OWNERS = frozenset({"aclose", "close", "engine"})
"""What is for who made an engine, and no route's."""


async def test_every_way_into_the_engine_is_held_to_the_budget(anyio_backend):
    """A way that AsyncLLM gets later must be taken into ServingEngine and BudgetedLLM, or named
    here as one that computes nothing, or as its owner's."""
    from toolkit_lm import AsyncLLM

    # An attribute of each instance.
    public = {name for name in vars(AsyncLLM) if name[0] != "_"} | {"plugins", "served_model_name"}
    assert public - OWNERS == members(ServingEngine) - {"hold", "hold_rendering"}
    assert members(ServingEngine) == members(BudgetedLLM)
    ways = public - OWNERS - FREE
    rules = SimpleNamespace(rules=lambda task: SimpleNamespace(size=4))
    config = SimpleNamespace(
        sampling_defaults={}, max_model_len=64, model=SimpleNamespace(max_model_len=64)
    )
    llm = BudgetedLLM(
        SimpleNamespace(
            config=config,
            processor=SimpleNamespace(limits=rules),
            **dict.fromkeys(ways, lambda *_, **__: None),
        ),
        CostBudget(1),
    )
    with pytest.raises(RequestError):
        llm.generate("a")
    with pytest.raises(RequestError):
        llm.generate_many(["a"])
    with pytest.raises(RequestError):
        llm.chat([{"role": "user", "content": "a"}])
    with pytest.raises(RequestError):
        llm.chat_many([[{"role": "user", "content": "a"}]])
    for params in (None, PoolingParams(task="token_embed"), [PoolingParams()]):
        with pytest.raises(RequestError):
            await llm.encode("a", params)


async def test_a_costly_body_is_refused_and_a_small_one_beside_it_is_not(
    engine, client_of, anyio_backend
):
    async with client_of(create_app(engine, ServerOptions(max_request_cost="1MiB"))) as client:
        body = {"prompt": ["abc"] * 16, "n": 64, "max_tokens": 1, "stop": ["x" * 1024] * 64}
        refused, served = await asyncio.gather(
            client.post("/v1/completions", json=body),
            client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 2}),
        )
    assert (refused.status_code, served.status_code) == (400, 200)
    assert "prompts x n (" in refused.json()["error"]["message"]


async def test_media_are_paid_for_where_they_are_rendered_only(engine, client_of, anyio_backend):
    """By the route that tells tokens, as by an engine's."""
    body = {"messages": [image(100)]}
    async with client_of(create_app(engine, ServerOptions(max_request_cost="16MiB"))) as client:
        for path in ("/tokenize", "/v1/chat/completions"):
            refused = await client.post(path, json=body)
            assert refused.status_code == 400
            assert "images and other media (32 MiB)" in refused.json()["error"]["message"]
        assert (await client.post("/tokenize", json={"prompt": "a" * 50_000})).status_code == 200
    engine.renderer.media_size = lambda part, options: (MIB, 0)
    async with client_of(create_app(engine, ServerOptions(max_request_cost="16MiB"))) as client:
        assert (await client.post("/tokenize", json=body)).status_code == 200
