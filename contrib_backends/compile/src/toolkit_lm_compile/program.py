"""Program: a plan with the model's tensors and its parts' code, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from toolkit_lm.model import Model
from torch import Tensor

from toolkit_lm_compile.capture import resolve
from toolkit_lm_compile.options import Band
from toolkit_lm_compile.split import ForwardPlan

CompiledParts = Mapping[tuple[str, Band | None], Callable[..., Any]]
"""Compiled code by part key and band. Band None: for any number of tokens."""

Step = tuple[Callable[..., Any], list[tuple[bool, Any]], list[int], bool, list[int]]
"""One call of a program: a part or an op, operands, output registers, whether it is a part, and
registers to clear.

An operand is (True, register) or (False, value).
"""


class Program:
    """Runs the forward passes whose arguments have the same names, dtypes and numbers of
    dimensions."""

    def __init__(
        self, plan: ForwardPlan, model: Model, parts: CompiledParts, bands: list[Band]
    ) -> None:
        """Resolves the plan's tensors and code.

        `bands`: bands of a single number come first, so that a step prefers them.
        """
        self.plan = plan
        self._registers: list[Any] = [None] * plan.num_registers
        """Initial registers: the model's tensors are filled in, others are None."""
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

    def _steps(self, parts: CompiledParts, band: Band | None) -> list[Step]:
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
                    [name for name in step.last if name not in held],
                )
            )
        return steps

    def steps_of(self, num_tokens: int) -> list[Step]:
        """The calls for a number of tokens, in order."""
        return next(
            (steps for (first, last), steps in self._of_bands if first <= num_tokens <= last),
            self._any,
        )

    def filled(self, arguments: Mapping[str, Tensor]) -> list[Any]:
        """The registers at the start of a pass, with arguments and symbols filled in."""
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
    """Wraps an op whose last argument is a list: the wrapper takes the list's items one by one."""
    arguments = op.default._schema.arguments
    if not isinstance(arguments[-1].type, torch.ListType):
        return op  # type: ignore[no-any-return]
    count = len(arguments) - 1

    def call(*operands: Any) -> None:
        op(*operands[:count], operands[count:])

    call.default = op.default  # type: ignore[attr-defined]
    return call
