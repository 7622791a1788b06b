"""A real server process with a small random model, asked by the official client and by curl."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from ports import free_port
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 260
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)
SOON = 30
"""Seconds: many times what it takes on a busy machine, and less than what a server would wait for
that does not end by itself."""
FLAGS = [
    "--load-format",
    "dummy",
    "--device",
    "cpu",
    "--num-kv-blocks",
    "512",
    "--max-num-seqs",
    "8",
    "--served-model-name",
    "random",
]


def write_checkpoint(folder) -> None:
    """A byte-level tokenizer without merges, and a config; the weights are made up by --load-format
    dummy."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}, merges=[]
        )
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": TEMPLATE})
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))


class Server:
    """`toolkit serve` as a process of its own."""

    def __init__(self, *arguments: str, prelude: str = "") -> None:
        command = [
            sys.executable,
            "-c",
            f"{prelude}\nfrom toolkit_lm_cli import main; main()",
            "serve",
            *arguments,
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
        )

    def url(self) -> str:
        """Waits for the line that says the server is ready."""
        line = self.process.stdout.readline()
        assert line.startswith("Serving random at http://127.0.0.1:"), (
            line + self.process.stderr.read()
        )
        return line.split()[-1]

    def end(self) -> tuple[int, str]:
        """Its exit code, and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def url(checkpoint):
    server = Server(str(checkpoint), *FLAGS, "--port", "0", "--no-access-log")
    try:
        yield server.url()
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.end()
        assert code == 0, errors
        assert "Traceback" not in errors
    finally:
        server.process.kill()


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as one:
        yield one


HI = [{"role": "user", "content": "hi 😀"}]
FOREVER = {"ignore_eos": True}


def gauges(url) -> tuple[float, float, float]:
    """Running, waiting, cache usage."""
    text = httpx.get(f"{url}/metrics").text.replace('{model_name="random"}', "")
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    names = ("num_sequences_running", "num_requests_waiting", "kv_cache_usage_ratio")
    return tuple(float(figures[f"toolkit_lm_{name}"]) for name in names)


def wait_for(condition, seconds=20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def test_openai_chat(client):
    reply = client.chat.completions.create(
        model="random", messages=HI, max_tokens=8, temperature=0, extra_body=FOREVER
    )
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (8, "length")
    stream = client.chat.completions.create(
        model="random",
        messages=HI,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=FOREVER,
    )
    *chunks, last = list(stream)
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        == reply.choices[0].message.content
    )
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        reply.usage.prompt_tokens,
        8,
    )


def test_openai_completions(client):
    options = {"model": "random", "max_tokens": 6, "seed": 1, "extra_body": FOREVER}
    reply = client.completions.create(prompt=["one", "two"], n=2, logprobs=2, echo=False, **options)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    # Tokens that are parts of a character share the text "�", so a table may be smaller than asked
    # for.
    assert all(
        len(choice.logprobs.tokens) == 6 and 1 <= len(choice.logprobs.top_logprobs[0]) <= 3
        for choice in reply.choices
    )
    again = client.completions.create(prompt=["one", "two"], n=2, stream=True, **options)
    texts = [""] * 4
    for chunk in again:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in reply.choices]


def test_openai_logprobs_and_stop(client):
    reply = client.chat.completions.create(
        model="random",
        messages=HI,
        max_tokens=4,
        logprobs=True,
        top_logprobs=3,
        temperature=0,
        extra_body=FOREVER,
    )
    content = reply.choices[0].logprobs.content
    assert len(content) == 4
    assert all(
        one.top_logprobs[0].token == one.token and len(one.top_logprobs) == 3 for one in content
    )
    plain = (
        client.completions.create(
            model="random", prompt="a", max_tokens=30, temperature=0, extra_body=FOREVER
        )
        .choices[0]
        .text
    )
    stop = next(char for char in plain if char not in plain[0] + "�")
    cut = client.completions.create(
        model="random", prompt="a", max_tokens=30, temperature=0, stop=stop, extra_body=FOREVER
    ).choices[0]
    assert (cut.text, cut.finish_reason) == (plain.split(stop)[0], "stop")


def test_openai_sampling_parameters(client):
    options = {"model": "random", "prompt": "aaaa", "max_tokens": 12, "temperature": 0}
    plain = client.completions.create(**options, logprobs=0, echo=True, extra_body=FOREVER).choices[
        0
    ]
    assert len(plain.logprobs.tokens) == 4 + 12 and plain.logprobs.token_logprobs[0] is None
    assert plain.logprobs.tokens[:4] == list("aaaa") and plain.text.startswith("aaaa")
    prompt = (
        client.completions.create(**options, extra_body={**FOREVER, "prompt_logprobs": 0})
        .choices[0]
        .prompt_logprobs
    )
    found = [next(iter(one.values()))["logprob"] for one in prompt[1:]]
    assert found == pytest.approx(plain.logprobs.token_logprobs[1:4], abs=1e-4)
    biased = (
        client.completions.create(**options, logit_bias={"40": 100.0}, extra_body=FOREVER)
        .choices[0]
        .text
    )
    assert len(set(biased)) == 1
    # The made-up weights give logits that differ by less than the penalty: the two tokens take
    # turns.
    pair = {**FOREVER, "allowed_token_ids": [40, 41]}
    text = (
        client.completions.create(**options, frequency_penalty=2, extra_body=pair).choices[0].text
    )
    assert len(text) == 12 and [text.count(char) for char in set(text)] == [6, 6]
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(**options, extra_body={"no_repeat_ngram_size": -2})
    assert wrong.value.param == "no_repeat_ngram_size"
    letters = {**FOREVER, "allowed_token_ids": list(range(50, 70)), "no_repeat_ngram_size": 1}
    distinct = client.completions.create(**options, extra_body=letters).choices[0].text
    assert len(set(distinct)) == 12
    # With so low a value only the most typical token is kept: nothing is random.
    options["temperature"] = 1
    for typical_p, texts in ((1e-6, 1), (1.0, 3)):
        found = [
            client.completions.create(
                **options, seed=i, extra_body={**FOREVER, "typical_p": typical_p}
            )
            for i in range(3)
        ]
        assert len({reply.choices[0].text for reply in found}) == texts
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(**options, extra_body={"xtc_probability": 2})
    assert wrong.value.param == "xtc_probability"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_usage_speak_of_the_prompt_that_was_read(client, stream):
    """Of a prompt that is cut, the engine reads its end."""
    options = {
        "model": "random",
        "prompt": "abcdefgh",
        "max_tokens": 3,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
        "stream": stream,
    }
    options["extra_body"] = {**FOREVER, "truncate_prompt_tokens": 4}
    if stream:
        chunks = list(client.completions.create(**options, stream_options={"include_usage": True}))
        choices = [chunk.choices[0] for chunk in chunks[:-1]]
        usage = chunks[-1].usage
    else:
        reply = client.completions.create(**options)
        choices = reply.choices
        usage = reply.usage
    assert "".join(choice.text for choice in choices).startswith("efgh")
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
    assert len(tokens) == 4 + 3 and tokens[:4] == list("efgh")
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 3)


def test_openai_best_of_and_beam_search(client):
    def texts(**options):
        return [
            c.text
            for c in client.completions.create(
                model="random", prompt="abc", max_tokens=6, **options
            ).choices
        ]

    every = client.completions.create(
        model="random", prompt="abc", max_tokens=6, n=4, seed=5, logprobs=0
    ).choices
    ranked = sorted(
        every,
        key=lambda c: sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs),
        reverse=True,
    )
    assert texts(n=2, best_of=4, seed=5) == [c.text for c in ranked[:2]]
    search = {"use_beam_search": True, "beam_width": 4, "early_stopping": True}
    found = texts(n=3, extra_body=search)
    assert len(set(found)) == 3 and texts(n=1, extra_body=search) == found[:1]
    with pytest.raises(
        openai.BadRequestError, match="use_beam_search is allowed only when stream is false"
    ):
        texts(n=2, stream=True, extra_body=search)


def test_openai_models_and_errors(client):
    assert [model.id for model in client.models.list()] == ["random"]
    assert client.models.retrieve("random").id == "random"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-5", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="random", prompt="x" * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="no robots"):
        client.chat.completions.create(
            model="random", messages=[{"role": "robot", "content": "beep"}]
        )


BAD = [
    {"prompt": ""},
    {"prompt": [VOCAB]},
    {"prompt": [10**30]},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "n": 1000},
    {"prompt": "a", "n": 9},
    {"prompt": "a", "logprobs": 1000},
    {"prompt": "a", "top_k": 10**30},
    {"prompt": "a", "min_tokens": 10**18, "max_tokens": None},
    {"prompt": "a", "stop_token_ids": [-1]},
    {"prompt": "a", "stop_token_ids": [2**31 - 1], "max_tokens": "a"},
    {"prompt": ["a"] * 300},
    {"prompt": ["a", ""]},
    {"prompt": "x" * 5_000_000},
]


def test_bad_requests_harm_no_others(client, url):
    def good(_):
        return (
            client.completions.create(
                model="random", prompt="good", max_tokens=40, temperature=0, extra_body=FOREVER
            )
            .choices[0]
            .text
        )

    def bad(body):
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60)

    expected = good(0)
    with ThreadPoolExecutor(6) as pool:
        goods = [pool.submit(good, i) for i in range(4)]
        replies = list(pool.map(bad, BAD))
        assert [future.result() for future in goods] == [expected] * 4
    assert [(reply.status_code, reply.json()["error"]["type"]) for reply in replies] == [
        (400, "invalid_request_error")
    ] * len(BAD)
    assert httpx.get(f"{url}/health").status_code == 200
    wait_for(lambda: gauges(url) == (0, 0, 0))


@pytest.mark.parametrize("token_id", [-1, VOCAB, 10**30])
def test_a_token_id_that_the_model_does_not_have_is_named(url, token_id):
    for path, body, param in (
        ("/v1/completions", {"prompt": [5, token_id]}, "prompt"),
        ("/detokenize", {"tokens": [5, token_id]}, "tokens"),
    ):
        reply = httpx.post(f"{url}{path}", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert reply.json()["error"]["message"].startswith(
            f"token id {token_id} is not in the vocabulary, which has the ids from 0 to"
        )


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_blocks(client, url, stream):
    wait_for(lambda: gauges(url) == (0, 0, 0))
    body = {
        "model": "random",
        "prompt": ["a", "b"],
        "n": 2,
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": stream,
    }
    with httpx.Client() as one:
        if stream:
            with one.stream("POST", f"{url}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                wait_for(lambda: gauges(url)[0] == 4)
        else:
            with pytest.raises(httpx.ReadTimeout):
                one.post(f"{url}/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.3))
    wait_for(lambda: gauges(url) == (0, 0, 0))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(url):
    def curl(path, *arguments):
        done = subprocess.run(
            ["curl", "-sS", "-w", "\n%{http_code}", url + path, *arguments],
            capture_output=True,
            text=True,
            check=True,
        )
        text, _, status = done.stdout.rpartition("\n")
        return int(status), text

    json_header = ("-H", "Content-Type: application/json")
    status, text = curl(
        "/v1/completions",
        *json_header,
        "-d",
        '{"prompt": "hello", "max_tokens": 3, "stream": true}',
    )
    assert (status, text.strip().splitlines()[-1]) == (200, "data: [DONE]")
    status, text = curl("/v1/completions", *json_header, "-d", "{oops")
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")
    status, text = curl("/v1/completions", "-d", "prompt=hello")
    assert (status, json.loads(text)["error"]["type"]) == (400, "invalid_request_error")
    status, text = curl("/tokenize", *json_header, "-d", '{"prompt": "hello"}')
    tokens = json.loads(text)["tokens"]
    assert (status, len(tokens)) == (200, 5)
    status, text = curl("/detokenize", *json_header, "-d", json.dumps({"tokens": tokens}))
    assert (status, json.loads(text)) == (200, {"prompt": "hello"})
    assert curl("/health") == (200, '{"status":"ready"}')
    assert curl("/version")[0] == 200
    assert "toolkit_lm_time_to_first_token_seconds_count" in curl("/metrics")[1]


GATED = """
import time
from contextlib import asynccontextmanager
from pathlib import Path
from toolkit_lm.plugin import hookimpl

GATE = Path(__file__).with_name("gate")

@hookimpl
def toolkit_configure(config, options):
    while not GATE.exists():
        time.sleep(0.02)
    match GATE.read_text():
        case "raise":
            raise RuntimeError("not today")
        case "too long":
            return config.replace(max_model_len=10**6)

@hookimpl
def toolkit_register_routes(router, engine, options):
    @router.get("/gated")
    async def gated() -> list[str]:
        return opened

    opened = []

    @asynccontextmanager
    async def lifespan():
        opened.append(engine.served_model_name)
        yield
        print("closed", flush=True)

    return lifespan
"""


@pytest.fixture
def gate(tmp_path, monkeypatch):
    """A file for which an installed plugin waits in toolkit_configure. It says what to do."""
    (tmp_path / "gated_plugin.py").write_text(GATED)
    info = tmp_path / "gated_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gated-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[toolkit_lm]\ngated = gated_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path / "gate"


@pytest.fixture
def gated(checkpoint, gate):
    """A server that waits for the file. Gives the server, its URL and the file."""
    port = free_port()
    server = Server(
        str(checkpoint), *FLAGS, "--port", str(port), "--routes", "gated", "--log-level", "warning"
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: status(f"{url}/live") == 200)
        yield server, url, gate
    finally:
        server.process.kill()
        server.process.communicate()


def status(url) -> int | None:
    """None: nobody answers."""
    try:
        return httpx.get(url, timeout=1).status_code
    except httpx.TransportError:
        return None


def test_answers_while_plugins_configure(gated):
    """Requests that come early wait for the engine, with a large body too."""
    server, url, gate = gated
    assert httpx.get(f"{url}/live").json() == {"status": "starting", "reason": "configuring"}
    ready = httpx.get(f"{url}/health")
    assert (ready.status_code, ready.json()["status"], "retry-after" in ready.headers) == (
        503,
        "starting",
        True,
    )
    pool = ThreadPoolExecutor(3)
    bodies = [
        {"prompt": "a", "max_tokens": 2},
        {"prompt": "a", "max_tokens": 2, "user": "x" * 2**20},
    ]
    early = [
        pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60) for body in bodies
    ]
    early.append(pool.submit(httpx.get, f"{url}/gated", timeout=60))
    time.sleep(0.5)
    assert not any(one.done() for one in early)
    assert (
        'toolkit_lm_engine_status{model_name="random",status="starting"} 1.0'
        in httpx.get(f"{url}/metrics").text
    )
    gate.touch()
    assert server.url() == url
    assert [one.result().status_code for one in early] == [200] * 3
    assert (httpx.get(f"{url}/health").json(), httpx.get(f"{url}/gated").json()) == (
        {"status": "ready"},
        ["random"],
    )
    assert (
        httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code
        == 200
    )
    server.process.send_signal(signal.SIGTERM)
    out, errors = server.process.communicate(timeout=60)
    assert (server.process.returncode, out) == (0, "closed\n"), errors


@pytest.mark.parametrize(
    ("what", "expected", "message"),
    [
        ("too long", 2, "error: --max-model-len is 1000000"),
        pytest.param(
            "raise", 1, "error: plugin 'gated' (gated-plugin 1.0, ", marks=pytest.mark.slow
        ),
    ],
)
def test_a_start_that_fails_late_is_one_message(gated, what, expected, message):
    server, _, gate = gated
    gate.with_name("whole").write_text(what)
    gate.with_name("whole").rename(gate)
    code, errors = server.end()
    assert code == expected
    assert errors.startswith(message)
    assert len(errors.splitlines()) == 1


def test_stops_in_time_while_plugins_configure(gated):
    server, _, _ = gated
    start = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    code, errors = server.end()
    assert (code, errors) == (0, "")
    assert time.monotonic() - start < SOON


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_while_it_imports(checkpoint, gate, number):
    """The engine is being made in a thread, and a KeyboardInterrupt could leave that without the
    lock of an import."""
    prelude = f"""
import sys, time, pathlib
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "toolkit_lm_server.lifecycle":
            pathlib.Path({str(gate.with_name("importing"))!r}).touch()
            time.sleep(60)
sys.meta_path.insert(0, Slow())"""
    server = Server(str(checkpoint), *FLAGS, "--port", "0", prelude=prelude)
    try:
        wait_for(gate.with_name("importing").exists)
        start = time.monotonic()
        server.process.send_signal(number)
        code, errors = server.end()
        assert time.monotonic() - start < SOON
        assert (code, errors) == (0, "")
    finally:
        server.process.kill()


def test_the_garbage_collector_lets_what_stays_alone(checkpoint):
    prelude = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count(), "
        "gc.get_threshold()[2], file=sys.stderr))"
    )
    server = Server(str(checkpoint), *FLAGS, "--port", "0", prelude=prelude)
    try:
        server.url()
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.end()
    finally:
        server.process.kill()
    num_frozen, rarely = map(int, errors.splitlines()[-1].split())
    assert code == 0 and num_frozen > 10_000 and rarely == 1_000


def test_a_port_in_use_is_one_message_before_the_model_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, errors = Server("/no/such/model", "--port", port).end()
    assert code == 2
    assert errors.startswith(
        f"error: cannot listen on 127.0.0.1 port {port}: Address already in use"
    )
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--routes", "nobody"], "no loaded plugin 'nobody' has HTTP routes"),
        (["--host", "nowhere.invalid"], "'nowhere.invalid' is not an address to listen on"),
        (["--max-body-size", "half"], "--max-body-size must be a number of bytes"),
    ],
)
def test_wrong_options_are_one_message(arguments, message):
    code, errors = Server(*arguments).end()
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


LONG = {"prompt": "a", "max_tokens": 2000, "stream": True, "ignore_eos": True}


def test_stops_in_time_with_requests_under_way(checkpoint):
    server = Server(str(checkpoint), *FLAGS, "--port", "0", "--shutdown-timeout", "1")
    try:
        url = server.url()
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG) as response:
            lines = response.iter_lines()
            next(lines)
            start = time.monotonic()
            server.process.send_signal(signal.SIGINT)
            *_, error, _, done, _ = lines
        code, errors = server.end()
        assert (done, json.loads(error[6:])["error"]["code"]) == ("data: [DONE]", "engine_dead")
        assert code == 0, errors
        assert time.monotonic() - start < SOON
        assert "Traceback" not in errors
    finally:
        server.process.kill()


PARTS = [
    b"",
    b"POST /v1/completions HTTP/1.1\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n",
]
"""Of requests: nothing, a part of the head, the head without its body."""


@pytest.fixture
def connections() -> Iterator[Callable[[str, list[bytes]], None]]:
    """connections(url, parts): as many, each of which sends its part. They are closed at the
    end."""
    found: list[socket.socket] = []

    def connect(url: str, parts: list[bytes]) -> None:
        host, _, port = url.removeprefix("http://").partition(":")
        for part in parts:
            found.append(socket.create_connection((host, int(port))))
            found[-1].sendall(part)

    yield connect
    for one in found:
        one.close()


def test_stops_in_time_whatever_clients_do(checkpoint, connections):
    server = Server(
        str(checkpoint),
        *FLAGS,
        "--port",
        "0",
        "--shutdown-timeout",
        "1",
        "--log-level",
        "warning",
        "--no-access-log",
        *(
            word
            for name in ("header", "body", "keep-alive")
            for word in (f"--{name}-timeout", "100")
        ),
    )
    try:
        connections(server.url(), PARTS * 10)
        start = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.end()
        # Heads of 8 elements are not for the backend `cpu`.
        others = [line for line in errors.splitlines() if "runs on attention backend" not in line]
        assert (code, others) == (0, [])
        assert time.monotonic() - start < SOON
    finally:
        server.process.kill()


@pytest.mark.slow
def test_more_connections_than_file_descriptors(checkpoint, connections):
    prelude = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
    server = Server(
        str(checkpoint),
        *FLAGS,
        "--port",
        "0",
        "--no-access-log",
        "--shutdown-timeout",
        "0",
        prelude=prelude,
    )
    try:
        url = server.url()
        connections(url, PARTS * 200)
        stat = Path(f"/proc/{server.process.pid}/stat")
        before = cpu_seconds(stat)
        times = []
        for path in ("/health", "/metrics") * 5:
            start = time.monotonic()
            assert httpx.get(f"{url}{path}").status_code == 200
            times.append(time.monotonic() - start)
        time.sleep(1)
        # Each would wait a second where descriptors run out.
        assert sorted(times)[5] < 1 and max(times) < 10
        assert cpu_seconds(stat) - before < 1
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.end()
        assert code == 0
        assert len(errors) < 10_000 and "Traceback" not in errors
    finally:
        server.process.kill()


def cpu_seconds(stat) -> float:
    """That a process has taken."""
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def redirected(checkpoint):
    """redirected(redirection): a server whose shell redirects its streams, which nobody reads.
    Gives its process and its URL."""
    made = []

    def start(redirection):
        port = str(free_port())
        command = [
            sys.executable,
            "-c",
            "from toolkit_lm_cli import main; main()",
            "serve",
            str(checkpoint),
            *FLAGS,
            "--port",
            port,
        ]
        shell = ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        made.append(
            subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
        )
        wait_for(
            lambda: status(f"http://127.0.0.1:{port}/ready") == 200 or made[0].poll() is not None,
            60,
        )
        return made[0], f"http://127.0.0.1:{port}"

    yield start
    for one in made:
        one.kill()
        one.communicate()


@pytest.mark.parametrize(
    "closed",
    ["<&- >&- 2>&-", *(pytest.param(one, marks=pytest.mark.nightly) for one in (">&-", "2>&-"))],
)
def test_closed_streams(redirected, closed):
    process, url = redirected(closed)
    for _ in range(3):
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert (reply.status_code, reply.json()["object"]) == (200, "text_completion")
    assert httpx.post(f"{url}/v1/completions", json={}).status_code == 400
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_log_that_nobody_reads(redirected):
    """The pipe holds 64 KiB, the log is larger."""
    process, url = redirected("")
    with httpx.Client(timeout=30) as client:
        for _ in range(200):
            assert client.get(f"{url}/{'x' * 600}").status_code == 404
    assert (
        httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code
        == 200
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_ends_when_the_engine_dies(checkpoint):
    prelude = """
from toolkit_lm.engine.core import EngineCore
step, steps = EngineCore.step, []
def dying(self):
    steps.append(1)
    if len(steps) > 20:
        raise MemoryError("no more")
    return step(self)
EngineCore.step = dying"""
    server = Server(str(checkpoint), *FLAGS, "--port", "0", "--no-engine-process", prelude=prelude)
    try:
        response = httpx.post(f"{server.url()}/v1/completions", json={**LONG, "stream": False})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
        code, errors = server.end()
        assert code == 1
        assert errors.splitlines()[-1] == "error: the engine has died: MemoryError: no more"
    finally:
        server.process.kill()


def test_a_broken_plugin_is_warned_of_once(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('it is broken')\n")
    info = tmp_path / "broken_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[toolkit_lm]\nbroken = broken_plugin\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    server = Server(str(checkpoint), *FLAGS, "--port", "0", "--log-level", "warning")
    try:
        assert (
            'toolkit_lm_engine_status{model_name="random",status="ready"} 1.0'
            in httpx.get(f"{server.url()}/metrics").text
        )
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.end()
    finally:
        server.process.kill()
    assert code == 0, errors
    assert errors.count("it is broken") == 1, errors
    assert errors.startswith("warning: plugin 'broken' (broken-plugin 1.0, ")
