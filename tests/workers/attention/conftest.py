"""The flash-attn distributions as the tests see them: none installed, or one of real Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.workers.attention import fake_kernels
from tests.workers.attention.fetch_interfaces import INTERFACES, Interface
from workers.models.attention import flash

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def fetched_interfaces() -> None:
    """Have the real interface files in the cache; a failure is a failure, never a skip."""
    if all(interface.is_cached() for interface in INTERFACES):
        return
    command = [sys.executable, "-m", "tests.workers.attention.fetch_interfaces"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if result.returncode or not all(interface.is_cached() for interface in INTERFACES):
        pytest.fail(
            "the flash-attn interface files could not be fetched by pip (network or index?):\n"
            f"{result.stdout[-2000:]}\n{result.stderr[-2000:]}"
        )


def _imported() -> list[str]:
    packages = {known.module.partition(".")[0] for known in flash.KNOWN}
    return [name for name in sys.modules if name.partition(".")[0] in packages]


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide every distribution, so that a test means the same on any machine."""
    for name in _imported():
        monkeypatch.delitem(sys.modules, name)
    for name in ("vllm", *(known.module for known in flash.KNOWN)):
        monkeypatch.setitem(sys.modules, name, None)
    yield
    # What the test imported came with a stand-in kernel: no later test may find it.
    for name in _imported():
        del sys.modules[name]


@pytest.fixture(params=INTERFACES, ids=lambda interface: interface.package)
def interface(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    fetched_interfaces: None,
    nothing_installed: None,
) -> Interface:
    """One distribution after the other as the only one installed."""
    fake_kernels.install(request.param, monkeypatch)
    return request.param
