"""The table of race.py: medians, how they compare with the best peer's, and with the machine's
limits."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from race_system import WORKS

OURS = "toolkit-lm"
OUR_FLOATS = f"{OURS} bf16"
"""toolkit-lm with the weights as they are, beside quantized ones."""
LOWER_IS_BETTER = {"start": "start to first token, s", "memory": "peak memory, GB"}
GOALS = {"W1": 0.75, "W2": 0.80, "W3": 0.85, "embed": 0.85, "embed-fp32": 0.85}
"""The share of the machine's limit that toolkit-lm is to reach. The limit is known for this work
alone."""
PEER_GOALS = {"W1": 1.3, "W2": 1.15, "W3": 1.2, "W4": 1.5}
"""How many times as good as the best peer of the same bits toolkit-lm is to be."""
FLOAT_GOALS = {
    ("m2 int8", "W2"): 1.8,
    ("m2 int4", "W2"): 3.0,
    ("m2 int4", "start"): 1 / 1.2,
    ("minilm int8", "embed"): 1.5,
}
"""How many times as good as its own bf16."""
TILE_GOAL = 1.3
"""The same for W1 and W3 where the machine multiplies tiles of int8. All other work is not to be
slower than in bf16."""
MEMORY_GOAL = 0.35
"""Share of the weights' bytes in bf16 that int4 may take, beside all else that a process holds."""
COLUMNS = ["toolkit-lm ÷ best peer", "limit", "toolkit-lm ÷ limit (goal)"]
QUANTIZED_COLUMNS = ["toolkit-lm ÷ best peer (goal)", "toolkit-lm ÷ its bf16 (goal)"]

Results = dict[str, Any]


def lower_is_better(work: str) -> bool:
    return work in LOWER_IS_BETTER or work.endswith(", ms")


class Cost(NamedTuple):
    """Cost of a model: parameters of its layers and of lm_head, and FLOP of attention for a pair of
    positions."""

    body: int
    output: int
    pair: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> Cost:
        size = config["hidden_size"]
        heads = config["num_attention_heads"]
        layers = config["num_hidden_layers"]
        kv_heads = config.get("num_key_value_heads", heads)
        head = config.get("head_dim") or size // heads
        is_encoder = config.get("model_type") == "bert"
        body = (
            size * head * (2 * heads + 2 * kv_heads)
            + (2 if is_encoder else 3) * size * config["intermediate_size"]
        )
        return Cost(
            layers * body,
            0 if is_encoder else size * config["vocab_size"],
            4 * layers * heads * head,
        )

    def prefill(self, tokens: int) -> int:
        """FLOP of one prompt, which attends to what is before."""
        return 2 * self.body * tokens + 2 * self.output + self.pair * tokens**2 // 2


def bound(work: str, config: Mapping[str, Any], limits: Mapping[str, float]) -> float | None:
    """Tokens or sentences a second that the machine allows; None where nobody has counted.

    W2 reads all weights for each token. W3 multiplies them with each token, and lm_head with one of
    each prompt. W1 does so, and then reads or multiplies them in each step, whichever takes longer.
    A sentence attends to itself in both directions.
    """
    if work not in GOALS:
        return None
    cost = Cost.of(config)
    if work.startswith("embed"):
        tokens = WORKS["embed"].own
        return limits["fp32" if work.endswith("fp32") else "bf16"] / (
            2 * cost.body * tokens + cost.pair * tokens**2
        )
    prompts, _, tokens, new, _ = WORKS[work]
    read = 2 * (cost.body + cost.output) / limits["read"]
    if work == "W2":
        return 1 / read
    prefill = cost.prefill(tokens) / limits["bf16"]
    if work == "W3":
        return tokens / prefill
    multiply = 2 * (cost.body + cost.output)
    steps = [
        max(read, prompts * (multiply + cost.pair * place) / limits["bf16"])
        for place in range(tokens, tokens + new - 1)
    ]
    return prompts * new / (prompts * prefill + sum(steps))


def table(results: Results, configs: Mapping[str, Mapping[str, Any]]) -> str:
    """`configs`: those of the checkpoints, by shape. Empty without rows in bf16."""
    rates = {label: rows for label, rows in _rates(results).items() if not _is_quantized(label)}
    if not rates:
        return ""
    systems = _columns(results, rates)
    header = ["shape", "work", *systems.values(), *COLUMNS]
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for label, rows in rates.items():
        for work in sorted(rows, key=lambda work: work in LOWER_IS_BETTER):
            cells = [
                label,
                LOWER_IS_BETTER.get(work, work),
                *(cell(work, rows[work].get(name)) for name in systems),
            ]
            cells += [
                ratio(work, rows[work]),
                *limit_cells(results, label, work, configs[label.split(",")[0]]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def quantized_table(
    results: Results, configs: Mapping[str, Mapping[str, Any]], has_int8_tiles: bool
) -> str:
    """Rows of other precisions than bf16, with our own bf16 beside the peers. Empty where there are
    none."""
    rates = {label: rows for label, rows in _rates(results).items() if _is_quantized(label)}
    if not rates:
        return ""
    systems = _columns(results, rates)
    header = ["shape", "work", *systems.values(), *QUANTIZED_COLUMNS]
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    for label, rows in rates.items():
        for work in sorted(rows, key=lambda work: work in LOWER_IS_BETTER):
            row = rows[work]
            peers = {name: found for name, found in row.items() if name.split()[0] != OURS}
            ours = {OURS: row[OURS]} if OURS in row else {}
            floats = {OUR_FLOATS: row[OUR_FLOATS]} if OUR_FLOATS in row else {}
            cost = Cost.of(configs[label.split()[0]])
            goal = float_goal(label, work, row, cost, has_int8_tiles)
            cells = [
                label,
                LOWER_IS_BETTER.get(work, work),
                *(cell(work, row.get(name)) for name in systems),
                _against(ratio(work, {**ours, **peers}), PEER_GOALS.get(work)),
                _against(ratio(work, {**ours, **floats}), goal),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def float_goal(
    label: str, work: str, row: Mapping[str, Sequence[float]], cost: Cost, has_int8_tiles: bool
) -> float | None:
    """How many times as good as in bf16 the row is to be."""
    if work == "memory":
        if label != "m2 int4" or OUR_FLOATS not in row:
            return None
        weights = 2 * (cost.body + cost.output) / 1e9
        floats = summary(work, row[OUR_FLOATS])
        return floats / (floats - (1 - MEMORY_GOAL) * weights)
    if (label, work) in FLOAT_GOALS:
        return FLOAT_GOALS[label, work]
    if work in LOWER_IS_BETTER:
        return None
    return TILE_GOAL if has_int8_tiles and work in ("W1", "W3") else 1.0


def _against(found: str, goal: float | None) -> str:
    return found if goal is None or found == "–" else f"{found} ({goal:.2f})"


def _rates(results: Results) -> Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]:
    return results.get("rates", {})


def _is_quantized(label: str) -> bool:
    return label.split()[-1] in ("int8", "int4")


def _columns(
    results: Results, rates: Mapping[str, Mapping[str, Mapping[str, object]]]
) -> dict[str, str]:
    """Systems of these rows, with their version in the heading."""
    there = {name for rows in rates.values() for row in rows.values() for name in row}
    return {
        name: f"{name} {version}" for name, version in results["versions"].items() if name in there
    }


def limit_cells(results: Results, label: str, work: str, config: Mapping[str, Any]) -> list[str]:
    ours = results["rates"][label][work].get(OURS)
    if work == "start" and ours and (floor := results.get("start", {}).get(label, {}).get("floor")):
        return [f"{floor:.1f}", f"{summary(work, ours) / floor:.2f}"]
    limits = results.get("row-limits", {}).get(label, {}).get(work)
    most = bound(work, config, limits) if limits else None
    if not most:
        return ["", ""]
    share = f"{summary(work, ours) / most:.0%} ({GOALS[work]:.0%})" if ours else ""
    return [f"{most:,.0f}", share]


def limits_of(results: Results, key: str) -> dict[str, float]:
    """The best of all parts: a limit, and no average."""
    return best_limits([part[key] for part in results["limits"]])


def best_limits(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {kind: max(one[kind] for one in found) for kind in ("read", "bf16", "fp32")}


def summary(work: str, values: Sequence[float]) -> float:
    return max(values) if work == "memory" else statistics.median(values)


def cell(work: str, values: Sequence[float] | None) -> str:
    """The median and, of rates, the least and the greatest."""
    if not values:
        return "–"
    if work in LOWER_IS_BETTER:
        return f"{summary(work, values):.1f}"
    digits = 1 if min(values) < 100 else 0
    return (
        f"{statistics.median(values):,.{digits}f} "
        f"({min(values):,.{digits}f}–{max(values):,.{digits}f})"
    )


def ratio(work: str, row: Mapping[str, Sequence[float]]) -> str:
    """How many times as good as the best peer we are. Of rates: the median of the ratios of runs
    that followed one another."""
    ours = row.get(OURS)
    peers = {name: values for name, values in row.items() if name != OURS}
    if not peers or not ours:
        return "–"
    if work in LOWER_IS_BETTER:
        return (
            f"{min(summary(work, values) for values in peers.values()) / summary(work, ours):.2f}"
        )
    if lower_is_better(work):
        best = min(peers.values(), key=statistics.median)
        ratios = [theirs / mine for mine, theirs in zip(ours, best, strict=True)]
        return f"{statistics.median(ratios):.2f}"
    best = max(peers.values(), key=statistics.median)
    return (
        f"{statistics.median(mine / theirs for mine, theirs in zip(ours, best, strict=True)):.2f}"
    )


def limits_line(results: Results) -> str:
    def line(name: str, found: Mapping[str, float]) -> str:
        return (
            f"{name}: read {found['read'] / 1e9:.0f} GB/s, bf16 {found['bf16'] / 1e9:.0f} "
            f"GFLOP/s, fp32 {found['fp32'] / 1e9:.0f} GFLOP/s"
        )

    return "\n".join(
        [
            line("alone", limits_of(results, "limits")),
            line("beside a busy process", limits_of(results, "limits-busy")),
        ]
    )


def start_lines(results: Results) -> str:
    """The phases of our start."""
    return "\n".join(
        f"start of toolkit-lm, {label}: "
        f"{', '.join(f'{phase} {seconds:.2f} s' for phase, seconds in found['phases'].items())}; "
        f"import torch and read weights alone: {found['floor']:.2f} s"
        for label, found in results.get("start", {}).items()
    )
