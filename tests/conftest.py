"""How the suite is spread over two processes."""

from __future__ import annotations

import pytest

# Both start Ray: one instance a session, so all of them run in one process, in turn.
RAY = ("ray", "e2e")


# First: the plugin reads the marks in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in RAY):
            item.add_marker(pytest.mark.xdist_group("ray"))
