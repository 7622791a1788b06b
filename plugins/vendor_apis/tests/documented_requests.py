"""Requests that a vendor documents, and whether the answers are those that it documents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import toolkit_lm_tiny

PAGE = Path(__file__).parents[3] / "docs" / "vendor_apis.md"
LABELS = {"0": "angry", "1": "calm", "2": "glad"}
LEAST_SHARE = 0.94


class Documented(NamedTuple):
    """A request, and what its answer must be."""

    request: str
    """Method and path."""
    body: Any
    holds: Callable[[Any], Any]
    """Whether the answer is as documented: JSON, the events of a stream, or a text."""
    status: int = 200
    engine: str = "generate"


async def fault_of(client: httpx.AsyncClient, asked: Documented) -> str | None:
    """What is wrong with the answer. None: it is as documented."""
    method, path = asked.request.split()
    reply = await client.request(method, path, json=asked.body)
    told = f"{asked.request}: {reply.status_code} {reply.text[:500]}"
    if reply.status_code != asked.status:
        return told
    try:
        return None if asked.holds(read(reply)) else told
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return f"{error!r}: {told}"


def read(reply: httpx.Response) -> Any:
    """The content of an answer."""
    kind = reply.headers.get("content-type", "")
    if kind.startswith("text/event-stream"):
        lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]
    return reply.json() if kind.startswith("application/json") else reply.text


def share_of(vendor: str, checks: Mapping[str, Documented], not_held: Mapping[str, str]) -> str:
    """The row of docs/vendor_apis.md. Raises AssertionError where too many do not hold, or the page
    does not say so."""
    assert not_held.keys() <= checks.keys()
    held = len(checks) - len(not_held)
    share = held / len(checks)
    row = f"| {vendor} | {len(checks)} | {held} | {share:.1%} |"
    page = " ".join(PAGE.read_text().split())
    assert row in page, f"{PAGE.name} must have {row}"
    assert [reason for reason in not_held.values() if reason not in page] == []
    assert share >= LEAST_SHARE
    return row


def classifier(folder: Path, num_labels: int) -> str:
    """A checkpoint of a classifier with tiny's tokenizer, to be loaded with random weights. With
    one label it is a cross-encoder."""
    tiny = Path(toolkit_lm_tiny.__file__).parent / "checkpoint"
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / file, folder)
    config = json.loads((tiny / "config.json").read_text())
    config["architectures"] = ["LlamaForSequenceClassification"]
    config["id2label"] = {key: LABELS[key] for key in list(LABELS)[:num_labels]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
