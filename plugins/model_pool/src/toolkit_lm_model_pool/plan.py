"""Decisions of a pool: which model is loaded next, and which ones make room for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct, field

from toolkit_lm_model_pool.model import PooledModel


class Plan(Struct):
    """What is to be done now."""

    load: list[PooledModel] = field(default_factory=list)
    """Models to load, or to wake up."""
    sleep: list[PooledModel] = field(default_factory=list)
    """Idle models that fall asleep to make room."""
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
    coming = sum(model.coming for model in known)
    pinned = sum(model.holds for model in known if model.entry.pin)
    spare: int | None = None
    """Bytes that the first one which waits for room will leave. None: none waits for room."""
    ahead: list[PooledModel] = []
    """Models that wait on."""
    for model in _waiting(known, now):
        if _is_among(model, plan.evict):
            # It is loaded anew, once it is unloaded.
            continue
        kept = [other for other in known if _keeps_place(other, model)]
        if model.most > budget - pinned - sum(other.holds for other in kept):
            # It waits in vain, and keeps nobody. A sleeping one may fit if it is loaded anew.
            if model.state == "asleep":
                plan.evict.append(model)
            continue
        if any(_excludes(first, model) for first in ahead):
            continue
        need = model.most - model.holds
        blocking = [other for other in known if _is_awake(other, plan) and _excludes(model, other)]
        if blocking:
            ahead.append(model)
            if spare is None:
                spare = free + coming + _make_way(plan, blocking, turn, now) - need
        elif need <= (free if spare is None else min(free, spare)):
            plan.load.append(model)
            free -= need
            spare = None if spare is None else spare - need
        elif spare is None:
            ahead.append(model)
            others = [other for other in known if other is not model and other not in kept]
            room = _make_room(plan, others, need - free - coming, turn, now)
            spare = free + coming + room - need
    return plan


def _waiting(models: Sequence[PooledModel], now: float) -> list[PooledModel]:
    """Models that somebody waits for and that could be loaded, by the time of the first wait."""
    able = [
        (since, model)
        for model in models
        if (since := model.since) is not None
        and not model.dropped
        and (
            model.state in ("cold", "asleep") or (model.state == "failed" and model.retry_at <= now)
        )
    ]
    return [model for _, model in sorted(able, key=lambda entry: entry[0])]


def _excludes(model: PooledModel, other: PooledModel) -> bool:
    """Whether `other` must not be awake when `model` is loaded, by the rules of their groups."""
    if other is model or other.entry.pin:
        return False
    group = model.entry.group
    if group is None:
        return False
    if group == other.entry.group:
        return group.swap
    return group.exclusive and not _keeps_place(other, model)


def _keeps_place(other: PooledModel, model: PooledModel) -> bool:
    """Whether `other` is in a persistent group that is not that of `model`."""
    group = other.entry.group
    return group is not None and group.persistent and group != model.entry.group


def _is_awake(model: PooledModel, plan: Plan) -> bool:
    return model.state in ("loading", "ready", "unloading") or _is_among(model, plan.load)


def _make_way(plan: Plan, blocking: Sequence[PooledModel], turn: float, now: float) -> int:
    """Has models make way that have had their turn: idle ones at once, busy ones when their
    requests have ended. Returns the bytes that this frees."""
    freed = 0
    for model in blocking:
        if not _had_turn(model, turn, now):
            continue
        sleeps = model.entry.idle == "sleep"
        freed += model.charge - (model.resting(model.entry.sleep_level) if sleeps else 0)
        if not model.is_idle:
            plan.leave.append(model)
        elif sleeps:
            plan.sleep.append(model)
        else:
            plan.evict.append(model)
    return freed


class _Way(Struct):
    """A way to get room from a model that nothing runs on."""

    model: PooledModel
    frees: int
    """Bytes."""
    sleeps: bool = False
    """The model falls asleep. Otherwise it is unloaded."""


def _make_room(
    plan: Plan, models: Sequence[PooledModel], missing: int, turn: float, now: float
) -> int:
    """Chooses models that make room, those of the least worth first: idle ones fall asleep or are
    unloaded, and sleeping ones are unloaded. Where that does not suffice, those that would sleep
    are unloaded, and then busy ones leave that have had their turn. Nothing is chosen where all of
    that would not suffice. Returns the bytes of all."""
    if missing <= 0:
        return 0
    ways = _ways(plan, models, missing, turn, now)
    missing -= sum(way.frees for way in ways)
    busy = sorted(
        (model for model in models if _had_turn(model, turn, now) and not model.is_idle),
        key=lambda model: model.ready_since,
    )
    leave = []
    for model in busy:
        if missing <= 0:
            break
        leave.append(model)
        missing -= model.charge
    if missing > 0:
        return 0
    plan.sleep += [way.model for way in ways if way.sleeps]
    plan.evict += [way.model for way in ways if not way.sleeps]
    plan.leave += leave
    return sum(way.frees for way in ways) + sum(model.charge for model in leave)


def _had_turn(model: PooledModel, turn: float, now: float) -> bool:
    return model.state == "ready" and not model.entry.pin and now - model.ready_since >= turn


def _ways(
    plan: Plan, models: Sequence[PooledModel], missing: int, turn: float, now: float
) -> list[_Way]:
    """The cheapest ways to `missing` bytes, as far as they go."""
    found: list[tuple[bool, float, _Way]] = []
    for model in models:
        if model.state == "asleep" and not _is_among(model, plan.load):
            # One that is about to wake up goes last.
            way = _Way(model, model.holds)
            found.append((model.since is not None, model.worth(now), way))
        elif _had_turn(model, turn, now) and model.is_idle:
            frees = model.charge - model.resting(model.entry.sleep_level)
            if model.entry.idle == "sleep" and frees > 0:
                found.append((False, model.sleep_worth(now), _Way(model, frees, sleeps=True)))
            else:
                found.append((False, model.worth(now), _Way(model, model.charge)))
    chosen: list[_Way] = []
    for _, _, way in sorted(found, key=lambda entry: entry[:2]):
        if missing <= 0:
            break
        chosen.append(way)
        missing -= way.frees
    for way in sorted(chosen, key=lambda way: way.model.worth(now)):
        if missing > 0 and way.sleeps:
            missing -= way.model.charge - way.frees
            way.frees = way.model.charge
            way.sleeps = False
    for way in reversed([*chosen]):
        if way.frees <= -missing:
            missing += way.frees
            chosen.remove(way)
    return chosen


def _is_among(model: PooledModel, models: Iterable[PooledModel]) -> bool:
    return any(model is other for other in models)
