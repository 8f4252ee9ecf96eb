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


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Two Rays on two cores make other tests fail: once the plugin's suffix was lost in silence."""
    if getattr(session.config.option, "loadgroup", False):
        grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
        assert all(item.nodeid.endswith("@ray") for item in grouped), "groups are not kept together"
