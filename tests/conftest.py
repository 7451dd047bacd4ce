"""What all tests share."""

from __future__ import annotations

import torch

# The problems here are tiny: a second thread costs more than it brings.
torch.set_num_threads(1)
