"""Sources that are not fetched: bytes, data URLs, and the texts that are neither."""

from __future__ import annotations

import base64
import time

import pytest
from toolkit_lm.errors import ConfigError, RequestError
from toolkit_lm_media import addresses
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.source import load_bytes

LIMITS = MediaLimits(
    max_bytes=1000, allowed_hosts=("images.example.com", "bücher.example", "other.example:8080")
)
HEAD = "data:image/png;base64,"
REFUSED = {
    "nothing": ("", "none of a data URL"),
    "no bytes": (b"", "it is empty"),
    "many bytes": (bytes(1001), "more than the 1000 bytes"),
    "a path": ("/etc/passwd", "none of a data URL"),
    "a file": ("file:///etc/passwd", "none of a data URL"),
    "ftp": ("ftp://images.example.com/a.png", "none of a data URL"),
    "a space before": (" " + HEAD + "AAAA", "none of a data URL"),
    "a long text": ("a" * 10_000_000, "none of a data URL"),
    "an empty data URL": (HEAD, "it is empty"),
    "a data URL without base64": ("data:image/png,abc", "only base64"),
    "a data URL without a comma": ("data:image/png;base64" + "A" * 9_000_000, "only base64"),
    "a data URL that is too long": (HEAD + "A" * 100_000_000, "more than 1000 bytes"),
    "a data URL that is a byte too long": (
        HEAD + base64.b64encode(bytes(1001)).decode(),
        "more than 1000 bytes",
    ),
    "base64 without padding": (HEAD + "AAA", "broken"),
    "base64 with spaces": (HEAD + "AA AA", "broken"),
    "base64 with a line's end": (HEAD + "AAAA\n", "broken"),
    "base64 with more after its padding": (HEAD + "AA==AAAA", "broken"),
    "base64 for URLs": (HEAD + "-_-_", "broken"),
    "base64 of other letters": (HEAD + "ＡAAA", "broken"),
    "another host": (
        "http://evil.example/a.png",
        "'evil.example' is not allowed; the operator allows hosts with allowed_media_hosts",
    ),
    "a host below": ("http://a.images.example.com/", "'a.images.example.com' is not allowed"),
    "a host above": ("http://images.example.com.evil.example/", "is not allowed"),
    "an address": ("http://2130706433/", "'2130706433' is not allowed"),
    "an IPv6 address": ("http://[::1]/", "'::1' is not allowed"),
    "a user": ("http://images.example.com@evil.example/", "a user's name"),
    "a user of an allowed host": ("http://me:secret@images.example.com/", "a user's name"),
    "a backslash": ("http://evil.example\\@images.example.com/", "a backslash"),
    "a tab": ("http://images.example\t.com/", "a control character"),
    "another port": ("http://images.example.com:22/", "'images.example.com:22' is not allowed"),
    "the other scheme's port": (
        "http://images.example.com:443/",
        "'images.example.com:443' is not allowed",
    ),
    "no port where one is needed": ("http://other.example/", "'other.example' is not allowed"),
    "a port out of range": ("http://images.example.com:99999/", "out of range"),
    "port 0": ("http://images.example.com:0/", "out of range"),
    "no host": ("http:///a.png", "no host"),
    "two dots": ("http://images.example.com../", "is not allowed"),
    "letters that look alike": (
        "http://imаges.example.com/",
        "'xn--imges-5ve.example.com' is not allowed",
    ),
    "wide letters": ("http://ｉmages.example.com/", "malformed"),
    "a long URL": ("http://images.example.com/" + "a" * 9_000_000, "more than 8192 characters"),
    "a long host": ("http://" + "a" * 8000 + "/", "is not allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "resolve", lambda *_: pytest.fail("a host was looked up"))
    source, message = REFUSED[name]
    start = time.perf_counter()
    with pytest.raises(RequestError) as caught:
        load_bytes(source, LIMITS, label="image 2", param="messages")
    assert time.perf_counter() - start < 8
    assert str(caught.value).startswith("image 2: ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400
    assert "secret" not in str(caught.value)
    assert caught.value.param == "messages"


def test_hosts_are_refused_by_default() -> None:
    with pytest.raises(RequestError, match="allowed_media_hosts"):
        load_bytes("https://images.example.com/a.png", MediaLimits())


@pytest.mark.parametrize("size", [1, 2, 3, 998, 999, 1000])
@pytest.mark.parametrize("head", [HEAD, "DATA:;BASE64,", "data:image/png;name=a.png;base64,"])
def test_data_urls(head: str, size: int) -> None:
    data = bytes(n % 256 for n in range(size))
    assert load_bytes(head + base64.b64encode(data).decode(), LIMITS) == data
    assert load_bytes(data, LIMITS) is data


@pytest.mark.parametrize(
    "change",
    [
        {"max_bytes": 0},
        {"max_pixels": 0},
        {"max_pixels": 10**9},
        {"timeout": 0.0},
        {"timeout": float("nan")},
        {"max_redirects": -1},
        *(
            {"allowed_hosts": (host,)}
            for host in ("", "http://a", "a/b", "a b", "me@a", "a:b", "[::1", "*%", "a\\b")
        ),
    ],
)
def test_limits_that_make_no_sense(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        MediaLimits(**change)
