"""What is released: the sdist, the wheel, their metadata, and types for a user's script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import bilevel

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def build(source: Path, folder: Path) -> tuple[Path, Path]:
    """The sdist and the wheel of a source tree, built without a network."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_the_wheel_has_the_library_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
        metadata = next(name for name in names if name.endswith("METADATA"))
        fields = Parser().parsestr(wheel.read(metadata).decode())
    assert {name.split("/")[0] for name in names} == {"bilevel", metadata.split("/")[0]}
    source = ROOT / "src"
    for path in (source / "bilevel").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert path.relative_to(source).as_posix() in names
    assert fields["Name"] == "bilevel"
    assert fields["Version"] == bilevel.__version__
    assert fields["License-Expression"] == "Apache-2.0"
    assert fields["Requires-Python"] == ">=3.10"


def test_the_sdist_builds_the_same_wheel(built: tuple[Path, Path], tmp_path: Path) -> None:
    with tarfile.open(built[0]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    assert built[0].stat().st_size < 5_000_000
    (source,) = tmp_path.iterdir()
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "Makefile", "tests", "docs", "examples"):
        assert (source / name).exists(), name
    _, again = build(source, tmp_path / "dist")
    with zipfile.ZipFile(built[1]) as first, zipfile.ZipFile(again) as second:
        assert set(first.namelist()) == set(second.namelist())


def test_the_wheel_works_where_it_is_installed(built: tuple[Path, Path], tmp_path: Path) -> None:
    target = tmp_path / "installed"
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(target)
    code = f"""
import sys
sys.path.insert(0, {str(target)!r})
import bilevel
assert bilevel.__file__.startswith({str(target)!r}), bilevel.__file__
problem = bilevel.problems.Quadratic(seed=0)
print(bilevel.minimize(problem, problem.x0, problem.y0, steps=3).steps)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "3\n", done.stderr


def test_the_version_is_the_same_everywhere() -> None:
    for name, pattern in (
        ("CITATION.cff", r"^version: (.+)$"),
        ("conda/meta.yaml", r'set version = "(.+)"'),
    ):
        found = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        assert found is not None
        assert found[1] == bilevel.__version__, name
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


SCRIPT = """
import torch
from torch import Tensor

import bilevel


def upper(x: Tensor, y: Tensor, batch: object) -> Tensor:
    return (y**2).sum()


def lower(x: Tensor, y: Tensor, batch: object) -> Tensor:
    return ((y - x) ** 2).sum()


problem = bilevel.Problem(upper, lower, x_set=bilevel.sets.Box(0, 1))
method = bilevel.F2SA(lower_lr=0.1, upper_lr="auto", multiplier=lambda k: 10.0 + k)
result: bilevel.Result = bilevel.minimize(
    problem, torch.ones(2), torch.ones(2), method=method, steps=3, record_every=1
)
first: float = float(result.history["upper"][0])
solver = bilevel.Solver(problem, torch.ones(2), torch.ones(2), method="f3sa")
info: bilevel.Info = solver.step()
cleaner = bilevel.LabelCleaner(random_state=0)
check: float = bilevel.check_hypergradient(problem, torch.ones(2), torch.ones(2)).relative_error
reveal_type(result.outcome)
"""


def test_types_are_complete_for_a_users_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=pyproject.toml",
        str(script),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "Outcome" in done.stdout
