"""Checks that every number of an outer step is finite, without waiting for a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bilevel.errors import NonFiniteError
from bilevel.problem import Number
from bilevel.variables import Variable, largest_entries, longest_step, require_finite, stored_values


class FiniteCheck:
    """Sees to it that no number of one outer step is infinite or NaN.

    With ``at_once`` a bad number raises where it is found, which costs nothing on a CPU. To ask a
    device means to wait for it; there a number is only noted. From the first bad number on nothing
    moves, because updates are given the flag :attr:`bad`, and :meth:`read` raises at the end of the
    step or later.

    Args:
        step: k, for the message.
        at_once: whether to look at each number where it is found.
        before: the check of the step before, if it was not read yet; what was bad there is bad
            here.
    """

    def __init__(self, step: int, *, at_once: bool, before: FiniteCheck | None = None) -> None:
        self._step = step
        self._at_once = at_once
        self._notes: list[tuple[list[str], Tensor]] = []
        self._fine: Tensor | None = None if before is None else before._fine
        self._posted: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def step(self) -> int:
        """The number k of the outer step."""
        return self._step

    def scalars(self, values: Sequence[Tensor], names: Callable[[], list[str]]) -> None:
        """Check scalars that are about to be differentiated; ``names`` makes the message."""
        looks = self._at_once and values[0].device.type == "cpu"  # a device is asked once for all
        if looks and all(math.isfinite(value.item()) for value in values):
            return
        self.numbers(names(), [value.detach() for value in values])

    def numbers(self, names: list[str], values: list[Tensor]) -> None:
        """Check 0-dimensional tensors of the given names."""
        if self._at_once:
            require_finite(self._step, names, values)
            return
        seen = torch.stack(values)  # copied: a captured graph overwrites its last results
        fine = seen.abs().amax() < math.inf  # false for NaN, and fewer launches than isfinite
        self._fine = fine if self._fine is None else self._fine & fine
        self._notes.append((names, seen))

    def gradients(
        self, moves: Sequence[tuple[Variable, Number]], *, averaged: bool = False
    ) -> None:
        """Check the gradients on variables, each with the length of the step along it.

        The step must not overflow either. On several ranks gradients become their means, unless
        they are ``averaged`` already.
        """
        by_variable = [stored_values(variable.grads()) for variable, _ in moves]
        if not self._at_once:
            pairs = zip(moves, by_variable, strict=True)
            self.steps([(v, v.gradient_names, grads, rate) for (v, rate), grads in pairs])
            return
        grads = [grad for grads in by_variable for grad in grads]
        # the Euclidean norm is no smaller than the largest entry and fast to get
        total = sum([norm.item() for norm in torch._foreach_norm(grads)])
        longest = longest_step(grads)
        for variable, rate in moves:
            if not abs(float(rate)) * total <= longest:  # also true for NaN
                variable.require_finite_grads(self._step, float(rate))

    def complete(self, variable: Variable) -> None:
        """The gradients on the leaves are complete; on several ranks, average them."""

    def average(self, parts: Sequence[tuple[Variable, list[Tensor]]]) -> None:
        """Check sums of gradients that are not on the leaves; on ranks, replace them by means."""
        for variable, tensors in parts:
            grads = stored_values(tensors)
            if self._at_once:
                require_finite(self._step, variable.gradient_names, grads)
            else:
                self.numbers(variable.gradient_names, largest_entries(grads))

    def means(self, values: list[Tensor]) -> list[Tensor]:
        """Values to be reported; on several ranks, their means."""
        return values

    def norm(self, variable: Variable, grads: list[Tensor]) -> Tensor:
        """The Euclidean norm of gradients, with those parts that other ranks hold."""
        return variable.gradient_norm(grads)

    def steps(self, parts: Sequence[tuple[Variable, list[str], list[Tensor], Number]]) -> None:
        """Note the gradients of variables, and the steps of given lengths along them.

        All are noted together, in few launches on a device.
        """
        grads = [grad for *_, own, _ in parts for grad in own]
        if not grads:
            return
        peaks = largest_entries(grads)
        # infinite exactly where a step is longer than longest_step; not finite where a peak is not
        lengths = torch._foreach_mul(
            peaks, [4 * abs(float(rate)) for *_, own, rate in parts for _ in own]
        )
        names: list[str] = []
        values: list[Tensor] = []
        for variable, own_names, own, _ in parts:
            here = slice(len(values) // 2, len(values) // 2 + len(own))
            names += [*own_names, *[f"the step of {variable.name}"] * len(own)]
            values += [*peaks[here], *lengths[here]]
        self.numbers(names, values)

    @property
    def bad(self) -> Tensor | None:
        """A flag on the device: whether a noted number is not finite; None: nothing was noted."""
        return None if self._fine is None else ~self._fine

    def post(self) -> None:
        """Start to copy the answer from the device, so that :meth:`read` waits for nothing else."""
        if self._fine is not None and self._fine.is_cuda:
            answer = torch.empty((), dtype=torch.bool, pin_memory=True, device="cpu")
            answer.copy_(self._fine, non_blocking=True)
            there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            there.record()
            self._posted = answer, there

    def read(self) -> None:
        """Raise :class:`~bilevel.errors.NonFiniteError` for the first bad number of the notes."""
        if self._posted is not None:
            answer, there = self._posted
            there.synchronize()
            fine = bool(answer)
        else:
            fine = self._fine is None or bool(self._fine)
        if fine:
            self._notes.clear()
            self._fine = self._posted = None
            return
        found = self._first_bad()
        if found is not None:
            raise NonFiniteError(self._step, found[1])

    def _first_bad(self) -> tuple[int, str] | None:
        """Which of the numbers noted is the first that is not finite, and what it is."""
        noted = (
            pair for names, seen in self._notes for pair in zip(names, seen.tolist(), strict=True)
        )
        for place, (name, value) in enumerate(noted):
            if not math.isfinite(value):
                return place, name
        return None
