"""Rules of the house that no linter checks: sizes, docstrings, one place for each thing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for package in ("workers", "serving", "deploy") for path in (ROOT / package).rglob("*.py")
)
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 50


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_can_be_read_in_one_go(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it owns and what it does not know"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # The docstring is for the caller; what is limited is what must be followed.
            docstring = ast.get_docstring(node, clean=False)
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            lines -= len(docstring.splitlines()) if docstring else 0
            assert lines <= MAX_FUNCTION_LINES, f"{node.name}: {lines} lines"


def test_the_licence_of_names() -> None:
    """Names that say nothing: split by noun instead."""
    assert not [p for p in SOURCES if p.stem in {"utils", "helpers", "common", "misc", "types"}]
