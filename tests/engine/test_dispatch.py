"""What an older torch cannot do is said, and left out."""

from __future__ import annotations

import pytest
import torch

import bilevel
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
