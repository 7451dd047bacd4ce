"""Every public name has a page, and the page an example that runs."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest

import bilevel
from tests.docs.pages import DOCS, blocks

API = DOCS / "api"
INDEX = (API / "index.md").read_text()
NAMES = [name for name in bilevel.__all__ if name != "__version__"]
MODULES = [name for name in NAMES if inspect.ismodule(getattr(bilevel, name))]
OBJECTS = [name for name in NAMES if name not in MODULES]
# `bilevel.distributed` is the engine's own module, in which `rows` is for users.
OF_THE_ENGINE = {"distributed": set(bilevel.distributed.__all__) - {"rows"}}
DOCUMENTED = re.compile(r"^\.\. auto(?:class|function|data|exception):: (?:[\w.]+\.)?(\w+)$", re.M)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_public_name_has_a_page_with_an_example(name: str) -> None:
    if (API / f"{name}.md").exists():
        assert blocks(API / f"{name}.md")
        return
    assert re.search(rf"^   {name}$", INDEX, re.MULTILINE), f"{name} is not in docs/api/index.md"
    # Examples in docstrings are run as doctests.
    assert ">>> " in (getattr(bilevel, name).__doc__ or ""), f"{name} has no example"


def members(module: ModuleType) -> set[str]:
    """What a module offers: what it says itself, or else what is defined in it."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and (inspect.isclass(value) or inspect.isfunction(value))
    }


# Names that rooms share with one another, and users do not need.
SHARED_BY_ROOMS = {
    "sets": {"RowWise", "projections"},
    "prox": {"check_terms", "refuse_both", "terms_of"},
    "schedules": {"as_schedule", "as_share", "positive_at", "share_at"},
}


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_has_a_page_with_all_its_names_and_an_example(name: str) -> None:
    page = API / f"{name}.md"
    assert re.search(rf"^{name}$", INDEX, re.MULTILINE), f"{name} is not in docs/api/index.md"
    assert blocks(page), f"docs/api/{name}.md has no example"
    shown = set(DOCUMENTED.findall(page.read_text())) | set(OBJECTS)
    left_out = OF_THE_ENGINE.get(name, set()) | SHARED_BY_ROOMS.get(name, set())
    assert members(getattr(bilevel, name)) - left_out <= shown
