"""Decisions of a pool: which model is loaded next, and which ones make room for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from toolkit_lm_model_pool.model import PooledModel


class Plan(Struct):
    """What is to be done now."""

    load: list[PooledModel] = field(default_factory=list)
    evict: list[PooledModel] = field(default_factory=list)
    leave: list[PooledModel] = field(default_factory=list)
    """Busy models that take no new requests, so that they become idle and can be evicted."""


def make_plan(models: Iterable[PooledModel], budget: int, turn: float, now: float) -> Plan:
    """The plan for models that share `budget` bytes. A model that is ready keeps its place for
    `turn` seconds at least.

    Whoever has waited longest comes first, and alone has others evicted: so nobody starves. Others
    are loaded meanwhile into room that it leaves.
    """
    known = list(models)
    plan = Plan()
    free = budget - sum(model.holds for model in known)
    coming = sum(model.holds for model in known if model.state == "unloading")
    pinned = sum(model.holds for model in known if model.entry.pin)
    spare: int | None = None
    """Bytes that the first one which waits for room will leave. None: none waits for room."""
    for model in _waiting(known, now):
        need = model.charge
        if need > budget - pinned:
            # It waits in vain, and keeps nobody.
            continue
        if need <= (free if spare is None else min(free, spare)):
            plan.load.append(model)
            free -= need
            spare = None if spare is None else spare - need
        elif spare is None:
            room = _make_room(plan, known, need - free - coming, turn, now)
            spare = free + coming + room - need
    return plan


def _waiting(models: Sequence[PooledModel], now: float) -> list[PooledModel]:
    """Models that somebody waits for and that could be loaded, by the time of the first wait."""
    able = [
        (since, model)
        for model in models
        if (since := model.since) is not None
        and not model.dropped
        and (model.state == "cold" or (model.state == "failed" and model.retry_at <= now))
    ]
    return [model for _, model in sorted(able, key=lambda entry: entry[0])]


def _make_room(
    plan: Plan, models: Sequence[PooledModel], missing: int, turn: float, now: float
) -> int:
    """Chooses models to evict, the idle ones of the least worth first, and then busy ones that have
    had their turn. Nothing is chosen where that would not suffice. Returns the bytes of all."""
    if missing <= 0:
        return 0
    done = [
        model
        for model in models
        if model.state == "ready" and not model.entry.pin and now - model.ready_since >= turn
    ]
    idle = sorted((model for model in done if model.is_idle), key=lambda model: model.worth(now))
    busy = sorted(
        (model for model in done if not model.is_idle), key=lambda model: model.ready_since
    )
    chosen: list[PooledModel] = []
    for model in (*idle, *busy):
        if missing <= 0:
            break
        chosen.append(model)
        missing -= model.charge
    if missing > 0:
        return 0
    plan.evict += [model for model in chosen if model.is_idle]
    plan.leave += [model for model in chosen if not model.is_idle]
    return sum(model.charge for model in chosen)
