"""What all tests share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# The same cases every time, so that what fails can be run again; `--hypothesis-profile=default`
# tries new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

# The problems here are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        action="store_true",
        help="compile everything in tests/compiled down to kernels: five minutes",
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Modules that a test builds begin at the same weights, whatever ran before it."""
    torch.manual_seed(0)
