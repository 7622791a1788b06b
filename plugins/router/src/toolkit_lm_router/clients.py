"""The keys of a router's clients, and what each may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit_lm.errors import ConfigError
from toolkit_lm_server.caller import Caller
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.limits.key_limits import ApiKey

from toolkit_lm_router.asking import Asked
from toolkit_lm_router.fleet import Fleet


class RouterKeys(Keys):
    """The keys of the options, without limits that a router cannot hold."""

    uncounted: Mapping[str, str] = dict.fromkeys(
        ("tokens_per_minute", "max_sequences"),
        "which a router does not count. Give it to the key in the backends' own files, and leave "
        "out backend_key.",
    )
    """Limits that are not held, and why: only the server which renders and computes a request can
    count them."""

    def replace(self, keys: Sequence[ApiKey]) -> None:
        for key in keys:
            for name, why in self.uncounted.items():
                if getattr(key, name) is not None:
                    raise ConfigError(f"api_keys_file: the key {key.name!r} has {name}, {why}")
        super().replace(keys)


class SharedKeys(RouterKeys):
    """The keys of one of several routers, each of which sees a part of the requests."""

    uncounted: Mapping[str, str] = {
        **RouterKeys.uncounted,
        "requests_per_minute": "which several routers do not count together. Have one router, or "
        "leave it out.",
    }


def check_allowed(asked: Asked, caller: Caller, fleet: Fleet) -> None:
    """Raises ApiError for a model or an adapter that the client's key may not use: it is as one
    that there is not."""
    if caller.models is not None or caller.adapters is not None:
        if asked.model is None:
            raise ApiError(
                404,
                f"The key {caller.key!r} is for some models: name one of them in the field model "
                "of a JSON body.",
                param="model",
                code="model_not_found",
            )
        if not may_use(asked.model, caller, fleet):
            raise fleet.unknown(
                asked.model, [n for n in fleet.known_models if may_use(n, caller, fleet)]
            )
    if caller.adapters is None:
        return
    for name, value in asked.adapters.items():
        if value is None or not caller.may_use(value):
            raise ApiError(
                404,
                f"There is no adapter {value!r} for the key {caller.key!r}."
                if value is not None
                else f"{name} must be the name of an adapter, for a key that is for some of them.",
                param=name,
                code="model_not_found",
            )


def may_use(name: str, caller: Caller, fleet: Fleet) -> bool:
    """Whether the client's key may see and use a model, or an adapter that is listed as one."""
    return caller.may_use(name) if name in fleet.adapters else caller.may_use_model([name])
