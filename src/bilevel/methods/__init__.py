"""The algorithms, one file each, all with one interface (:mod:`bilevel.methods.base`)."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from bilevel.errors import ArgumentError, ArgumentTypeError
from bilevel.methods.aid import AID
from bilevel.methods.base import Iterates, Method
from bilevel.methods.bome import BOME
from bilevel.methods.capabilities import Ability, Limit, Properties
from bilevel.methods.descent import DescentMethod
from bilevel.methods.evaluator import Descent, Evaluator, Move
from bilevel.methods.f2ba import F2BA
from bilevel.methods.f2sa import F2SA
from bilevel.methods.f3sa import F3SA
from bilevel.methods.itd import ITD
from bilevel.methods.meha import MEHA
from bilevel.methods.no_bilevel import NoBilevel
from bilevel.methods.penalty import PenaltyMethod
from bilevel.methods.soba import MASOBA, SOBA
from bilevel.methods.sobo import SOBO
from bilevel.methods.state import Info, State
from bilevel.methods.vpbgd import VPBGD

METHODS: MappingProxyType[str, type[Method[Any]]] = MappingProxyType(
    {
        "f2sa": F2SA,
        "f3sa": F3SA,
        "f2ba": F2BA,
        "bome": BOME,
        "vpbgd": VPBGD,
        "meha": MEHA,
        "sobo": SOBO,
        "soba": SOBA,
        "ma-soba": MASOBA,
        "aid": AID,
        "itd": ITD,
        "no-bilevel": NoBilevel,
    }
)
"""The methods by name; each class says in ``properties`` what it uses and assumes."""


def able(ability: Ability) -> str:
    """The methods that can do something, as a list in words."""
    *others, last = [
        method.__name__ for method in METHODS.values() if ability in method.properties.abilities
    ]
    return f"{', '.join(others)} and {last}" if others else last


def method_of(method: str | Method[Any]) -> Method[Any]:
    """The method of that name with its defaults, or the given object itself."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        if method not in METHODS:
            raise ArgumentError(
                f"method={method!r} is not known; known are {', '.join(map(repr, METHODS))}"
            )
        return METHODS[method]()
    hint = " (an instance is needed, not the class)" if isinstance(method, type) else ""
    raise ArgumentTypeError(
        f"method must be one of {', '.join(map(repr, METHODS))} or a method object, "
        f"not {method!r}{hint}"
    )


__all__ = [
    "AID",
    "BOME",
    "F2BA",
    "F2SA",
    "F3SA",
    "ITD",
    "MASOBA",
    "MEHA",
    "METHODS",
    "SOBA",
    "SOBO",
    "VPBGD",
    "Ability",
    "Descent",
    "DescentMethod",
    "Evaluator",
    "Info",
    "Iterates",
    "Limit",
    "Method",
    "Move",
    "NoBilevel",
    "PenaltyMethod",
    "Properties",
    "State",
    "able",
    "method_of",
]
