"""Checkpoints shared by the engine tests: written once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.workers import tiny

Checkpoints = Callable[..., str]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models are faster on one thread, and spinning ones slow everybody down."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return `path(family, seed, **config changes)`, each written on first use."""
    root: Path = tmp_path_factory.mktemp("checkpoints")
    known: dict[str, str] = {}

    def path(family: str, seed: int = 0, **changes: float) -> str:
        name = "-".join([family, str(seed), *(f"{k}={v}" for k, v in sorted(changes.items()))])
        if name not in known:
            known[name] = tiny.save(root / name, family, seed, **changes)
        return known[name]

    return path


@pytest.fixture(scope="session")
def noisy_draft(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """Return `path(family)` of the target (seed 0) with noise on its weights.

    Such a draft is right about half of the time, so that every accept length occurs.
    """
    known: dict[str, str] = {}

    def path(family: str) -> str:
        if family not in known:
            directory = tmp_path_factory.mktemp(f"noisy-{family}")
            tiny.save(directory, family, 0, noise=0.012)
            known[family] = str(directory)
        return known[family]

    return path


@pytest.fixture
def pair(checkpoints: Checkpoints, noisy_draft: Callable[[str], str]) -> tuple[str, str]:
    return checkpoints("qwen2_5_vl"), noisy_draft("qwen2_5_vl")
