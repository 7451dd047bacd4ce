"""Time and memory of a step with 10^4 to 10^8 weights, one per sample.

Run ``python benchmarks/table.py [--json FILE] [--device cuda]``. The figures are made by
:mod:`bilevel.benchmarks.table`; ratios are to 10^4 samples, in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from bilevel.benchmarks import table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    figures = table.run(device=arguments.device)
    print(table.report(figures))
    if arguments.json:
        place = f"{platform.machine()}, one thread"
        if arguments.device != "cpu":
            place = torch.cuda.get_device_name(arguments.device)
        machine = f"{place}, torch {torch.__version__}"
        text = json.dumps({"machine": machine, "rows": figures}, indent=2)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
