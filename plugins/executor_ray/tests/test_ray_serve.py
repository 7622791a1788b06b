"""The example of Ray Serve answers, and grows under load."""

from __future__ import annotations

import importlib.util
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from openai import OpenAI

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "ray_serve.py"


@pytest.fixture
def url(cluster, monkeypatch):
    """The address at which the example serves."""
    from ray import serve
    from ray.serve._private import api, client

    # The minute that Ray gives a proxy is too short on a busy machine.
    for module in (api, client):
        monkeypatch.setattr(module, "HTTP_PROXY_TIMEOUT", 300)
    spec = importlib.util.spec_from_file_location("ray_serve_example", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)
    spec.loader.exec_module(example)
    # No replica finds the file by its name.
    ray.cloudpickle.register_pickle_by_value(example)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(example.app)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        serve.shutdown()


def ask(client: OpenAI) -> str:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = client.chat.completions.create(
        model="tiny", messages=question, temperature=0, max_tokens=24
    )
    return answer.choices[0].message.content


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_it_answers(url):
    with OpenAI(base_url=url, api_key="none", timeout=60) as client:
        assert "Paris" in ask(client)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_replicas_of_the_app(url):
    with OpenAI(base_url=url, api_key="none", timeout=60) as client:
        assert "Paris" in ask(client)
        end = time.monotonic() + 180
        # Load only until a second one starts: it would start beside that.
        with ThreadPoolExecutor(64) as threads:
            while num_replicas("STARTING", "RUNNING") < 2 and time.monotonic() < end:
                assert all("Paris" in one for one in threads.map(ask, [client] * 64))
        while num_replicas("RUNNING") < 2 and time.monotonic() < end:
            time.sleep(0.2)
        assert num_replicas("RUNNING") == 2
        assert "Paris" in ask(client)


def num_replicas(*states: str) -> int:
    from ray import serve

    (application,) = serve.status().applications.values()
    (deployment,) = application.deployments.values()
    return sum(deployment.replica_states.get(state, 0) for state in states)
