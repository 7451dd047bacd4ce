"""The supply chain: few dependencies, no network at import, nothing executed from a data file."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "src" / "bilevel", ROOT / "benchmarks")
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
# Races against other libraries run in an environment of their own.
PEERS = ("peers", "in_jax.py")
MODULES = [
    path for path in SOURCES if not any(part in PEERS for part in path.relative_to(ROOT).parts)
]
DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow"}
BROUGHT = {
    "markupsafe": "jinja2",
    "scipy": "scikit-learn",
    "threadpoolctl": "scikit-learn",
}
OPTIONAL = {"cleanlab"}  # A benchmark measures cleanlab as well if it is installed.


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "src" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


WATCHED = """
import sys
forbidden = ("socket.connect", "socket.getaddrinfo", "socket.bind", "subprocess.Popen", "os.system",
             "os.exec", "os.fork", "os.posix_spawn", "urllib.Request", "pickle.find_class")
bilevel_only = [False]
def hook(event, arguments):
    if bilevel_only[0] and event in forbidden:
        raise SystemExit(event + " at import")
import {others}
sys.addaudithook(hook)
bilevel_only[0] = True
import importlib
for name in {names!r}:
    importlib.import_module(name)
bilevel_only[0] = False
print("quiet")
"""


@pytest.mark.slow
def test_importing_opens_no_connection_and_starts_no_process() -> None:
    names = [name_of(path) for path in MODULES if path.name != "__main__.py"]
    # What the dependencies themselves do at import is not tested here.
    others = "torch, numpy, pandas, matplotlib, sklearn, scipy, rich, typer, PIL, jinja2"
    code = WATCHED.format(names=names, others=others)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout.strip().endswith("quiet"), done.stdout[-500:] + done.stderr[-1500:]


def test_the_hook_would_notice() -> None:
    code = WATCHED.format(names=["antigravity_of_tests"], others="os").replace(
        "importlib.import_module(name)", "__import__('socket').create_connection(('::1', 9))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "at import" in done.stderr


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imported(path: Path) -> set[str]:
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {"eval", "exec", "compile", "__import__"}
LOADS = {"torch.load", "joblib.load", "pd.read_pickle", "pandas.read_pickle", "yaml.load"}


def offences(path: Path) -> list[str]:
    """Where a file could run code that lies in data."""
    found = sorted(imported(path) & PICKLES)
    for node in nodes(path):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        unpickles = arguments.get("allow_pickle", "False") != "False"
        if called in CALLS | LOADS or unpickles or arguments.get("shell") == "True":
            found.append(f"{called} in line {node.lineno}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_executed_from_a_data_file(path: Path) -> None:
    assert offences(path) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from joblib import load",
        "import torch\ntorch.load('a')",
        "import numpy as np\nnp.load('a', allow_pickle=True)",
        "eval('1')",
    ],
)
def test_the_search_would_notice(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(text)
    assert offences(tmp_path / "bad.py")


NETWORK = {"socket", "urllib.request", "http.client", "http.server", "ssl", "ftplib", "requests"}


@pytest.mark.slow
def test_the_network_is_used_in_one_place() -> None:
    users = {name_of(path) for path in MODULES if imported(path) & NETWORK}
    assert users == {"bilevel.data.files"}


def declared() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text()
    parts = text[text.index("\ndependencies") : text.index("[project.scripts]")]
    names = {re.split(r"[><=\[]", entry)[0] for entry in re.findall(r'"([^"]+)"', parts)}
    known = {"bilevel optimization", "hyperparameter optimization", "label noise", "pytorch"}
    return {name for name in names if re.fullmatch(r"[a-z0-9-]+", name)} - known - {"bilevel"}


@pytest.mark.slow
def test_what_is_imported_is_declared_and_explained() -> None:
    used = set()
    for path in MODULES:
        tops = {name.split(".")[0] for name in imported(path)}
        used |= tops - set(sys.stdlib_module_names) - {"benchmarks", "bilevel"} - OPTIONAL
    needed = {DISTRIBUTIONS.get(name, name) for name in used}
    needed = {BROUGHT.get(name, name) for name in needed}
    assert needed <= declared()
    text = (ROOT / "docs" / "dependencies.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    explained = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert explained == declared()


def test_every_pin_is_exact() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9A-Za-z.+]+", pin) for pin in pins), pins
    assert declared() <= {re.split("==", pin)[0].lower() for pin in pins}


@pytest.mark.parametrize("file", sorted(path.name for path in ROOT.glob("requirements*.txt")))
def test_what_is_pinned_is_audited(file: str) -> None:
    audit = (ROOT / "Makefile").read_text().split("\naudit:")[1].split("\n\n")[0]
    assert f"--requirement {file}" in audit
    assert f"--lockfile {file}" in (ROOT / "docs" / "dependencies.md").read_text()
    pins = [line for line in (ROOT / file).read_text().splitlines() if line[:1].isalnum()]
    assert pins
    assert all("==" in pin for pin in pins)
