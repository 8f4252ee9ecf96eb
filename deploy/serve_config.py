"""Ray Serve's own config file, made from our settings.

Owns the document and its checks. Knows no cluster. Invariant: what leaves here passes Serve's
schema, and has only keys that the schema knows: Serve itself ignores a mistyped key silently.
"""

from __future__ import annotations

from typing import Any

from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deploy.app import APP_NAME, IMPORT_PATH
from deploy.settings import AppSettings


def serve_config(values: dict[str, Any], settings: AppSettings) -> dict[str, Any]:
    """Return the document; `values` are the settings as written, `settings` the same, checked.

    The arguments are those of the file, without defaults: these stay with the code that runs.
    """
    document: dict[str, Any] = {
        "proxy_location": "EveryNode",
        # In a cluster, others must reach the proxy; who may is the network's to say.
        "http_options": {"host": "0.0.0.0", "port": settings.http.port},
        "applications": [
            {
                "name": APP_NAME,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": values,
            }
        ],
    }
    ServeDeploySchema.model_validate(document)
    _check_keys(document, ServeDeploySchema.model_fields)
    _check_keys(document["http_options"], HTTPOptionsSchema.model_fields)
    _check_keys(document["applications"][0], ServeApplicationSchema.model_fields)
    return document


def _check_keys(values: Any, known: Any) -> None:
    unknown = set(values) - set(known)
    assert not unknown, f"not in Serve's schema: {unknown}"
