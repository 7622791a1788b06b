"""Replicas of the toolkit's app on a Ray cluster, by Ray Serve: as many as the load needs.

usage: serve run ray_serve:app    (in this folder; MODEL, by default tiny, is what is served)
"""

from __future__ import annotations

import os

from fastapi import FastAPI
from ray import serve
from toolkit_lm import AsyncLLM
from toolkit_lm.config import VllmConfig
from toolkit_lm_server.app import create_app


def make_app() -> FastAPI:
    """The app of one replica, with an engine of its own."""
    llm = AsyncLLM(VllmConfig.make(model=os.environ.get("MODEL", "tiny")))
    made = create_app(llm)
    made.state.llm = llm
    return made


@serve.deployment(
    ray_actor_options={"num_cpus": 1},
    max_ongoing_requests=256,
    autoscaling_config={
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 16,
        "upscale_delay_s": 5,
    },
)
@serve.ingress(make_app)
class Replica:
    """Ray starts a second one when the first has more than 16 requests under way, and ends it when
    they are few."""


app = Replica.bind()
