"""Weights that a trainer sends over a group of its own and a server."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from ports import free_port
from safetensors.torch import load_file
from test_rl_server import asked, served, tokens
from toolkit_lm_rl import transfer
from toolkit_lm_rl.transfer import InitInfo, Transfer, UpdateInfo
from toolkit_lm_rl.weight_group import WeightGroup, WeightGroupError
from toolkit_lm_server.errors import ApiError

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn),
    *(torch.int8, torch.int64),
]


def init_info(port: int, **changes) -> dict:
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    return {"init_info": place | changes}


def described(tensors) -> dict:
    return {
        "names": [*tensors],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [[*tensor.shape] for tensor in tensors.values()],
    }


async def met(client, port: int) -> WeightGroup:
    """The trainer's end of a group, whose other end is the server's."""
    joined, _ = await asyncio.gather(
        asyncio.to_thread(WeightGroup, "127.0.0.1", port, 0, 2),
        asked(client, "POST", "/init_weight_transfer_engine", json=init_info(port)),
    )
    return joined


def send(group: WeightGroup, tensors) -> None:
    for tensor in tensors.values():
        group.broadcast(tensor, 0)


@pytest.mark.anyio
async def test_a_trainer_sends_its_weights(policies, tmp_path):
    new = load_file(policies / "new" / "model.safetensors")
    async with served(policies, own={"weight_transfer": "gloo"}, admin_routes=True) as client:
        before = await tokens(client)
        group = await met(client, free_port())
        await asked(client, "POST", "/start_weight_update")
        names = [*new]
        for part in (names[:3], names[3:]):
            piece = {name: new[name] for name in part}
            _, found = await asyncio.gather(
                asyncio.to_thread(send, group, piece),
                asked(client, "POST", "/update_weights", json={"update_info": described(piece)}),
            )
            assert found == {"message": "Weights updated"}
            # Nothing is changed before all have come.
            assert await tokens(client) == before
        found = await asked(client, "POST", "/finish_weight_update", json={})
        assert found["weight_version"] == "1"
        after = await tokens(client)
        assert after != before
        # A trainer that goes away in the middle changes nothing.
        call = asked(client, "POST", "/update_weights", 504, json={"update_info": described(new)})
        waiting = asyncio.create_task(call)
        await asyncio.to_thread(send, group, {names[0]: new[names[0]]})
        group.close()
        assert f"did not send {names[1]}" in (await waiting)["error"]["message"]
        body = {"update_info": described(new)}
        found = await asked(client, "POST", "/update_weights", 400, json=body)
        assert "/init_weight_transfer_engine comes before" in found["error"]["message"]
        found = await asked(client, "POST", "/finish_weight_update", 400, json={})
        assert await tokens(client) == after
    # The new checkpoint itself gives these tokens.
    (tmp_path / "old").symlink_to(policies / "new")
    async with served(tmp_path) as client:
        assert await tokens(client) == after


@pytest.mark.anyio
async def test_they_are_refused_in_plain_words(policies):
    async with served(policies, admin_routes=True) as client:
        found = await asked(
            client, "POST", "/init_weight_transfer_engine", 400, json=init_info(1234)
        )
        assert "rl.weight_transfer" in found["error"]["message"]
    async with served(policies, own={"weight_transfer": "gloo"}) as client:
        # Only operators have the route.
        await asked(client, "POST", "/init_weight_transfer_engine", 404, json=init_info(1234))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("changes", "culprit"),
    [({"world_size": 2}, "world_size"), ({"world_size": 3, "rank_offset": 2}, "rank_offset")],
)
async def test_a_group_of_others_is_refused(changes, culprit):
    info = InitInfo(**init_info(1234, **changes)["init_info"])
    with pytest.raises(ApiError) as raised:
        await Transfer(is_on=True, world_size=2).join(info)
    assert raised.value.body["error"]["param"] == culprit


@pytest.mark.anyio
async def test_a_trainer_that_does_not_come_is_an_error():
    info = InitInfo(**init_info(free_port())["init_info"])
    with pytest.raises(ApiError, match="No trainer was met"):
        await Transfer(is_on=True, world_size=1, seconds=0.5).join(info)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "Give path"),
        ({"path": "x", "names": ["a"], "dtype_names": ["int8"], "shapes": [[1]]}, "Give path"),
        ({"names": ["a", "b"], "dtype_names": ["int8"], "shapes": [[1]]}, "2, 1 and 1 entries"),
        ({"names": ["a"], "dtype_names": ["int3"], "shapes": [[1]]}, "a: dtype 'int3' is none of"),
        ({"names": ["a"], "dtype_names": ["int8"], "shapes": [[1 << 40, 2]]}, "a: shape"),
    ],
)
def test_what_is_announced_is_checked(fields, text):
    with pytest.raises(ApiError, match=text):
        UpdateInfo(**fields).announced()


def test_every_dtype_arrives_bit_by_bit():
    """Between three ranks, from each of them."""
    port = free_port()
    found: dict[int, list[torch.Tensor]] = {}

    def rank(number: int) -> None:
        group = WeightGroup("127.0.0.1", port, number, 3, 60)
        group.barrier()
        found[number] = []
        for source, dtype in enumerate(DTYPES):
            made = torch.arange(-5, 7).reshape(3, 4).to(dtype)
            mine = made if number == source % 3 else torch.zeros_like(made)
            # Neither rank has it in the order of memory.
            group.broadcast(mine.T, source % 3)
            found[number].append(mine)
        group.broadcast(torch.empty(0), 0)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {name: getattr(torch, name).itemsize for name in transfer._SIZES} == transfer._SIZES
    assert {*transfer._SIZES} >= {str(d).removeprefix("torch.") for d in DTYPES}
    for place, dtype in enumerate(DTYPES):
        expected = torch.arange(-5, 7).reshape(3, 4).to(dtype).view(torch.uint8)
        for number in range(3):
            assert torch.equal(found[number][place].view(torch.uint8), expected)


def test_a_group_that_was_left_says_so():
    group = WeightGroup("127.0.0.1", free_port(), 0, 1)
    group.close()
    with pytest.raises(WeightGroupError, match="was left"):
        group.broadcast(torch.zeros(1), 0)
