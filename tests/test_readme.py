"""The README's examples run, in order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.filterwarnings("ignore::bilevel.errors.DivergenceWarning")  # it is an example of that
def test_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 11
    namespace: dict[str, Any] = {}
    with torch.random.fork_rng():
        for block in blocks:
            exec(block, namespace)
