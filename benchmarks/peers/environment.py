"""The Python environment in which all contestants run; it is made once and kept."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import bilevel
from bilevel.data import cache_folder
from bilevel.errors import BilevelError

BASE = ("torch==2.13.0", "numpy==2.4.6", "scipy==1.17.1", "setuptools==84.2.1")
"""The packages that every contestant needs."""

EXTRA: Mapping[str, tuple[str, ...]] = {
    "jax": ("jax==0.10.2", "jaxlib==0.10.2"),
    "jaxopt": ("jaxopt==0.8.5",),
    "higher": ("higher==0.2.1",),
    "torchopt": ("torchopt==0.7.3",),
    # boat-torch requires an older numpy than jax does, and torchvision, which it never imports.
    "boat-torch": ("--no-deps", "boat-torch==1.1.1"),
    "matplotlib": ("matplotlib==3.11.2",),
}
"""Further packages, installed one after another, so that a failure leaves out only that one."""

_RECORD = "installed.json"
_CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Environment:
    """An environment in which the contestants run.

    Attributes:
        python: the interpreter of the environment.
        failures: maps names in :data:`EXTRA` to the reason why they could not be installed.
    """

    python: Path
    failures: Mapping[str, str]

    def reason(self, needs: Sequence[str]) -> str | None:
        """Say why a contestant that needs these extras cannot run; None if it can."""
        reasons = [f"{name}: {self.failures[name]}" for name in needs if name in self.failures]
        return "; ".join(reasons) or None

    @property
    def variables(self) -> dict[str, str]:
        """The variables of its processes: this checkout's packages, and one thread each."""
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(_CHECKOUT), str(Path(bilevel.__file__).parents[1])]),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "NPROC": "1",  # The size of JAX's thread pool.
            "JAX_PLATFORMS": "cpu",
        }


def prepare(folder: Path | None = None) -> Environment:
    """Return the environment; make it first if it does not exist yet.

    Args:
        folder: the folder; None: one in the cache, named after the packages to install.
    """
    wanted = json.dumps([sys.version, BASE, dict(EXTRA)])
    if folder is None:
        folder = cache_folder() / f"peers-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    record = folder / _RECORD
    if not record.exists():
        venv.create(folder, with_pip=True, clear=True)
        failure = _install(python, BASE)
        if failure is not None:
            raise BilevelError(f"pip could not install {', '.join(BASE)} in {folder}: {failure}")
        failures = {name: _install(python, packages) for name, packages in EXTRA.items()}
        record.write_text(json.dumps({name: why for name, why in failures.items() if why}))
    return Environment(python, json.loads(record.read_text()))


def _install(python: Path, packages: Sequence[str]) -> str | None:
    """Install the packages; return the last error of pip, or None if it succeeded."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return None if done.returncode == 0 else (lines or ["pip failed"])[-1]
