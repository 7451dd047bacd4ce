"""Draw the pictures of the site from committed figures; ``make figures`` does it.

    python -m docs.draw_figures              draws from figures/figures.json and benchmarks/results
    python -m docs.draw_figures --measure    computes figures/figures.json anew first

A test holds the measured figures to the committed ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import bilevel

FOLDER = Path(__file__).parent / "figures"
FIGURES = FOLDER / "figures.json"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

Array = npt.NDArray[np.float64]
BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "0.55"
SCHEMES = {
    "forward": ("F2SA()", ORANGE),
    "midpoint": ('F2SA(scheme="midpoint")', BLUE),
    "central": ('F2SA(scheme="central")', GREEN),
}

# The problem of the picture that explains F2SA: x is a number, y a point of the plane.
HESSIAN = np.array([[1.0, 0.5], [0.5, 0.6]])
SLOPE = np.array([1.0, 0.6])  # y*(x) = SLOPE * x
WISH = np.array([-0.4, 1.6])  # f(x, y) = |y - WISH|^2 / 2 + RIDGE x^2 / 2
RIDGE, MULTIPLIER, RATE, START = 0.1, 3.0, 0.45, -1.6


def measure() -> dict[str, Any]:
    """Everything that is drawn and is not a benchmark."""
    return {"steps": measure_steps(), "bias": measure_bias(), "home": measure_home()}


def inner_path(x: float, strength: float, steps: int = 80) -> list[list[float]]:
    """Gradient steps of a copy of y on g + strength * f, at a fixed x."""
    y, path = np.array([1.2, -1.4]), []
    for _ in range(steps + 1):
        path.append(y.tolist())
        y = y - RATE * (HESSIAN @ (y - SLOPE * x) + strength * (y - WISH))
    return path


def measure_steps() -> dict[str, Any]:
    """The two copies at the first x, and x over the outer steps of the library's F2SA."""
    hessian, slope, wish = (torch.tensor(value) for value in (HESSIAN, SLOPE, WISH))
    problem = bilevel.Problem(
        upper=lambda x, y, batch: 0.5 * ((y - wish) ** 2).sum() + 0.5 * RIDGE * x**2,
        lower=lambda x, y, batch: 0.5 * (y - slope * x) @ hessian @ (y - slope * x),
    )
    x0, y0 = torch.tensor(START, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    method = bilevel.F2SA(RATE, 0.35, multiplier=MULTIPLIER, inner_steps=60)
    solver = bilevel.Solver(problem, x0, y0, method=method)
    path = [START]
    for _ in range(8):
        solver.step()
        path.append(float(solver.x))
    return {
        "z": inner_path(START, 0.0),
        "y": inner_path(START, 1 / MULTIPLIER),
        "x": path,
    }


def measure_bias() -> dict[str, Any]:
    """The relative error of the x direction against the multiplier, for three schemes."""
    problem = bilevel.problems.WeightedLogistic(seed=0)
    multipliers = [float(lam) for lam in np.logspace(1, 4, 13)]
    errors = {
        scheme: [
            bilevel.check_hypergradient(
                problem,
                problem.x0,
                problem.y0,
                method=bilevel.F2SA(scheme=scheme),  # type: ignore[arg-type]
                multiplier=lam,
            ).relative_error
            for lam in multipliers
        ]
        for scheme in SCHEMES
    }
    return {"multiplier": multipliers, **errors}


def measure_home() -> dict[str, Any]:
    """The run in the README: its first block of code."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    namespace: dict[str, Any] = {}
    with torch.random.fork_rng():
        exec(code, namespace)
    result = namespace["result"]
    return {"upper": result.history["upper"].tolist(), "y": result.y.tolist()}


def new_plot() -> Any:
    """Matplotlib in the style of the site."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def save(plt: Any, figure: Any, path: Path) -> None:
    """Write a picture, without the version of what drew it."""
    figure.savefig(path, dpi=140, metadata={"Software": None})
    plt.close(figure)


def draw_steps(found: dict[str, Any], path: Path) -> None:
    """What F2SA does, in three steps."""
    plt = new_plot()
    figure, (plane, difference, curve) = plt.subplots(
        1, 3, figsize=(12, 4.1), constrained_layout=True
    )
    z, y, x = (np.array(found[name]) for name in ("z", "y", "x"))
    _draw_copies(plane, z, y)
    _draw_difference(difference, z[-1], y[-1])
    _draw_descent(curve, x)
    save(plt, figure, path)


def _levels(axis: Any, low: tuple[float, float], high: tuple[float, float]) -> None:
    grid = np.stack(
        np.meshgrid(np.linspace(low[0], high[0], 200), np.linspace(low[1], high[1], 200)), -1
    )
    away = grid - SLOPE * START
    g = 0.5 * np.einsum("...i,ij,...j", away, HESSIAN, away)
    f = 0.5 * ((grid - WISH) ** 2).sum(-1)
    for values, colour, count in ((g, GREY, 9), (f, ORANGE, 7)):
        levels = np.linspace(np.sqrt(values.min()) + 0.05, np.sqrt(values.max()), count) ** 2
        axis.contour(grid[..., 0], grid[..., 1], values, levels, colors=colour, linewidths=0.7)
    axis.set(xlabel="$y_1$", ylabel="$y_2$", aspect="equal")


def _draw_copies(axis: Any, z: Array, y: Array) -> None:
    _levels(axis, (-3.0, -2.2), (1.8, 2.2))
    for path, colour, name in ((z, BLUE, "z, on g"), (y, GREEN, "y, on f + λ g")):
        axis.plot(*path.T, "-o", color=colour, markersize=3, linewidth=1.6, label=name)
        axis.plot(*path[-1], "o", color=colour, markersize=8, markeredgecolor="white")
    axis.plot(*WISH, "*", color=ORANGE, markersize=13)
    axis.annotate("best for f", WISH, (-2, 8), textcoords="offset points", ha="center", fontsize=9)
    axis.set_title("1. train two copies of y, at a fixed x", fontsize=11)
    axis.legend(loc="lower left", fontsize=9, framealpha=1)


def _draw_difference(axis: Any, z: Array, y: Array) -> None:
    _levels(axis, (-2.6, -1.8), (0.4, 1.2))
    axis.annotate("", y, z, arrowprops={"arrowstyle": "-|>", "color": "black", "lw": 2})
    for point, colour, name, offset in ((z, BLUE, "z", (-14, -4)), (y, GREEN, "y", (8, 2))):
        axis.plot(*point, "o", color=colour, markersize=10, markeredgecolor="white", zorder=4)
        axis.annotate(name, point, offset, textcoords="offset points", fontsize=12, color=colour)
    axis.set_title("2. their difference: how y*(x) reacts to f", fontsize=11)


def _draw_descent(axis: Any, x: Array) -> None:
    def value(at: Any) -> Any:
        away = np.multiply.outer(at, SLOPE) - WISH
        return 0.5 * (away**2).sum(-1) + 0.5 * RIDGE * np.square(at)

    line = np.linspace(-1.9, 1.5, 200)
    axis.plot(line, value(line), color=GREY, linewidth=1.5)
    axis.plot(x, value(x), "o", color=ORANGE, markersize=6, zorder=3)
    for a, b in itertools.pairwise(x[:5]):
        arrow = {"arrowstyle": "-|>", "color": ORANGE, "lw": 1.4, "shrinkA": 3, "shrinkB": 3}
        axis.annotate("", (b, value(b)), (a, value(a)), arrowprops=arrow)
    axis.set(xlabel="x", ylabel="F(x) = f(x, y*(x))")
    axis.set_title(r"3. move x against $\nabla_x f(y)+λ(\nabla_x g(y)-\nabla_x g(z))$", fontsize=11)


def draw_bias(found: dict[str, Any], path: Path) -> None:
    """The bias against the multiplier."""
    plt = new_plot()
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for scheme, (label, colour) in SCHEMES.items():
        axis.loglog(
            found["multiplier"], found[scheme], "-o", color=colour, markersize=4, label=label
        )
    axis.set(xlabel="multiplier λ", ylabel="relative error of the x direction")
    axis.grid(visible=True, which="major", alpha=0.25)
    axis.legend(frameon=False)
    save(plt, figure, path)


def draw_home(found: dict[str, Any], path: Path) -> None:
    """The run of the README."""
    plt = new_plot()
    figure, (error, coefficients) = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    error.plot(np.arange(1, len(found["upper"]) + 1), found["upper"], color=BLUE, linewidth=2)
    error.set(xlabel="outer step", ylabel="held-out error", ylim=(0, None))
    colours = [ORANGE] * 5 + [GREY] * (len(found["y"]) - 5)
    coefficients.bar(range(1, len(found["y"]) + 1), found["y"], color=colours)
    coefficients.axhline(0, color="black", linewidth=0.8)
    coefficients.set(xlabel="feature (the first five matter)", ylabel="coefficient")
    save(plt, figure, path)


def draw_races(path: Path) -> None:
    """Seconds to 2% of the best, by contestant; the best of its settings."""
    plt = new_plot()
    rows = json.loads((RESULTS / "peers-0.3.json").read_text())["rows"]
    names = list(dict.fromkeys(row["contestant"] for row in rows))
    shown: dict[str, dict[str, float]] = {name: {} for name in names}
    for column in ("seconds", "steady"):
        for name in names:
            # Settings that were run once chose those that were run in turns.
            times = [
                row[column][2] if row[column][2] is not None else np.inf
                for row in rows
                if row["contestant"] == name and row["runs"] > 1
            ]
            shown[name][column] = min(times)
    figure, axis = plt.subplots(figsize=(8, 4.2), constrained_layout=True)
    places = np.arange(len(names))[::-1]
    for column, shift, colour, label in (
        ("seconds", 0.2, GREY, "everything, compiling included"),
        ("steady", -0.2, BLUE, "steady"),
    ):
        values = np.array([shown[name][column] for name in names])
        axis.barh(
            places + shift,
            np.where(np.isfinite(values), values, 0),
            0.38,
            color=colour,
            label=label,
        )
        for place, value in zip(places, values, strict=True):
            text = f"{value:.2f}" if np.isfinite(value) else "not within 12 s"
            axis.annotate(
                text,
                (value if np.isfinite(value) else 0, place + shift),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axis.set_yticks(places, names)
    axis.set_xlabel("seconds of one core to within 2% of the best, MNIST, 30% wrong labels")
    axis.legend(frameon=False, loc="lower right")
    save(plt, figure, path)


def draw_profiles(path: Path) -> None:
    """The share of problems that "auto" solves, against its budget."""
    from benchmarks.auto import read_rows
    from benchmarks.auto.figure import draw as draw_rows

    draw_rows(read_rows(RESULTS / "auto.json"), path)


def draw(folder: Path = FOLDER) -> None:
    """All pictures, into a folder."""
    found = json.loads(FIGURES.read_text())
    draw_steps(found["steps"], folder / "steps.png")
    draw_bias(found["bias"], folder / "bias.png")
    draw_home(found["home"], folder / "home.png")
    draw_races(folder / "races.png")
    draw_profiles(folder / "profiles.png")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="compute figures.json anew")
    torch.set_num_threads(1)
    if parser.parse_args().measure:
        FIGURES.write_text(json.dumps(measure(), indent=1) + "\n")
    draw()


if __name__ == "__main__":
    main()
