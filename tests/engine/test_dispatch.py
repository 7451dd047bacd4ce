"""What an older torch cannot do is said, and left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import bilevel
from bilevel.engine.dispatch import OLDEST_TORCH
from bilevel.errors import CompileWarning


def test_with_a_torch_that_is_too_old_steps_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = bilevel.problems.Quadratic(seed=0)
    plain = bilevel.minimize(problem, problem.x0, problem.y0, steps=3)
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    with pytest.warns(CompileWarning, match=r"torch is 2\.10\.1\+cpu, .* need 2\.11 or later"):
        asked = bilevel.minimize(problem, problem.x0, problem.y0, steps=3, compile=True)
    assert torch.equal(asked.x, plain.x)


def test_what_compiling_needs_is_said_before_it_is_tried() -> None:
    needed = ".".join(map(str, OLDEST_TORCH))
    install = Path(__file__).parents[2] / "docs" / "install.md"
    for text in (bilevel.Solver.__doc__ or "", install.read_text("utf-8")):
        assert re.search(rf"compile.*?needs?\s+PyTorch {re.escape(needed)}", text, re.DOTALL)
