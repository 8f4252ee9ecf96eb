"""Writes the README's table of metrics; with `--check`, says whether it is up to date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from deploy.metrics.table import with_table

README = Path(__file__).parents[2] / "README.md"


def main(*, is_check: bool, out: Callable[[str], object] = print) -> int:
    """Write the table, or tell that it would change; return the exit code."""
    text = README.read_text(encoding="utf-8")
    made = with_table(text)
    if is_check and made != text:
        out("README.md: the table of metrics is not up to date; run `make generate`")
        return 1
    if not is_check:
        README.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(is_check="--check" in sys.argv[1:]))
