"""How long a file of Python or a notebook is, and whether it is still the same code.

python -m examples.gallery._lines FILE ...    the number of lines of code in each

An example that runs others for comparison may say where they begin (``COMPARISON``). What stands
before that runs by itself, and is what others have in their files; its lines are counted too.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import sys
import tokenize
from pathlib import Path

COMPARISON = "# --- what it is compared with"
"""Begins the line after which an example has its baselines, their measure and nothing else."""

# Tokens that are no code: comments, line ends, and the ends of blocks.
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _docstring(node: ast.AST) -> ast.stmt | None:
    if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
        return node.body[0]
    return None


def code_lines(source: str) -> int:
    """The lines with code: without imports, comments, docstrings and blank lines."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        told = node if isinstance(node, ast.Import | ast.ImportFrom) else _docstring(node)
        if told is not None:
            left_out.update(range(told.lineno, (told.end_lineno or told.lineno) + 1))
    counted: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            counted.update(range(token.start[0], token.end[0] + 1))
    return len(counted - left_out)


def without_comparison(source: str) -> str:
    """The part of an example that does not compare; all of it where it does not say so."""
    return source.split(f"\n{COMPARISON}", 1)[0] + "\n"


def fingerprint(source: str) -> str:
    """A short name of the code, which its comments, docstrings and layout do not change."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        told = _docstring(node)
        if told is not None and isinstance(node, _WITH_DOCSTRING):
            node.body.remove(told)
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12]


def read_code(path: Path) -> str:
    """The code of a file; of a notebook that of its cells, without the shell's commands."""
    text = path.read_text()
    if path.suffix != ".ipynb":
        return text
    cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    lines = [line for cell in cells for line in "".join(cell).splitlines()]
    return "\n".join(line for line in lines if not line.lstrip().startswith(("%", "!"))) + "\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        code = read_code(path)
        print(f"{code_lines(without_comparison(code)):5d} of {code_lines(code):5d}  {path}")
