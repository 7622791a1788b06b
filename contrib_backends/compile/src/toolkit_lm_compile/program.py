"""Program: a plan with the model's tensors and its parts' code, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from toolkit_lm.model import Model
from torch import Tensor

from toolkit_lm_compile.capture import resolve
from toolkit_lm_compile.options import Band
from toolkit_lm_compile.split import Plan

Parts = Mapping[tuple[str, Band | None], Callable[..., Any]]
"""Code by the part's key and the numbers of tokens that it is for; None: any number."""

Step = tuple[Callable[..., Any], list[tuple[bool, Any]], list[int], bool, list[int]]
"""A part or an op; its operands, each a register or a value; the registers that it fills; whether
it is a part; those last read."""


class Program:
    """Computes forward passes of one set of arguments."""

    def __init__(self, plan: Plan, model: Model, parts: Parts, bands: list[Band]) -> None:
        """`bands`: those of one number first, so that a step takes them before others."""
        self.plan = plan
        self._registers: list[Any] = [None] * plan.num_registers
        """Those of the model's tensors, filled."""
        self._arguments: list[tuple[int, str]] = []
        self._symbols: list[tuple[int, str, int]] = []
        for register, (kind, value) in enumerate(plan.inputs):
            if kind == "tensor":
                self._registers[register] = resolve(model, value)
            elif kind == "argument":
                self._arguments.append((register, value))
            else:
                self._symbols.append((register, value[0], value[1]))
        self._any = self._steps(parts, None)
        self._of_bands = [(band, self._steps(parts, band)) for band in bands]

    def _steps(self, parts: Parts, band: Band | None) -> list[Step]:
        steps = []
        held = {register for register, (kind, _) in enumerate(self.plan.inputs) if kind == "tensor"}
        for step in self.plan.steps:
            if step.kind == "op":
                space, name = step.name.split("::")
                call: Callable[..., Any] = _gathering(getattr(getattr(torch.ops, space), name))
            else:
                call = parts.get((step.name, band)) or parts[step.name, None]
            operands = [(kind == "register", value) for kind, value in step.inputs]
            steps.append(
                (
                    call,
                    operands,
                    step.outputs,
                    step.kind == "part",
                    [one for one in step.last if one not in held],
                )
            )
        return steps

    def steps_of(self, num_tokens: int) -> list[Step]:
        """What is called, in turn, for so many tokens."""
        return next(
            (steps for (first, last), steps in self._of_bands if first <= num_tokens <= last),
            self._any,
        )

    def filled(self, arguments: Mapping[str, Tensor]) -> list[Any]:
        """The registers as a pass begins."""
        registers = self._registers.copy()
        for register, name in self._arguments:
            registers[register] = arguments[name]
        for register, name, dimension in self._symbols:
            registers[register] = arguments[name].shape[dimension]
        return registers

    def __call__(self, num_tokens: int, arguments: Mapping[str, Tensor]) -> Tensor:
        registers = self.filled(arguments)
        for call, operands, outputs, gives, last in self.steps_of(num_tokens):
            out = call(
                *[registers[value] if is_register else value for is_register, value in operands]
            )
            if gives:
                if isinstance(out, tuple | list):
                    for register, value in zip(outputs, out, strict=True):
                        registers[register] = value
                else:
                    registers[outputs[0]] = out
            for register in last:
                registers[register] = None
        result: Tensor = registers[self.plan.result]
        return result


def _gathering(op: Any) -> Callable[..., Any]:
    """Takes one by one what an op takes as a list, its last argument."""
    arguments = op.default._schema.arguments
    if not isinstance(arguments[-1].type, torch.ListType):
        return op  # type: ignore[no-any-return]
    count = len(arguments) - 1

    def call(*operands: Any) -> None:
        op(*operands[:count], operands[count:])

    call.default = op.default  # type: ignore[attr-defined]
    return call
