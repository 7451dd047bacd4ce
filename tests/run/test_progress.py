"""The progress bar: what it shows, and that a run does not depend on who looks at it."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch

import bilevel
from bilevel.methods import Info


def minimize(**options: Any) -> bilevel.Result:
    problem = bilevel.problems.Quadratic(seed=1)
    return bilevel.minimize(problem, problem.x0, problem.y0, **options)


def test_progress_shows_the_losses_and_the_multiplier(capsys: pytest.CaptureFixture[str]) -> None:
    expected = minimize(steps=5)
    assert capsys.readouterr().err == ""
    result = minimize(steps=5, progress=True)
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert f"upper {result.history['upper'][-1]:.4g}" in shown
    assert torch.equal(result.x, expected.x)


def test_progress_says_what_a_step_reports() -> None:
    from bilevel.run.progress import describe  # needs rich, which the rest does not

    upper, lower, gap = (torch.tensor(value) for value in (1.25, 0.5, 3e-4))
    assert (
        describe(Info(3, 20.0, 0.5, 0.025, upper, lower, gap))
        == "upper 1.25 lower 0.5 gap 3e-04 lam 20 steps 0.5 0.025"
    )
    assert describe(Info(3, 20.0, 0.5, 0.025)) == "lam 20 steps 0.5 0.025"


class Terminal(io.StringIO):
    """A terminal, which from some moment on raises whatever is written to it."""

    error: Exception | None = None

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.flush()
        return super().write(text)

    def flush(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("step", [0, 3, 7])
@pytest.mark.parametrize(
    "error",
    [OSError(5, "Input/output error"), BrokenPipeError(32, "Broken pipe"), ValueError("closed")],
    ids=["hung up", "broken pipe", "closed"],
)
def test_a_run_outlives_its_terminal(
    error: Exception, step: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    def leave(solver: bilevel.Solver, info: Info) -> None:
        terminal.error = error if info.step >= step else None

    result = minimize(steps=8, progress=True, callback=leave)
    assert torch.equal(result.x, minimize(steps=8).x)
    print("still there", flush=True)
    assert "still there" in capfd.readouterr().out


def test_what_a_callback_prints_stays_in_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = io.StringIO()  # a file, while stderr is a terminal
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(sys, "stdout", printed)
    minimize(steps=2, progress=True, callback=lambda solver, info: print("step", info.step))
    assert printed.getvalue() == "step 0\nstep 1\n"
