"""Writes the dashboards' JSON beside this file; with `--check`, says whether it is up to date."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana import serving, speculation, workers
from deploy.grafana.panels import make_dashboard
from deploy.metrics.families import BUILD, PREFIX
from workers.telemetry.series import ADMITTED

FOLDER = Path(__file__).parent
BOARDS: dict[str, ModuleType] = {
    "serving": serving, "speculation": speculation, "workers": workers,
}  # fmt: skip
_ADMITTED = f"{PREFIX}{ADMITTED.name}_total"
VARIABLES = {
    "namespace": f"label_values({PREFIX}{BUILD.name}, namespace)",
    "model": f'label_values({_ADMITTED}{{namespace=~"$namespace"}}, model)',
    "worker": (f'label_values({_ADMITTED}{{namespace=~"$namespace", model=~"$model"}}, worker)'),
}


def written(board: ModuleType) -> str:
    """Return a dashboard as JSON."""
    made = make_dashboard(board.UID, board.TITLE, board.DESCRIPTION, board.ROWS, VARIABLES)
    return json.dumps(made, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def main(*, is_check: bool, out: Callable[[str], object] = print) -> int:
    """Write all, or tell which would change; return the exit code."""
    stale = []
    for name, board in BOARDS.items():
        path, text = FOLDER / f"{name}.json", written(board)
        if is_check and (not path.is_file() or path.read_text(encoding="utf-8") != text):
            stale.append(name)
        elif not is_check:
            path.write_text(text, encoding="utf-8")
    if stale:
        out(f"not up to date: {', '.join(stale)}; run `make generate`")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(is_check="--check" in sys.argv[1:]))
