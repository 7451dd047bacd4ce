"""Every block of code in the README and on the site runs, those of a page in one namespace."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bilevel.cli.app import app
from bilevel.errors import BilevelWarning
from tests.docs.pages import TEXTS, blocks, name_of
from tests.marks import slow_except

WITH_CODE = [name_of(path) for path in TEXTS if blocks(path)]
LONG = {
    # the contract of methods, which tests/methods holds every method to
    "docs/api/testing.md",
    "docs/write-a-method.md",
    # compiles kernels
    "docs/compile.md",
    # runs to a solution, of what other tests run for a few steps
    "docs/constraints.md",
    "docs/few-shot.md",
    "docs/fixed-points.md",
    "docs/flat-valley.md",
    "docs/hyperparameters.md",
    "docs/large-models.md",
    "docs/layers.md",
    "docs/start/language-model.md",
    "docs/start/module.md",
    "docs/start/two-functions.md",
    "docs/stopping.md",
    "docs/sweeps.md",
    "docs/when-a-run-goes-wrong.md",
    *(page for page in WITH_CODE if page.startswith("docs/coming-from/")),
}
WITH_COMMANDS = [
    name_of(path) for path in TEXTS if any("$ bilevel " in b for b in blocks(path, "console"))
]


def run(path: Path) -> dict[str, Any]:
    """Run the blocks of a page; a warning of the library is shown to a reader, and no error."""
    namespace: dict[str, Any] = {"__name__": "page"}
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", BilevelWarning)
        for number, block in enumerate(blocks(path), start=1):
            exec(compile(block, f"{path.name}, block {number}", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("page", slow_except(set(WITH_CODE) - LONG, WITH_CODE))
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.chdir(tmp_path)
    run(pytestconfig.rootpath / page)


def commands(path: Path) -> list[list[str]]:
    """The calls of `bilevel` in the console blocks of a page, without the ones marked long."""
    lines = [line for block in blocks(path, "console") for line in block.splitlines()]
    return [
        shlex.split(line.removeprefix("$ bilevel "), comments=True)
        for line in lines
        if line.startswith("$ bilevel ") and "# long" not in line
    ]


@pytest.mark.parametrize("page", slow_except([], WITH_COMMANDS))
def test_the_commands_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.chdir(tmp_path)
    path = pytestconfig.rootpath / page
    if blocks(path):
        run(path)  # which writes the files that the commands read
    for command in commands(path):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
