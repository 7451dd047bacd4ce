"""Every public function refuses bad values with an error that names the argument."""

from __future__ import annotations

import re

import pytest

from tests.errors.bad_inputs import TABLE, Entry, Refused


@pytest.mark.parametrize("function", TABLE)
def test_a_bad_value_is_refused_and_its_argument_named(function: str) -> None:
    entry = TABLE[function]
    wrong = [
        f"{function}({argument}={str(bad.value)[:40]!r}) {happened}"
        for argument, values in entry.arguments.items()
        for bad in values
        if (happened := otherwise(entry, argument, bad)) is not None
    ]
    assert not wrong, "\n".join(wrong)


def otherwise(entry: Entry, argument: str, bad: Refused) -> str | None:
    """What happens instead of what the table says."""
    named = rf"\b{argument}\b" if bad.named is None else bad.named
    try:
        entry.call(**{argument: bad.value})
    except bad.error as error:
        return None if re.search(named, str(error)) else f"does not name it: {str(error)[:200]}"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:200]}"
    return "raised nothing"


def test_the_table_notices_what_is_not_refused() -> None:
    assert otherwise(Entry(lambda x: None, {}), "x", Refused(3)) == "raised nothing"
    assert "IndexError" in str(otherwise(Entry(lambda x: [][x], {}), "x", Refused(3)))
    unnamed = Entry(lambda x: [][x], {})
    assert "name" in str(otherwise(unnamed, "x", Refused(3, IndexError)))
