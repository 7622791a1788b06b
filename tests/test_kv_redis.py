"""KV blocks in Redis, through the whole engine: what one engine has filled another one finds, and
whatever becomes of the store, answers are the same."""

from __future__ import annotations

import importlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kv_redis_server import start_server  # noqa: F401
from toolkit_lm import LLM
from toolkit_lm.errors import ToolkitError
from toolkit_lm_kv_redis.limits import PASSWORD

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
DISK = importlib.import_module("test_kv_disk")
PROMPTS = DISK.PROMPTS
WHOLE = DISK.WHOLE
SMALL: dict[str, Any] = DISK.SMALL
answers = DISK.answers
prompts = DISK.prompts
hybrid = DISK.hybrid


def engine(model: Path, url: str, own: Any = None, **more: Any) -> LLM:
    given = {"loads": "always", "url": url} | (own or {})
    return LLM(str(model), plugin_option={"kv_redis": given}, **SMALL | more)


def tier_of(llm: LLM) -> Any:
    return DISK.tier_of(llm, "kv_redis")


def store_of(llm: LLM) -> Any:
    return llm.engine.client.core.executor.runner._transfers._stores["kv_redis"]


def tokens(given: Any) -> list[list[int]]:
    return [[token for token, _ in each] for each in given[0]]


def settle(llm: LLM) -> None:
    """Waits until all is written."""
    until = time.monotonic() + 30
    while store_of(llm)._pending:
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def llama(make_llama):
    return make_llama("kv_disk", head_dim=32)[0]


@pytest.fixture
def server(start_server):  # noqa: F811
    return start_server()


@pytest.fixture
def plain(llama):
    """Answers without a store."""
    with LLM(str(llama), **SMALL) as llm:
        return answers(llm)


KINDS = {name: DISK.KINDS[name] for name in ("full", "window", "hybrid", "int8", "tensor")}


@pytest.mark.parametrize("kind", KINDS)
def test_what_one_engine_computes_another_finds_bit_for_bit(request, kind, llama, server):
    """While both run."""
    model = llama
    if kind == "window":
        model = request.getfixturevalue("make_windowed")()[0]
    elif kind == "hybrid":
        model = request.getfixturevalue("hybrid")
    more = dict(KINDS[kind])
    if kind == "tensor":
        more |= {"plugins": [DISK.THREADS], "executor": "threads"}
    with engine(model, server.url, **more) as first, engine(model, server.url, **more) as second:
        cold, none = answers(first)
        warm, cached = answers(first)
        first.close()
        restored, found = answers(second)
        assert tier_of(second).counts.loads == {"loaded": 4}
        assert second.engine.client.core.scheduler.blocks.num_used == 0
    assert none == [0] * 4
    assert all(cached)
    assert found == cached
    assert warm == restored
    assert tokens([cold]) == tokens([restored])
    assert all(0 < server.client.ttl(key) <= 86400 for key in server.client.keys("toolkit-lm:*"))


SCRIPT = """
import json, sys
from toolkit_lm import LLM, SamplingParams
model, url, prompts = json.loads(sys.argv[1])
options = json.loads(sys.argv[2])
llm = LLM(model, plugin_option={"kv_redis": {"url": url, "loads": "always"}}, **options)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
for prompt in prompts:
    [output] = llm.generate([prompt], params, use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids), output.num_cached_tokens]), flush=True)
llm.close()
"""


def in_process(model: Path, url: str, *before: str) -> Any:
    """Tokens and cached tokens of each prompt, from a process of its own, with another seed of
    hashes. `before`: words before its command."""
    words = [json.dumps([str(model), url, PROMPTS]), json.dumps(SMALL)]
    done = subprocess.run(
        [*before, sys.executable, "-c", SCRIPT, *words],
        check=False,
        capture_output=True,
        env=os.environ | {"PYTHONHASHSEED": str(random.randrange(1, 1000))},
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines():
    """Two network namespaces, each with a way to this one at 10.213.N.1: words that run a command
    in each. Where none can be made, no words: the processes share the machine's addresses."""
    mark = f"{os.getpid() % 10000}"
    names = [f"kvr{mark}n{number}" for number in (1, 2)]
    try:
        for number, name in enumerate(names, 1):
            end = f"kvr{mark}v{number}"
            run_ip("netns", "add", name)
            run_ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
            run_ip("addr", "add", f"10.213.{number}.1/24", "dev", end)
            run_ip("link", "set", end, "up")
            run_ip("-n", name, "addr", "add", f"10.213.{number}.2/24", "dev", "eth0")
            run_ip("-n", name, "link", "set", "eth0", "up")
            run_ip("-n", name, "link", "set", "lo", "up")
        yield [(f"10.213.{n}.1", ("ip", "netns", "exec", name)) for n, name in enumerate(names, 1)]
    except (OSError, subprocess.CalledProcessError):
        yield [("127.0.0.2", ()), ("127.0.0.3", ())]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def test_two_processes_on_two_machines(llama, machines, start_server):  # noqa: F811
    """As far as they know: each reaches the store at another address, or from another network."""
    store = start_server("--protected-mode", "no", host="0.0.0.0")
    found = [in_process(llama, f"redis://{host}:{store.port}", *words) for host, words in machines]
    assert [cached for _, cached in found[0]] == [0] * 4
    assert [cached for _, cached in found[1]] == WHOLE
    assert [answer for answer, _ in found[0]] == [answer for answer, _ in found[1]]


def test_a_store_that_dies_and_comes_back_loses_hits_alone(llama, server, plain, caplog):
    """Under load. It comes back empty."""
    ends = threading.Event()

    def trouble() -> None:
        while not ends.wait(0.3):
            server.kill()
            time.sleep(0.2)
            server.start()

    thread = threading.Thread(target=trouble)
    with engine(llama, server.url) as first, engine(llama, server.url, num_kv_blocks=30) as second:
        thread.start()
        try:
            for _ in range(6):
                assert tokens(answers(first)) == tokens(plain)
                assert tokens(answers(second)) == tokens(plain)
        finally:
            ends.set()
            thread.join()
        for llm in (first, second):
            assert llm.engine.client.core.scheduler.blocks.num_used == 0
        # It is used again.
        until = time.monotonic() + 60
        while not (tier_of(first)._asker.is_up and tier_of(second)._asker.is_up):
            assert time.monotonic() < until
            time.sleep(0.05)
        store_of(first)._may_write._until = store_of(second)._may_read._until = 0.0
        given = prompts(64)
        first.reset_prefix_cache()
        answers(first, given)
        settle(first)
        second.reset_prefix_cache()
        while not tier_of(second)._asker.is_up:
            time.sleep(0.01)
        answers(second, given)
    assert sum("is tried again later" in record.message for record in caplog.records) <= 6


def test_a_store_that_hangs_delays_no_step(llama, server, plain, monkeypatch):
    """Neither while it is asked what it has, nor while it is to send and to take blocks. A step
    that waited for it would last as long as it may be silent."""
    monkeypatch.setattr("toolkit_lm_kv_redis.store._SILENCE", 60.0)
    monkeypatch.setattr("toolkit_lm_kv_redis.asking._SILENCE", 60.0)
    monkeypatch.setattr("toolkit_lm_kv_redis.store._CLOSING", 0.1)
    monkeypatch.setattr("toolkit_lm_kv_redis.tier.RedisTier.timeout", 1.0)
    with engine(llama, server.url) as first, engine(llama, server.url) as second:
        answers(first, PROMPTS[:2])
        settle(first)
        # It has been asked, as far as the second one knows.
        tier_of(second)._asker.add(list(tier_of(first)._asker._present))
        server.stop()
        steps = []
        core = second.engine.client.core
        step = core.step

        def timed() -> Any:
            began = time.monotonic()
            try:
                return step()
            finally:
                steps.append(time.monotonic() - began)

        core.step = timed
        assert tokens(answers(second)) == tokens(plain)
        assert max(steps) < 10
        assert tier_of(second).counts.loads == {"late": 2}
        assert core.scheduler.blocks.num_used == 0
        monkeypatch.setattr("toolkit_lm_kv_redis.store._SILENCE", 0.1)
        server.go_on()


def damaged(value: bytes, other: bytes, number: int, rng: random.Random) -> bytes:
    """A value as a fault of the store, another program, or another version leaves it."""
    how = number % 6
    changed = bytearray(value)
    if how == 0:
        return value[: rng.randrange(1, len(value))]
    if how == 1:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif how == 2:
        changed[4:8] = (2 + rng.randrange(9)).to_bytes(4, "little")
    elif how == 3:
        return rng.randbytes(rng.randrange(1, 2 * len(value)))
    elif how == 4:
        changed += b"more"
    else:
        return other
    return bytes(changed)


@pytest.mark.parametrize("sealed", [False, True])
def test_200_damaged_values_are_misses(llama, server, plain, tmp_path, sealed):
    """Each alone is enough that its request computes itself. Not a block of it is used."""
    own = {"key_file": key_file(tmp_path, 1)} if sealed else {}
    with engine(llama, server.url, own) as llm:
        answers(llm)
        settle(llm)
        rng = random.Random(5)
        client = server.client
        kept = {key: client.get(key) for key in client.keys("toolkit-lm:*")}
        store = store_of(llm)
        keys = sorted(kept)
        names = [
            (int(key.split(b":")[4]), bytes.fromhex(key.split(b":")[5].decode())) for key in keys
        ]
        monkey = store._seal.name
        store._seal.name = lambda name: name
        for number in range(200):
            index = rng.randrange(len(keys))
            client.set(
                keys[index],
                damaged(kept[keys[index]], kept[keys[index - 1]], number, rng),
            )
            with pytest.raises(Exception, match=r"damaged|no block|version|key or place"):
                store.load(*names[index]).result(10)
            client.set(keys[index], kept[keys[index]])
            assert len(store.load(*names[index]).result(10)) > 0
        store._seal.name = monkey
        for key in keys:
            client.set(key, damaged(kept[key], kept[keys[0]], rng.randrange(5), rng))
        client.delete(keys[3])
        client.rpush(keys[3], "a list")
    with engine(llama, server.url, own) as llm:
        assert tokens(answers(llm)) == tokens(plain)
        assert tier_of(llm).counts.loads == {"failed": 4}
        assert llm.engine.client.core.scheduler.blocks.num_used == 0


def test_a_store_that_is_full_keeps_what_it_has(llama, start_server, plain, caplog):  # noqa: F811
    full = start_server("--maxmemory", "1mb", "--maxmemory-policy", "noeviction")
    with engine(llama, full.url) as llm:
        assert tokens(answers(llm)) == tokens(plain)
        settle(llm)
        assert tokens(answers(llm, prompts(*range(60, 70)))) is not None
        settle(llm)
        assert store_of(llm).num_lost > 0
        warnings = [record.message for record in caplog.records if "maxmemory" in record.message]
    assert len(warnings) == 1


def test_a_password_is_asked_for_and_told_nobody(
    llama,
    start_server,  # noqa: F811
    monkeypatch,
    tmp_path,
    caplog,
    capfd,
):
    store = start_server("--requirepass", "open-sesame")
    monkeypatch.delenv(PASSWORD, raising=False)
    with engine(llama, store.url) as llm:
        assert answers(llm)[1] == [0] * 4
    told = [record.message for record in caplog.records if "tried again" in record.message]
    assert len(told) == 1
    assert PASSWORD in told[0]
    monkeypatch.setenv(PASSWORD, "open-sesame")
    with engine(llama, store.url) as llm:
        assert answers(llm)[1] == [0] * 4
    monkeypatch.delenv(PASSWORD)
    (tmp_path / "password").write_text("open-sesame\n")
    with engine(llama, store.url, {"password_file": str(tmp_path / "password")}) as llm:
        assert answers(llm)[1] == WHOLE
    monkeypatch.setenv(PASSWORD, "open-sesam")
    with engine(llama, store.url) as llm:
        assert answers(llm)[1] == [0] * 4
    assert "open-sesam" not in caplog.text + "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-7\r\n:x\r\n", b"\x00" * 64]
)
def test_a_server_that_is_none_stops_nobody(llama, plain, answer, caplog):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                    connection.recv(64)
                    connection.sendall(answer)
                    connection.close()
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        with engine(llama, f"redis://127.0.0.1:{listener.getsockname()[1]}") as llm:
            assert answers(llm)[0] == plain[0]
        assert sum("tried again later" in record.message for record in caplog.records) == 1
        listener.shutdown(socket.SHUT_RDWR)


def key_file(folder: Path, number: int) -> str:
    path = folder / f"key{number}"
    path.write_bytes(random.Random(number).randbytes(32))
    path.chmod(0o600)
    return str(path)


def test_another_key_finds_nothing(llama, server, tmp_path):
    """And neither does none."""
    with engine(llama, server.url, {"key_file": key_file(tmp_path, 1)}) as llm:
        cold = answers(llm)
    for own in ({"key_file": key_file(tmp_path, 2)}, {}):
        with engine(llama, server.url, own) as llm:
            assert answers(llm)[1] == [0] * 4
    with engine(llama, server.url, {"key_file": key_file(tmp_path, 1)}) as llm:
        again = answers(llm)
    assert again[1] == WHOLE
    assert tokens(again) == tokens(cold)


def test_selective_writing_waits_for_the_second_request(llama, server):
    with engine(llama, server.url, {"write": "selective"}) as llm:
        answers(llm, PROMPTS[:2])
        settle(llm)
        assert not server.client.keys("toolkit-lm:*")
        assert tier_of(llm).counts.withheld_blocks > 0
        assert answers(llm, PROMPTS[:1])[1] == WHOLE[:1]
        # Its step has ended, and the next one writes.
        answers(llm, prompts(9))
        settle(llm)
        assert len(server.client.keys("toolkit-lm:*")) >= WHOLE[0] // 4
    with engine(llama, server.url) as llm:
        assert answers(llm, PROMPTS[:2])[1] == [WHOLE[0], 0]


def test_a_reset_empties_the_identity_alone(llama, server):
    server.client.set("toolkit-lm:1:other:0:0:00", "stays")
    with engine(llama, server.url) as llm:
        answers(llm)
        settle(llm)
        llm.reset_prefix_cache()
        until = time.monotonic() + 30
        while len(server.client.keys("*")) > 1:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert server.client.keys("*") == [b"toolkit-lm:1:other:0:0:00"]


@pytest.mark.parametrize(
    ("own", "more", "text"),
    [
        ({"url": "http://x"}, {}, "url: it begins with none of redis://"),
        ({"url": "redis://u:secret@x"}, {}, "url: it holds a password"),
        ({"url": "redis://x?db=1"}, {}, "no '\\?'"),
        ({"url": "redis://x/a"}, {}, "redis://HOST"),
        ({"url": "redis://x:99999"}, {}, "host or port"),
        ({"url": "unix://"}, {}, "a socket is"),
        ({"ttl": -1}, {}, "ttl: -1"),
        ({"namespace": ""}, {}, "namespace"),
        ({"ca_file": "x"}, {}, "ca_file: it is for servers with TLS"),
        ({"password_file": "/none"}, {}, "password_file: /none cannot be read"),
        ({"key_file": "/none"}, {}, "key_file: /none cannot be read"),
        ({}, {"enable_prefix_caching": False}, "enable_prefix_caching is False"),
    ],
)
def test_options_that_cannot_be_met_are_refused(llama, own, more, text):
    with pytest.raises(ToolkitError, match=text) as caught:
        engine(llama, own.pop("url", "redis://127.0.0.1:1"), own, **more)
    assert "secret" not in str(caught.value)
