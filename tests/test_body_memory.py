"""The memory that the largest body of each route takes of the front, beside what the server
estimates for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MOST = 1.5
"""A peak may be so many times its estimate."""
NO_BODIES = {"/ping", "/reset_prefix_cache", "/v1/responses/{response_id}/cancel"}
"""Routes whose handlers read no body."""


@pytest.fixture(
    scope="module",
    params=["generate"]
    + [
        pytest.param(one, marks=pytest.mark.nightly)
        for one in ("embed", "generate all", "embed all")
    ],
)
def measured(request) -> dict:
    """Peak and estimate in bytes, and the status, by route and body. Measured in a process of its
    own."""
    script = Path(__file__).with_name("body_memory.py")
    done = subprocess.run(
        [sys.executable, script, *request.param.split()],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_no_route_takes_more_than_is_estimated(measured):
    assert not measured["unknown"], (
        f"POST routes without a largest body in body_memory.py: {measured['unknown']}"
    )
    assert measured["statuses"].keys() == set(measured["routes"]) - NO_BODIES
    served = {
        path for path, statuses in measured["statuses"].items() if set(statuses) - {400, 404, 413}
    }
    assert len(served) >= 4, "most bodies are refused, so that nothing is measured"
    over = {one["name"]: one for one in measured["bodies"] if one["peak"] > MOST * one["estimate"]}
    assert over == {}
