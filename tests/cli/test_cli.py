from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bilevel
from bilevel.cli.app import app
from bilevel.cli.experiments import digits
from bilevel.cli.output import write_json

runner = CliRunner()


def test_version() -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.strip() == f"bilevel {bilevel.__version__}"


def few_digits(seed: int) -> digits.NoisyDigits:
    """400 pictures in place of 4,000 digits: each class has its own pattern."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (600,), generator=generator)
    patterns = torch.rand(10, 784, generator=generator)
    images = (patterns[labels] + torch.randn(600, 784, generator=generator)).clamp(0, 1)
    corrupted = torch.arange(400) % 10 < 3
    given = torch.where(corrupted, (labels[:400] + 1) % 10, labels[:400])
    trusted, test = ((images[rows], labels[rows]) for rows in (slice(400, 500), slice(500, 600)))
    return digits.NoisyDigits((images[:400], given), trusted, test, corrupted)


@pytest.mark.parametrize("samples", [400, pytest.param(4000, marks=pytest.mark.slow)])
def test_demo_finds_wrong_labels_and_beats_the_model_that_learned_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int
) -> None:
    if samples == 400:
        monkeypatch.setattr(digits, "load", few_digits)
    figures, out = tmp_path / "demo.json", tmp_path / "demo"
    result = runner.invoke(app, ["demo", "--seed", "0", "--json", str(figures), "--out", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(figures.read_text())
    assert found["found"] > 0.8 * found["wrong"]
    assert found["false_alarms"] < 0.1 * (found["samples"] - found["wrong"])
    assert found["auc"] > 0.9
    assert found["accuracy_cleaned"] > found["accuracy_noisy"]
    output = " ".join(result.stdout.split())
    assert f"{found['found']} of the {found['wrong']} wrong" in output
    assert str(out / "report.html") in output
    suspected = found["found"] + found["false_alarms"]
    assert (
        f">{suspected:,}</span> of {samples:,} labels look wrong"
        in (out / "report.html").read_text()
    )
    assert len((out / "labels.csv").read_text().splitlines()) == samples + 1


@pytest.mark.slow
def test_reproduce_rates_writes_table_plot_and_figures(tmp_path: Path) -> None:
    figures, plot = tmp_path / "rates.json", tmp_path / "deep" / "rates.png"
    result = runner.invoke(
        app,
        [
            *("reproduce", "rates", "--steps", "100", "--runs", "2"),
            *("--json", str(figures), "--plot", str(plot)),
        ],
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(figures.read_text())
    assert [(row["algorithm"], row["regime"]) for row in rows] == [
        (algorithm, regime)
        for algorithm in ("f2sa", "f3sa")
        for regime in ("stochastic", "upper-noise", "deterministic")
    ]
    assert [row["theory"] for row in rows] == pytest.approx(
        [-2 / 7, -2 / 5, -2 / 3, -2 / 5, -1 / 2, -2 / 3]
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "theory" in result.stdout


@pytest.mark.slow
def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['typer'] = None; sys.argv = ['bilevel', 'demo'];"
        "from bilevel.__main__ import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "bilevel[cli]" in run.stderr


def test_importing_the_library_needs_only_torch_and_numpy() -> None:
    code = (
        "import sys\n"
        "for name in ('rich', 'typer', 'pandas', 'matplotlib', 'mlxtend', 'sklearn', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "import bilevel\n"
        "p = bilevel.problems.Quadratic()\n"
        "print(bilevel.minimize(p, p.x0, p.y0, steps=3).outcome.name)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "COMPLETED"


@pytest.mark.slow
@pytest.mark.parametrize("stdout", ["/dev/full", "closed pipe"])
def test_a_stdout_that_fails_loses_no_results(tmp_path: Path, stdout: str) -> None:
    if stdout == "/dev/full" and not Path(stdout).exists():
        pytest.skip("only Linux has /dev/full")
    rows = [f"{i % 2 + 0.01 * i},{'ab' if i % 2 else 'cd'}" for i in range(40)]
    (tmp_path / "train.csv").write_text("size,label\n" + "\n".join(rows), encoding="utf-8")
    code = "from bilevel.cli import main; main()"
    options = ["--label", "label", "--out", "out", "--json", "found.json"]
    command = [sys.executable, "-c", code, "clean", "train.csv", *options]
    if stdout == "/dev/full":
        target = os.open(stdout, os.O_WRONLY)
    else:
        listener, target = os.pipe()
        os.close(listener)
    run = subprocess.run(
        command, cwd=tmp_path, stdout=target, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(target)
    assert run.returncode == 1
    assert "Traceback" not in run.stderr
    assert ("standard output cannot be written to" in run.stderr) == (stdout == "/dev/full")
    assert (tmp_path / "out" / "labels.csv").exists()
    assert (tmp_path / "found.json").exists()


def test_a_file_may_be_named_like_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a[").mkdir()
    write_json(tmp_path / "a[" / "b].json", {})
    assert "a[/b].json" in capsys.readouterr().out


@pytest.mark.slow
def test_a_terminal_that_lacks_characters_loses_no_results(tmp_path: Path) -> None:
    rows = [f"{i % 2 + 0.01 * i},{'日本' if i % 2 else 'ab'}" for i in range(40)]
    (tmp_path / "train.csv").write_text("größe,label\n" + "\n".join(rows), encoding="utf-8")
    code = "from bilevel.cli import main; main()"
    options = ["--label", "label", "--out", "out", "--json", "found.json"]
    run = subprocess.run(
        [sys.executable, "-c", code, "clean", "train.csv", *options],
        cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert b"gr\\xf6\\xdfe" in run.stdout
    assert (tmp_path / "found.json").exists()
