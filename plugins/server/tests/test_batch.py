"""`toolkit run-batch`: the format, what is read and written when, and what goes on after a
break."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import msgspec
import pytest
from toolkit_lm.errors import ConfigError, ToolkitError
from toolkit_lm_server.batch.rows import Answer, Answered, Row, Unreadable, read_rows
from toolkit_lm_server.batch.run import Counts, run_rows
from toolkit_lm_server.batch.target import Target


def request(custom_id, url="/v1/completions", **body):
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": url,
            "body": {"model": "fake", "prompt": "abc", **body},
        }
    )


def rows_of(text, most=1000):
    return list(read_rows(io.BytesIO(text.encode()), most))


def by_id(text):
    return {row["custom_id"]: row for row in map(json.loads, text.splitlines())}


# Rows


def test_rows_keep_their_bodies_as_they_stand():
    body = (
        '{"model": "a",  "temperature": 1e-1, "n": 123456789012345678901234567890, "x": "\\u00e9"}'
    )
    line = request("1").replace(json.dumps({"model": "fake", "prompt": "abc"}), body)
    [row] = rows_of(f"\ufeff{line}\n\n  \n")
    assert (row.custom_id, row.url, bytes(row.body), row.line) == (
        "1",
        "/v1/completions",
        body.encode(),
        1,
    )


@pytest.mark.parametrize(
    ("line", "custom_id", "why"),
    [
        ("nonsense", None, "is not JSON"),
        ("[" * 100_000, None, "more than"),
        ("[1]", None, "no request"),
        ('{"custom_id": "a", "body": ' + "[" * 900, None, "is not JSON"),
        ('{"custom_id": "a"}', "a", "missing required field"),
        (
            '{"custom_id": "", "method": "POST", "url": "/v1/completions", "body": {}}',
            "",
            "length >= 1",
        ),
        (
            '{"custom_id": 1, "method": "POST", "url": "/v1/completions", "body": {}}',
            None,
            "custom_id must be text, not a whole number",
        ),
        (
            '{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}',
            "a",
            "Invalid enum value 'GET'",
        ),
        (
            '{"custom_id": "a", "method": "POST", "url": "/reset_prefix_cache", "body": {}}',
            "a",
            "is none of /v1/chat",
        ),
        (
            (
                '{"custom_id": "a", "method": "POST", "url": "http://10.0.0.1/v1/completions", '
                '"body": {}}'
            ),
            "a",
            "is none of /v1/chat",
        ),
        (
            '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}',
            "a",
            "must be an object",
        ),
        (
            (
                '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": '
                '{"stream": true}}'
            ),
            "a",
            "asks for a stream",
        ),
    ],
)
def test_a_line_that_is_no_request_says_why(line, custom_id, why):
    found, good = rows_of(f"{line}\n{request('good')}")
    assert isinstance(found, Unreadable) and isinstance(good, Row)
    assert (found.line, found.custom_id, good.line) == (1, custom_id, 2)
    assert why in found.reason


# The run


def pretty(answer):
    """JSON over several lines. `json.dumps(indent=1)` leaves cycles, which hold memory until a
    collection."""
    return msgspec.json.format(msgspec.json.encode(answer), indent=1)


class Scripted:
    """Answers with the prompt. A row waits for the next one, where its prompt says so."""

    def __init__(self):
        self.asked = Counter()
        self.most = self.now = 0
        self.event = asyncio.Event()

    async def ask(self, row):
        self.asked[row.custom_id] += 1
        prompt = json.loads(bytes(row.body))["prompt"]
        self.now += 1
        self.most = max(self.most, self.now)
        await (self.event.wait() if prompt == "wait" else asyncio.sleep(0))
        self.now -= 1
        if prompt == "fail":
            raise ToolkitError("away")
        if prompt == "go":
            self.event.set()
        content = b"no json" if prompt == "html" else pretty({"text": prompt, "error": None})
        return Answer(404 if prompt == "missing" else 200, "r1", content)


def run(text, target, output, concurrency=4, answered=None):
    rows = read_rows(io.BytesIO(text.encode()), 10_000)

    async def main():
        return await run_rows(
            rows, target(), output, concurrency=concurrency, answered=answered or Answered()
        )

    return asyncio.run(main())


def test_answers_are_written_as_they_come():
    out = io.BytesIO()
    counts = run(
        "\n".join([request("1", prompt="wait"), request("2"), "x", request("3", prompt="go")]),
        Scripted,
        out,
    )
    assert (counts.done, counts.refused, counts.unreadable) == (3, 0, 1)
    *others, last = map(json.loads, out.getvalue().splitlines())
    assert last["custom_id"] == "1"
    assert last["response"] == {
        "status_code": 200,
        "request_id": "r1",
        "body": {"text": "wait", "error": None},
    }
    assert last["error"] is None and last["id"].startswith("batch_req_")
    assert {row["custom_id"] for row in others} == {"2", "3", None}


def test_what_is_refused_says_so_in_its_row():
    out = io.BytesIO()
    counts = run(
        "\n".join(
            [request("1", prompt="missing"), request("2", prompt="html"), '{"custom_id": "3"}']
        ),
        Scripted,
        out,
    )
    assert (counts.done, counts.refused, counts.unreadable) == (2, 2, 1)
    found = by_id(out.getvalue())
    assert (found["1"]["response"]["status_code"], found["1"]["error"]["code"]) == (404, "404")
    assert "not JSON: no json" in found["2"]["error"]["message"]
    assert (found["3"]["response"], found["3"]["error"]["code"], found["3"]["error"]["line"]) == (
        None,
        "invalid_row",
        3,
    )


def test_no_more_rows_are_under_way_than_asked_for():
    made = []

    def make():
        made.append(Scripted())
        return made[0]

    lines = [
        *(request(str(number), prompt="wait") for number in range(2)),
        *(request(str(number)) for number in range(2, 40)),
    ]
    run("\n".join([*lines, request("last", prompt="go")]), make, io.BytesIO(), concurrency=3)
    assert made[0].most == 3 and sum(made[0].asked.values()) == 41


def test_a_batch_that_breaks_off_keeps_what_it_has():
    out = io.BytesIO()
    with pytest.raises(ToolkitError, match="away"):
        run(
            "\n".join(
                [
                    request("1"),
                    request("2", prompt="fail"),
                    *(request(str(n)) for n in range(3, 90)),
                ]
            ),
            Scripted,
            out,
            concurrency=1,
        )
    assert list(by_id(out.getvalue())) == ["1"]


def test_a_huge_file_takes_little_memory():
    """100 MB of rows, of which 5 KB are in memory at a time."""

    class Endless(io.RawIOBase):
        left = 10_000
        line = request("1", prompt="x" * 10_000).encode() + b"\n"

        def readline(self, most=-1):
            self.left -= 1
            return self.line if self.left >= 0 else b""

    class Nowhere:
        write = flush = staticmethod(lambda *_: None)

    async def main():
        return await run_rows(
            read_rows(Endless(), 100_000), Scripted(), Nowhere(), concurrency=8, answered=Answered()
        )

    tracemalloc.start()
    try:
        assert asyncio.run(main()).done == 10_000
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()


# Going on


def test_going_on_skips_what_is_there_and_mends_a_cut_line(tmp_path):
    path = tmp_path / "out.jsonl"
    with path.open("w+b") as file:
        run("\n".join([request("1"), "nonsense", request("2")]), Scripted, file)
    path.write_bytes(path.read_bytes() + b'{"id": "batch_req_1", "custom_id": "3", "resp')
    with path.open("r+b") as file:
        counts = run(
            "\n".join([request("1"), "nonsense", request("2"), request("3")]),
            Scripted,
            file,
            answered=Answered.of(file, "out.jsonl"),
        )
    assert (counts.done, counts.skipped, counts.unreadable) == (1, 2, 1)
    rows = [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]
    assert sorted(rows, key=str) == ["1", "2", "3", None]


def test_a_line_that_was_mended_is_asked(tmp_path):
    file = io.BytesIO()
    run('{"custom_id": "1"}', Scripted, file)
    file.seek(0)
    assert run(request("1"), Scripted, file, answered=Answered.of(file, "out")).done == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_last_line_without_its_end_is_kept_where_it_is_whole(whole):
    line = b'{"custom_id": "1", "error": null}'
    file = io.BytesIO(line if whole else line[:-1])
    answered = Answered.of(file, "out")
    assert file.getvalue() == (line + b"\n" if whole else b"")
    [row] = rows_of(request("1"))
    assert (row in answered) is whole


def test_going_on_with_another_file_is_refused():
    for text in (b"some notes\n", b'{"custom": 1}\n{"custom_id": "1"}\n'):
        with pytest.raises(ConfigError, match="line 1 of 'notes' is no row of an output"):
            Answered.of(io.BytesIO(text), "notes")


# Servers


def ask(handle, first_pause=0.0):
    """What a target makes of a server's answers."""

    async def main():
        async with httpx.AsyncClient(
            transport=httpx.MockTransport(handle), base_url="http://test"
        ) as client:
            return await Target(client, "the server", first_pause).ask(*rows_of(request("1")))

    return asyncio.run(main())


def test_ignored_fields_are_told():
    answer = ask(
        lambda _: httpx.Response(200, text="{}", headers={"x-ignored-fields": "temprature, foo"})
    )
    counts = Counts()
    for ignored in (answer.ignored, "", "foo"):
        counts.ignore(ignored)
    assert list(counts.ignored) == ["temprature", "foo"]


def test_a_busy_server_is_asked_again():
    answers = [
        httpx.Response(503),
        httpx.ReadError("gone"),
        httpx.Response(429, headers={"retry-after": "0"}),
        httpx.Response(200, text="{}"),
    ]

    def handle(_):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert (ask(handle).content, answers) == (b"{}", [])


@pytest.mark.parametrize(
    ("status", "text", "num_asked"),
    [
        (503, "busy", 6),
        (503, "engine_dead", 1),
        (401, "wrong key", 1),
        (400, "no", 1),
        (500, "no", 1),
    ],
)
def test_what_is_of_no_use_for_any_row_ends_the_batch(status, text, num_asked):
    asked = []

    def handle(request):
        asked.append(request)
        return httpx.Response(status, text=text)

    if status in (400, 500):
        assert ask(handle).status == status
    else:
        with pytest.raises(ToolkitError, match=text):
            ask(handle)
    assert len(asked) == num_asked


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._json(200 if self.headers.get("Authorization") == "Bearer k" else 401, {"data": []})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._json(
            400 if body["prompt"] == "bad" else 200, {"text": body["prompt"], "path": self.path}
        )

    def _json(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_): ...


@pytest.fixture
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_answers_a_file(toolkit, tmp_path, url, monkeypatch):
    text = "\n".join(
        [request("1", prompt="a"), request("2", prompt="bad"), request("3", url="/v1/score")]
    )
    requests = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    requests.write_text(text)
    arguments = ("run-batch", "--url", f"{url}/v1/", "--api-key", "k", "--concurrency", "2")
    done = toolkit(*arguments, "-i", requests, "-o", out)
    assert (done.code, done.out) == (0, "")
    assert "3 rows, 1 refused in " in done.err
    found = by_id(out.read_text())
    assert found["1"]["response"]["body"] == {"text": "a", "path": "/v1/completions"}
    assert found["3"]["response"]["body"]["path"] == "/v1/score"
    assert found["2"]["response"]["status_code"] == 400 and found["2"]["error"] is not None

    again = toolkit(*arguments, "-i", requests, "-o", out)
    assert again.code == 2 and "--resume goes on with it" in again.err
    requests.write_text(text + "\n" + request("4") + "\nnonsense")
    done = toolkit(*arguments, "-i", requests, "-o", out, "--resume")
    assert done.code == 1 and "1 rows, 1 unreadable, 3 skipped" in done.err
    assert set(by_id(out.read_text())) == {"1", "2", "3", "4", None}
    assert toolkit(*arguments, "-i", requests, "-o", out, "--overwrite").code == 1
    assert len(out.read_text().splitlines()) == 5

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(request("5").encode())))
    done = toolkit(*arguments, "-i", "-", "-o", "-")
    assert (done.code, list(by_id(done.out))) == (0, ["5"])


def test_what_cannot_be_done_is_said_before_anything_is_asked(toolkit, tmp_path, url):
    requests = tmp_path / "in.jsonl"
    requests.write_text(request("1"))
    out = tmp_path / "out.jsonl"
    for arguments, code, why in (
        (["-i", "http://127.0.0.1/x", "-o", out], 2, "is an address"),
        (["-i", requests, "-o", "https://127.0.0.1/x"], 2, "is an address"),
        (["-i", requests, "-o", requests, "--overwrite"], 2, "would be overwritten"),
        (["-i", tmp_path / "none", "-o", out], 2, "cannot be opened"),
        (["-i", requests, "-o", out, "--resume", "--overwrite"], 2, "it goes on with a file"),
        (["tiny", "-i", requests, "-o", out], 2, "the rows name the model"),
        (["-i", requests, "-o", out, "--api-key", "wrong"], 1, "refuses all requests (401)"),
        (["-i", requests, "-o", out, "--max-body-size", "0.5"], 2, "--max-body-size"),
    ):
        done = toolkit("run-batch", "--url", url, *arguments)
        assert (done.code, why in done.err) == (code, True), done.err
    done = toolkit("run-batch", "--url", "http://127.0.0.1:1", "-i", requests, "-o", out)
    assert (done.code, "no answer from the server" in done.err) == (1, True)


def test_an_interrupt_ends_it_while_there_may_be_more_to_read(url, tmp_path):
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from "
        "toolkit_lm_cli import main; main()"
    )
    out = tmp_path / "out.jsonl"
    arguments = [
        sys.executable,
        "-c",
        code,
        "run-batch",
        "--url",
        url,
        "--api-key",
        "k",
        "-i",
        "-",
        "-o",
        out,
    ]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdin.write(f"{request('1')}\n{request('2')}\n")
        process.stdin.flush()
        while not out.exists() or out.read_text().count("\n") < 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


def test_an_engine_of_its_own_answers_as_a_server_would(toolkit, checkpoint, tmp_path):
    body = {"model": "m", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": "chat",
            "url": "/v1/chat/completions",
            "body": {**body, "messages": [{"role": "user", "content": "Hi"}]},
        },
        {"custom_id": "text", "url": "/v1/completions", "body": {**body, "prompt": ["a", "b"]}},
        {"custom_id": "long", "url": "/v1/completions", "body": {**body, "prompt": "x" * 1000}},
        {
            "custom_id": "name",
            "url": "/v1/completions",
            "body": {**body, "model": "other", "prompt": "x"},
        },
        {"custom_id": "task", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}},
        *(
            {"custom_id": str(n), "url": "/v1/completions", "body": {**body, "prompt": str(n)}}
            for n in range(20)
        ),
    ]
    requests = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    requests.write_text("".join(json.dumps({"method": "POST", **line}) + "\n" for line in lines))
    small = (
        "--load-format",
        "dummy",
        "--num-kv-blocks",
        "64",
        "--max-num-seqs",
        "4",
        "--served-model-name",
        "m",
    )
    done = toolkit("run-batch", checkpoint, "-i", requests, "-o", out, *small)
    assert (done.code, "25 rows, 3 refused" in done.err) == (0, True), done.err
    found = by_id(out.read_text())
    assert len(found) == len(lines)
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert len(found["text"]["response"]["body"]["choices"]) == 2
    assert [found[name]["response"]["status_code"] for name in ("long", "name", "task")] == [
        400,
        404,
        400,
    ]
    assert found["long"]["error"]["code"] == "context_length_exceeded"
    assert all(
        found[str(n)]["response"]["body"]["usage"]["completion_tokens"] == 3 for n in range(20)
    )
