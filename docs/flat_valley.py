"""Write docs/flat-valley.md and its figure: what every method makes of a flat valley.

Run ``python docs/flat_valley.py``; a test holds the page to what this measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import bilevel
from bilevel import AID, BOME, F2BA, F2SA, F3SA, ITD, MASOBA, MEHA, SOBA, SOBO, VPBGD
from bilevel.errors import NonFiniteError
from bilevel.methods import Method
from bilevel.problems import FlatValley
from bilevel.stepping.schedules import Power

PAGE = Path(__file__).parent / "flat-valley.md"
TEMPLATE = Path(__file__).parent / "flat-valley.in.md"
FIGURE = Path(__file__).parent / "flat-valley.png"

Array = npt.NDArray[np.float64]
STEPS = 300
FAR = 1e3

GROWING: dict[str, Any] = {"lower_lr": 0.5, "upper_lr": 0.5, "multiplier": Power(1.0, 5, 0.9)}
PENALTY: dict[str, Any] = {"lower_lr": 0.5, "upper_lr": 0.2, "multiplier": 100.0}
PLAIN: dict[str, Any] = {"lower_lr": 0.5, "upper_lr": 0.2}
METHODS: dict[str, Method[Any]] = {
    "F2SA()": F2SA(**PENALTY),
    'F2SA(scheme="midpoint")': F2SA(**PENALTY, scheme="midpoint"),
    'F2SA(scheme="central")': F2SA(**PENALTY, scheme="central"),
    "F3SA()": F3SA(**{**PENALTY, "upper_lr": 0.05}),
    "F2BA()": F2BA(**PENALTY),
    'VPBGD(start="z")': VPBGD(**GROWING, inner_steps=5),
    'VPBGD(start="y")': VPBGD(**GROWING, inner_steps=5, start="y"),
    "MEHA()": MEHA(**GROWING, proximal=10.0),
    "BOME()": BOME(Power(0.3, 10, -1), Power(1.0, 10, -1), inner_lr=0.5, inner_steps=10),
    "SOBO()": SOBO(**PLAIN),
    "SOBA()": SOBA(lower_lr=0.5, upper_lr=0.1),
    "MASOBA()": MASOBA(lower_lr=0.5, upper_lr=0.1),
    "AID()": AID(**PLAIN),
    "ITD()": ITD(**PLAIN),
}
VIEW = ((-2.6, 2.2), (-2.6, 2.2))
SHOWN = {"F2SA()": "#d55e00", 'VPBGD(start="y")': "#0072b2", "MEHA()": "#009e73"}


def valley() -> FlatValley:
    """In the plane, so that it can be drawn; y0 and the solution lie far apart along the valley."""
    return FlatValley(dim_x=1, dim_y=2, valley=1, seed=4)


@dataclass(frozen=True)
class Run:
    """Where one method went.

    Attributes:
        x_error, y_error: the distance of what it returns from the known solution; infinite where
            it went beyond all bounds.
        path: the lower variable, from its start to its end.
        upper: f at it.
    """

    x_error: float
    y_error: float
    path: Array
    upper: Array

    @property
    def diverged(self) -> bool:
        """Whether it is farther away than any starting point was."""
        return not max(self.x_error, self.y_error) < FAR


def run(method: Method[Any]) -> Run:
    """One method from the start, with nothing to help it."""
    problem = valley()
    solver = bilevel.Solver(problem, problem.x0, problem.y0, method=method)
    path, upper = [problem.y0], [problem.upper(problem.x0, problem.y0, None)]
    try:
        for _ in range(STEPS):
            solver.step(measure=False)
            path.append(solver.y)
            upper.append(problem.upper(solver.x, solver.y, None))
    except NonFiniteError:
        return Run(np.inf, np.inf, np.array([]), np.array([]))
    y = problem.lower_solution(problem.solution)
    return Run(
        float((solver.x - problem.solution).norm()),
        float((solver.y - y).norm()),
        torch.stack(path).numpy(),
        torch.stack(upper).numpy(),
    )


def table(runs: dict[str, Run]) -> str:
    """One row per method."""
    rows = ["| method | x | y | f |", "|---|---|---|---|"]
    for name, found in runs.items():
        if found.diverged:
            cells = "diverges | | "
        else:
            cells = f"{found.x_error:.3f} | {found.y_error:.3f} | {found.upper[-1]:.3f}"
        rows.append(f"| `{name}` | {cells} |")
    return "\n".join(rows)


def page(runs: dict[str, Run]) -> str:
    """The whole page."""
    problem = valley()
    best = float(problem.value(problem.solution))
    text = TEMPLATE.read_text().replace("TABLE", table(runs))
    return text.replace("BEST", f"{best:.3f}").replace("STEPS", str(STEPS))


def draw(runs: dict[str, Run]) -> None:
    """The figure: paths in the plane of y, and f at the lower variable step by step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problem = valley()
    figure, (plane, curves) = plt.subplots(1, 2, figsize=(11, 4.8), constrained_layout=True)
    _draw_plane(plane, problem, runs)
    _draw_curves(curves, problem, runs)
    figure.savefig(FIGURE, dpi=150)
    plt.close(figure)


def _draw_plane(axis: Any, problem: FlatValley, runs: dict[str, Run]) -> None:
    turn = np.linspace(0, 2 * np.pi, 200)
    circle = np.stack([np.cos(turn), np.sin(turn)], -1)
    for radius in np.arange(0.5, 5, 0.5):
        axis.plot(*(problem.t.numpy() + radius * circle).T, color="0.88", linewidth=0.8, zorder=0)
    along = np.array([[-5.0], [5.0]]) * problem.valley.numpy()
    best, first = (problem.lower_solution(x).numpy() for x in (problem.solution, problem.x0))
    axis.plot(*(first + along).T, color="0.45", linewidth=1, linestyle=":", zorder=1)
    axis.plot(*(best + along).T, color="0.2", linewidth=1.3, zorder=1)
    for name, colour in SHOWN.items():
        path = runs[name].path
        axis.plot(*path.T, color=colour, linewidth=2, zorder=3, solid_joinstyle="round")
        axis.plot(*path[-1], "o", color=colour, markersize=8, markeredgecolor="white", zorder=5)
    start, direction = problem.y0.numpy(), problem.valley[0].numpy()
    axis.plot(*start, "s", color="black", markersize=7, zorder=4)
    axis.plot(*best, "*", color="gold", markeredgecolor="black", markersize=17, zorder=6)
    _note(axis, "start", start, (8, 6))
    _note(axis, "best for f", best, (12, -14))
    angle = float(np.degrees(np.arctan(direction[1] / direction[0])))
    for point, left, below, text in (
        (best, 0.45, -15, "valley at the best x"),
        (first, -2.4, 4, "valley at the first x"),
    ):
        where = point + direction * (left - point[0]) / direction[0]
        _note(axis, text, where, (0, below), rotation=angle, rotation_mode="anchor")
    axis.set(xlim=VIEW[0], ylim=VIEW[1], xlabel="$y_1$", ylabel="$y_2$", aspect="equal")
    axis.set_title("the lower variable, and levels of f", fontsize=11)


def _draw_curves(axis: Any, problem: FlatValley, runs: dict[str, Run]) -> None:
    for name, colour in SHOWN.items():
        upper = runs[name].upper[1:]
        axis.loglog(np.arange(1, len(upper) + 1), upper, color=colour, linewidth=2, label=name)
    best = float(problem.value(problem.solution))
    axis.axhline(best, color="0.2", linestyle="--", linewidth=1, zorder=1)
    _note(axis, "F(x*)", (1, best), (0, 4))
    axis.set_xlabel("outer step")
    axis.set_ylim(bottom=0.6 * best)
    axis.set_title("f at the lower variable that is returned", fontsize=11)
    axis.legend(frameon=False, loc="center right")
    axis.grid(visible=True, which="major", alpha=0.25)


def _note(axis: Any, text: str, point: Any, offset: tuple[int, int], **more: Any) -> None:
    axis.annotate(text, point, offset, textcoords="offset points", fontsize=9, color="0.2", **more)


def measured() -> dict[str, Run]:
    """Every method's run."""
    return {name: run(method) for name, method in METHODS.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    everything = measured()
    PAGE.write_text(page(everything))
    draw(everything)
