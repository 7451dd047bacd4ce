"""Docstrings of the library as reStructuredText.

In the source, mathematics stands in indented paragraphs after a blank line, which reStructuredText
would read as a quotation and reflow. They are shown as they are written.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import bilevel

SECTION = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example|Examples|Reference|Note)s?:$")
LONE_LETTER = re.compile(r"^(\s+[\w, ]+: )([A-Z]\.)$")
"""A description such as "T.", which would be read as the number of a list."""

NAMES = re.compile(r"^\s+(\w+, )*\w+,$")
"""Names of arguments that go on in the next line."""

FOR_USERS = {"from_theory"}
"""What users call of a method, beside its class."""

ITEM = re.compile(r"([-*+]|\d+\.)\s|\.\. |>>> ")


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def as_literal_blocks(lines: list[str]) -> list[str]:
    """Mark every indented paragraph of the plain text as a literal block."""
    result: list[str] = []
    base, in_section, literal = 0, False, False
    for number, line in enumerate(lines):
        if not line.strip():
            result.append(line)
            continue
        indent = _indent(line)
        if indent == base:
            in_section, literal = bool(SECTION.match(line.strip())), False
        elif not in_section and not literal and _begins_a_block(lines, number, base):
            result.extend(["::", ""])
            literal = True
        result.append(line)
    return result


def _begins_a_block(lines: list[str], number: int, base: int) -> bool:
    """Whether an indented line follows a blank one and text that does not announce it itself."""
    if number < 2 or lines[number - 1].strip() or ITEM.match(lines[number].strip()):
        return False
    before = next((line for line in reversed(lines[: number - 1]) if line.strip()), "")
    return _indent(before) == base and not before.rstrip().endswith("::") and bool(before)


def with_joined_names(lines: list[str]) -> list[str]:
    """Arguments that are described together, with their names on one line.

    Napoleon reads the names up to the colon on one line only.
    """
    result: list[str] = []
    for line in lines:
        if result and NAMES.match(result[-1]) and ":" in line:
            result[-1] = f"{result[-1]} {line.strip()}"
        else:
            result.append(line)
    return result


def _process(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    text = with_joined_names(as_literal_blocks(lines))
    lines[:] = [LONE_LETTER.sub(r"\1\\\2", line) for line in text]


def _of_others(
    _app: Any, _what: str, _name: str, member: Any, _skip: bool, _options: Any
) -> bool | None:
    """Leave out what a class inherits from another package, which documents it itself."""
    module = getattr(member, "__module__", None) or getattr(
        getattr(member, "fget", None), "__module__", None
    )
    return True if module is not None and module.partition(".")[0] != "bilevel" else None


def _of_the_interface(
    app: Any, what: str, name: str, _member: Any, _skip: bool, _options: Any
) -> bool | None:
    """Leave out of a method's page what the library calls; the page of ``Method`` has it."""
    documented = getattr(bilevel, str(app.env.docname).rpartition(".")[2], None)
    a_method = inspect.isclass(documented) and issubclass(documented, bilevel.Method)
    if what != "class" or not a_method or documented is bilevel.Method:
        return None
    return None if name in FOR_USERS else True


def _signature(
    _app: Any, what: str, _name: str, of: Any, _options: Any, signature: str | None, returns: Any
) -> tuple[str | None, Any]:
    """The arguments of a method's class are those of ``__init__``; ``__new__`` only checks them."""
    if what == "class" and signature == "(*_, **given)":
        parameters = list(inspect.signature(of.__init__).parameters.values())[1:]
        plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
        signature = str(inspect.Signature(plain))
    return signature, returns


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx, before napoleon reads the sections."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    app.connect("autodoc-skip-member", _of_others)
    app.connect("autodoc-skip-member", _of_the_interface)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
