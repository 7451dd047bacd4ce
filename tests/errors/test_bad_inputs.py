"""Every public function with at least twenty bad inputs, from one table."""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import pytest

import bilevel
import bilevel.cleaning
import bilevel.mixing
from bilevel.methods import METHODS
from tests.errors import bad_inputs
from tests.errors.bad_inputs import CASES, TABLE, Refused, pattern
from tests.methods import test_arguments as of_methods

FEWEST = 20
RETURNED = {
    # what functions hand back, which nobody has to make
    "Mixture", "Outcome", "Result", "Results", "mixing.CharacterModel",
    "data.Covertype", "data.Mnist", "data.Newsgroups",
    "diagnostics.HypergradientCheck", "diagnostics.TrackingErrors",
    "theory.Condition", "theory.Regime", "theory.Report",
}  # fmt: skip
ABSTRACT = {"loggers.Logger", "problems.KnownProblem", "problems.LeastSquares", "sets.RowWise"}
NO_ARGUMENTS = {"data.cache_folder"}
INTERNAL = {"sets.projections", "loggers.figures"}  # of a Variable or an Info, which a run makes


def public() -> set[str]:
    """The names of all that a user may call."""
    found = {name for name in bilevel.__all__ if callable(getattr(bilevel, name))}
    for module in (
        bilevel.data,
        bilevel.diagnostics,
        bilevel.loggers,
        bilevel.mixing,
        bilevel.problems,
        bilevel.schedules,
        bilevel.sets,
        bilevel.theory,
        bilevel.cleaning,
    ):
        own = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]
        prefix = module.__name__.removeprefix("bilevel.")
        found |= {
            f"{prefix}.{name}"
            for name in own
            if callable(getattr(module, name)) and not hasattr(bilevel, name)
        }
    return found


def test_every_public_function_has_twenty() -> None:
    counts = Counter(function for function, _, _ in CASES)
    counts.update(METHODS[bad.method].__name__ for bad in of_methods.BAD_VALUES)
    counts["Nesterov"] = sum(map(len, of_methods.ACCELERATION.values()))
    wanted = public() - RETURNED - ABSTRACT - NO_ARGUMENTS - INTERNAL
    assert {name for name in wanted if counts[name] < FEWEST} == set()
    assert {name for name in TABLE if counts[name] < FEWEST} == set()
    assert public() >= RETURNED | ABSTRACT | NO_ARGUMENTS | INTERNAL
    assert all(inspect.isclass(_found(name)) for name in RETURNED)


def _found(name: str) -> Any:
    value: Any = bilevel
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("function", TABLE)
def test_a_bad_value_is_refused_in_the_words_of_the_table(function: str) -> None:
    wrong = [
        told
        for name, argument, bad in CASES
        if name == function and (told := _otherwise(function, argument, bad)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def _otherwise(function: str, argument: str, bad: Refused) -> str | None:
    """What happens instead of what the table says."""
    given = f"{function}({argument}={str(bad.value)[:40]!r})"
    try:
        with pytest.raises(bad.error, match=pattern(argument, bad)):
            TABLE[function].call(**{argument: bad.value})
    except pytest.fail.Exception:
        return f"{given} raised nothing"
    except AssertionError as error:
        return f"{given}: {str(error)[:300]}"
    except Exception as error:
        return f"{given} raised {type(error).__name__}: {str(error)[:200]}"
    return None


def test_the_table_notices_what_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "nothing", bad_inputs.Entry(lambda x: None, {}))
    monkeypatch.setitem(TABLE, "raw", bad_inputs.Entry(lambda x: [][x], {}))
    assert _otherwise("nothing", "x", Refused(3)) == "nothing(x='3') raised nothing"
    assert "raised IndexError" in str(_otherwise("raw", "x", Refused(3)))
