"""The paper's experiments, each a module with a function that returns its figures.

Beside them stands what every long command needs: a ledger of its finished parts and a description
of the machine.
"""

from bilevel.cli.experiments.ledger import Ledger
from bilevel.cli.experiments.machine import Machine, torch_threads

__all__ = ["Ledger", "Machine", "torch_threads"]
