"""Which version runs here."""

from __future__ import annotations

import importlib.metadata


def installed_version() -> str:
    """Return the version; "unknown" for a copied tree that was never installed."""
    try:
        return importlib.metadata.version("specserve")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
