"""The names of the package: what each is, and that none costs anything before it is asked for."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

import bilevel


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_else() -> None:
    code = "print([name for name in sys.modules if name.startswith(('bilevel', 'torch'))])"
    assert run(f"import sys, bilevel; {code}") == "['bilevel']\n"


# In one process that has asked the package for nothing: importing PyTorch takes long.
IN_A_NEW_PROCESS = """
import importlib, sys

for name, place in {
    "distributed": "engine.ranks",
    "loggers": "run.loggers",
    "prox": "problem.prox",
    "schedules": "stepping.schedules",
    "sets": "problem.sets",
}.items():
    importlib.import_module(f"bilevel.{name}")
    module = importlib.import_module(f"bilevel.{place}")
    assert getattr(sys.modules["bilevel"], name) is module is sys.modules[f"bilevel.{name}"]
    assert module.__name__ == module.__spec__.name == f"bilevel.{place}"
    assert importlib.reload(module) is module

import bilevel.problem.argmin, bilevel.run.minimize

# These functions have the names of their modules.
assert callable(bilevel.argmin) and callable(bilevel.minimize)
"""


def test_a_module_is_one_under_both_of_its_names() -> None:
    assert run(IN_A_NEW_PROCESS) == ""


def test_every_public_name_is_found() -> None:
    assert dir(bilevel) == sorted(bilevel.__all__)
    for name in bilevel.__all__:
        assert getattr(bilevel, name) is not None


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'minimise'"):
        bilevel.minimise  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'bilevel\.setz'"):
        import_module("bilevel.setz")
