"""The Python environment in which all contestants run, made once and kept."""

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

import benchmarks
import bilevel
from bilevel.data import cache_folder
from bilevel.errors import BilevelError

BASE = ("torch==2.13.0", "numpy==2.4.6", "scipy==1.17.1", "setuptools==84.2.1")
"""Without these nobody races."""

EXTRA: Mapping[str, tuple[str, ...]] = {
    "jax": ("jax==0.10.2", "jaxlib==0.10.2"),
    "jaxopt": ("jaxopt==0.8.5",),
    "higher": ("higher==0.2.1",),
    "torchopt": ("torchopt==0.7.3",),
    # it asks for an older numpy than jax does, and for torchvision, which it does not import
    "boat-torch": ("--no-deps", "boat-torch==1.1.1"),
    "matplotlib": ("matplotlib==3.11.2",),
}
"""What is installed on top, one after another, so that one that fails is only left out itself."""

_RECORD = "installed.json"


@dataclass(frozen=True)
class Environment:
    """Where the contestants run.

    Attributes:
        python: its interpreter.
        failures: of :data:`EXTRA`, why it could not be installed.
    """

    python: Path
    failures: Mapping[str, str]

    def reason(self, needs: Sequence[str]) -> str | None:
        """Why something that needs these cannot run; None: it can."""
        reasons = [f"{name}: {self.failures[name]}" for name in needs if name in self.failures]
        return "; ".join(reasons) or None

    @property
    def variables(self) -> dict[str, str]:
        """For its processes: this very library, and one thread each."""
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                str(Path(package.__file__).parents[1]) for package in (benchmarks, bilevel)
            ),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "NPROC": "1",  # the size of JAX's pool of threads
            "JAX_PLATFORMS": "cpu",
        }


def prepare(folder: Path | None = None) -> Environment:
    """The environment, made first if it is not there yet.

    Args:
        folder: where; None: in the cache, under a name made from what is installed.
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
            raise BilevelError(f"the environment in {folder} could not be made: {failure}")
        failures = {name: _install(python, packages) for name, packages in EXTRA.items()}
        record.write_text(json.dumps({name: why for name, why in failures.items() if why}))
    return Environment(python, json.loads(record.read_text()))


def _install(python: Path, packages: Sequence[str]) -> str | None:
    """What pip last said, if it failed."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return None if done.returncode == 0 else (lines or ["pip failed"])[-1]
