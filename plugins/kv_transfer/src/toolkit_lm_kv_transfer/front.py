"""Front half: reads `kv_transfer_params`, in the shape that vLLM's routers send. Needs no torch.

Source: https://docs.vllm.ai/en/latest/features/nixl_connector_usage/, and the toy proxy of vLLM's
tests, which sends do_remote_decode with max_tokens 1, and passes on what the answer has.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import CacheKey, EngineRequest
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.processing import RequestHalf

from toolkit_lm_kv_transfer.settings import Address, is_enabled, peers_of
from toolkit_lm_kv_transfer.share import PARAMS, SHORT_BITS, Asked

logger = logging.getLogger(__name__)

_MOST_GROUPS = 64
_MOST_BLOCKS = 2**18
"""Most blocks of a request."""


class TransferParams(ProcessorParams):
    """Request parameters of transfers."""

    changes_forward = False
    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        param(
            "Transfer of the prompt's KV blocks between engines. do_remote_decode: the answer has "
            "params by which a peer fetches them. do_remote_prefill, with these params: this "
            "engine fetches them. do_remote_prefill with transfer_id alone: it fetches them while "
            "a peer computes the same prompt.",
            max_items=32,
            flag=False,
        ),
    ] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        stated = self.kv_transfer_params
        if stated is None:
            return None
        offers = _flag(stated, "do_remote_decode")
        fetches = _flag(stated, "do_remote_prefill")
        if offers and fetches:
            raise RequestError(
                f"{PARAMS}: do_remote_decode and do_remote_prefill are both true. The first is for "
                "the engine that computes the prompt, the second for the one that goes on.",
                PARAMS,
            )
        if not offers and not fetches:
            return None
        if not is_enabled(renderer.config):
            raise RequestError(
                "this engine transfers no caches. Start it with the option kv_transfer.listen or "
                "kv_transfer.peers.",
                PARAMS,
            )
        return {PARAMS: stated}


class TransferRequests(RequestHalf):
    """Says what a request offers or fetches. Addresses that it names are compared, and never
    connected to."""

    def __init__(self, config: VllmConfig, *, options: Any) -> None:
        super().__init__(config, options=options)
        self._listens = options.listen is not None
        self._peers = {_name(peer) for peer in peers_of(options)}
        self._warned = False

    def prepare(
        self, request: EngineRequest, arguments: Mapping[str, Any]
    ) -> tuple[Raw | None, list[CacheKey]]:
        stated = arguments.get(PARAMS)
        if stated is None:
            return None, []
        asked = self._offer(request) if stated.get("do_remote_decode") else self._fetch(stated)
        return Raw(msgpack.encode(asked)), []

    def _offer(self, request: EngineRequest) -> Asked:
        if not self._listens:
            raise RequestError(
                "do_remote_decode: no peer can fetch from this engine. Start it with the option "
                "kv_transfer.listen=HOST:PORT.",
                PARAMS,
            )
        if request.params.use_beam_search:
            raise RequestError("do_remote_decode: a beam search offers no blocks.", PARAMS)
        return Asked(offers=True)

    def _fetch(self, stated: Mapping[str, Any]) -> Asked:
        if not self._peers:
            raise RequestError(
                "do_remote_prefill: this engine has no peers. Start it with the option "
                "kv_transfer.peers=HOST:PORT.",
                PARAMS,
            )
        name = stated.get("transfer_id")
        if name is not None and not (isinstance(name, str) and name):
            raise RequestError(f"{PARAMS}: transfer_id must be a text.", PARAMS)
        if name is not None and stated.get("remote_block_ids") is None:
            return Asked(is_early=True)
        ids = _block_ids(stated.get("remote_block_ids"))
        host = stated.get("remote_host")
        port = stated.get("remote_port")
        if not isinstance(host, str) or type(port) is not int:
            raise RequestError(
                f"{PARAMS}: remote_host must be a text, and remote_port a number. Where a peer "
                "computes the prompt at the same time, transfer_id stands in their place.",
                PARAMS,
            )
        if (host.lower(), port) not in self._peers:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "a request names the engine %.200r, port %d, which is not among "
                    "kv_transfer.peers: it computes itself.",
                    host,
                    port,
                )
            return Asked(is_foreign=True)
        return Asked(fetches=ids)


def _name(address: Address) -> tuple[str, int]:
    return address.host.lower(), address.port


def _flag(stated: Mapping[str, Any], name: str) -> bool:
    value = stated.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{PARAMS}: {name} must be true or false.", PARAMS)
    return bool(value)


def _block_ids(value: Any) -> list[list[int]]:
    """Numbers of blocks, per KV group. Raises RequestError."""
    if value is None:
        return []
    if (
        not isinstance(value, list)
        or len(value) > _MOST_GROUPS
        or not all(isinstance(group, list) for group in value)
        or sum(map(len, value)) > _MOST_BLOCKS
        or not all(
            type(number) is int and 0 <= number < 2**SHORT_BITS
            for group in value
            for number in group
        )
    ):
        raise RequestError(
            f"{PARAMS}: remote_block_ids must be those of the answer to do_remote_decode: a list "
            f"of numbers for each KV group, of at most {_MOST_BLOCKS} blocks.",
            PARAMS,
        )
    return value
