"""The table of bad inputs: for every public function, one bad value per kind and argument.

Each function is given arguments that are good but for one. The error has to name that argument.
"""

from tests.errors.bad_inputs.known import DATA_SETS, KNOWN_PROBLEMS, THEORY
from tests.errors.bad_inputs.layers import LAYERS
from tests.errors.bad_inputs.runs import APPLICATIONS, RUNS, SETS_AND_SCHEDULES
from tests.errors.bad_inputs.values import Entry, Refused

TABLE = RUNS | SETS_AND_SCHEDULES | THEORY | KNOWN_PROBLEMS | DATA_SETS | APPLICATIONS | LAYERS

__all__ = ["TABLE", "Entry", "Refused"]
