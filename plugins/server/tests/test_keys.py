"""API keys from a file, with names and limits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from toolkit_lm.config import options_of
from toolkit_lm.errors import ConfigError
from toolkit_lm_server.app import create_app
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.limits.key_limits import Account, ApiKey
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio

COMPLETE = "/v1/completions"
FILE = """
keys:
  - {name: alice, key: key-of-alice, requests_per_minute: 3}
  - {name: bob, key: key-of-bob, tokens_per_minute: 10}
  - {name: carol, key: key-of-carol, max_sequences: 4}
"""


@pytest.fixture
def options(tmp_path):
    (tmp_path / "keys.yaml").write_text(FILE)
    return ServerOptions(api_keys_file=str(tmp_path / "keys.yaml"), api_key="key-of-all")


def ask(client, who, path=COMPLETE, **body):
    return client.post(
        path,
        json={"prompt": "abc", "max_tokens": 2, **body},
        headers={"authorization": f"Bearer key-of-{who}"},
    )


@pytest.mark.parametrize(
    ("who", "refused_after", "limit"),
    [
        ("alice", 3, "requests_per_minute is 3"),
        ("bob", 2, "tokens_per_minute is 10"),
        ("all", 9, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_minutes_limits(engine, client_of, options, who, refused_after, limit, stream):
    """Bob's requests take 5 tokens each."""
    async with client_of(create_app(engine, options)) as client:
        codes = []
        for _ in range(refused_after):
            response = await ask(client, who, stream=stream)
            codes.append(response.status_code)
        assert codes == [200] * refused_after
        if limit is not None:
            response = await ask(client, who, stream=stream)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (429, "rate_limit_exceeded") and int(
                response.headers["retry-after"]
            ) > 0
            assert f"The key '{who}' has met its limit: {limit}." in error["message"]
            assert (await ask(client, "all")).status_code == 200, "others go on"
            # Requests that compute nothing are not counted.
            version = await client.get(
                "/version", headers={"authorization": f"Bearer key-of-{who}"}
            )
            assert version.status_code == 200


async def test_sequences_at_a_time(engine, client_of, options):
    async with client_of(create_app(engine, options)) as client:
        never = await ask(client, "carol", n=5)
        assert (never.status_code, "retry-after" in never.headers) == (400, False), (
            "no time would make it right"
        )
        told = (
            "The key 'carol' may have 4 sequences at a time (max_sequences), and the request "
            "asks for 5: prompts x n. Split it."
        )
        assert never.json()["error"]["message"] == told
        hanging = asyncio.create_task(ask(client, "carol", prompt="a hang", n=2, max_tokens=9))
        while not engine.num_open:
            await asyncio.sleep(0)
        assert [(await ask(client, "carol", n=n)).status_code for n in (2, 3, 2)] == [200, 429, 200]
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        while engine.num_open:
            await asyncio.sleep(0)
        assert (await ask(client, "carol", n=4)).status_code == 200


async def test_the_key_says_who_the_client_is(engine, client_of, options):
    async with client_of(create_app(engine, options)) as client:
        await ask(client, "alice")
        assert (await ask(client, "mallory")).status_code == 401
        assert (await client.get("/openapi.json")).status_code == 404
    assert engine.asked[0][2]["context"]["client"] == "alice"


def test_minutes_go_by():
    now = [0.0]
    account = Keys(
        [ApiKey(name="a", key="k", requests_per_minute=60, tokens_per_minute=600)], lambda: now[0]
    ).accounts["a"]
    for _ in range(60):
        account.begin()
    with pytest.raises(ApiError, match="requests_per_minute"):
        account.begin()
    now[0] = 1.5
    account.begin()
    with account.run(1, 100) as reservation:
        reservation.used(1200)
    now[0] = 60.0
    with pytest.raises(ApiError, match=r"tokens_per_minute is 600. Try again in") as error:
        account.begin()
    now[0] += float(error.value.headers["Retry-After"])
    account.begin()
    now[0] += 3600
    for _ in range(60):
        account.begin()
    with pytest.raises(ApiError):
        account.begin()


def test_tokens_are_reserved_at_admission():
    now = [0.0]
    account = Keys([ApiKey(name="a", key="k", tokens_per_minute=600)], lambda: now[0]).accounts["a"]
    told = "tokens_per_minute is 600. The request may take 200 tokens. Try again in 11 s."
    with account.run(1, 500) as first:
        first.used(30)
        with pytest.raises(ApiError, match=told), account.run(1, 200):
            pass
        with account.run(1, 100):
            pass
    with account.run(1, 200) as second:
        second.used(1000)
    with pytest.raises(ApiError), account.run(1, 1):
        pass
    now[0] = 43.1
    # 570 were left, then 1000 taken: 430 are owed, which is 43 s.
    with account.run(1, 1):
        pass
    now[0] = 200.0
    with account.run(1, 10_000), pytest.raises(ApiError), account.run(1, 1):
        pass
    with account.run(1, 600):
        pass


async def test_requests_at_once_do_not_overdraw_a_minute(engine, client_of, options):
    """Bob's requests take 5 tokens each, of 10 a minute."""
    async with client_of(create_app(engine, options)) as client:
        hanging = [
            asyncio.create_task(ask(client, "bob", prompt="a hang", max_tokens=4)) for _ in range(2)
        ]
        while not engine.num_open:
            await asyncio.sleep(0)
        answers = await asyncio.gather(*(ask(client, "bob", max_tokens=4) for _ in range(5)))
        assert {answer.status_code for answer in answers} == {429}
        for task in hanging:
            task.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("keys: []", "length"),
        ("keys: [{name: a}]", "key"),
        ("keys: [{name: a, key: secret, limit: 3}]", "limit"),
        ("keys: [{name: a, key: 'sec ret'}]", "key"),
        ("keys: [{name: a, key: secret, max_sequences: 0}]", "max_sequences"),
        ("keys: [{name: a, key: secret}, {name: b, key: secret}]", "are the same"),
        ("keys: [{name: a, key: secret}, {name: a, key: other}]", "same name"),
        ("keys: [{name: a, key: secret", "is not YAML"),
        (None, "No such file"),
    ],
)
def test_a_bad_file_is_told_without_its_keys(tmp_path, text, told):
    path = tmp_path / "keys.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        Keys.of(ServerOptions(api_keys_file=str(path)))
    assert "sec" not in str(error.value)


async def test_several_keys_without_a_file(engine, client_of):
    """Each is a client of its own."""
    async with client_of(
        create_app(engine, ServerOptions(api_key=["key-of-one", "key-of-two"]))
    ) as client:
        assert [(await ask(client, who)).status_code for who in ("one", "two", "three")] == [
            200,
            200,
            401,
        ]
    assert [options["context"]["client"] for _, _, options in engine.asked] == [
        "api_key",
        "api_key-2",
    ]


@pytest.mark.parametrize("given", ["one,two", ["one", "two"]])
def test_several_keys_come_from_a_variable_or_a_file(given):
    [option] = [one for one in options_of(ServerOptions) if one.name == "api_key"]
    assert ServerOptions(api_key=option.convert(given, "here")).own_keys == ["one", "two"]
    # YAML makes a number of it.
    assert ServerOptions(api_key=option.convert(123, "here")).own_keys == ["123"]
    with pytest.raises(ConfigError, match="is empty"):
        ServerOptions(api_key=option.convert("", "here"))


def test_threads_share_an_account():
    """A large request is counted in a thread: between the check of another and its count, it finds
    no room."""
    is_inside = threading.Event()
    goes_on = threading.Event()
    refused = []

    def clock() -> float:
        if threading.current_thread() is not threading.main_thread():
            is_inside.set()
            goes_on.wait(60)
        return time.monotonic()

    class Watched:
        """The account's lock, for which the second thread waits as the first one goes on."""

        def __init__(self, lock):
            self.lock = lock

        def __enter__(self):
            if threading.current_thread() is second:
                goes_on.set()
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    key = ApiKey(name="alice", key="k", max_sequences=1, tokens_per_minute=1000)
    account = Account(key, clock)
    account._lock = Watched(account._lock)
    holds = account.run(1, 10)
    first = threading.Thread(target=holds.__enter__)

    def run() -> None:
        try:
            account.run(1, 10).__enter__()
        except ApiError as error:
            refused.append(error.status)

    second = threading.Thread(target=run)
    first.start()
    assert is_inside.wait(60)
    second.start()
    first.join()
    second.join()
    assert refused == [429]
    holds.__exit__(None, None, None)
