"""An app of Ray Serve: replicas that are engines, behind the router. Imports no Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["serve_app"]


def serve_app(config: dict[str, Any]) -> Application:
    """An app for `serve.run`, or for `serve run toolkit_lm_ray_serve:serve_app model=MODEL`.

    `config`: the engine's options, by name; and the groups `server`, `router` and `scaling`, each a
    dict of options, or written `scaling.max_replicas`. Raises ConfigError.
    """
    from toolkit_lm_ray_serve.app import make

    return make(config)
