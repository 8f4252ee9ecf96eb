"""Runs an application on a Ray of its own, on this machine, for one process's life.

Owns starting and stopping: Ray, Serve, the application, in this order and back. Knows no command
line. Invariant: whatever was started is stopped when the `with` block ends, however it ends.

NOTE: Ray's node is 127.0.0.1 (see `deploy.environment`), but Serve gives each replica a port for
calls between deployments on every interface, and has no setting for it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import DeploymentStatus

from deploy.app import APP_NAME, build_app, num_cpus_needed
from deploy.settings import AppSettings, HttpSettings
from workers.errors import ConfigError, ModelLoadError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
# Holds the pixels of images on their way to a worker.
OBJECT_STORE_BYTES = 256 * 1024**2
# Beyond the replicas' own grace, for Serve to notice that they are gone.
STOP_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Running:
    """An application that runs."""

    url: str
    # Each process writes a file there.
    logs: Path


def choose_port(host: str, port: int) -> int:
    """Return `port` if it is free, or any free port for 0.

    Raises:
        ConfigError: It is taken, or the host is not of this machine.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the proxy will: a port whose last connections are still closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        # UnicodeError: a host that no name server could be asked for.
        except (OSError, UnicodeError) as error:
            raise ConfigError("http.port", f"{host}:{port}", f"cannot be used: {error}") from error
        chosen: int = probe.getsockname()[1]
        return chosen


def reachable_host(host: str) -> str:
    """Return the address at which this machine reaches a server bound to `host`."""
    return LOOPBACK if host in ("0.0.0.0", "::") else host


@contextmanager
def running(settings: AppSettings) -> Iterator[Running]:
    """Run the application; yield where it is when a worker can generate."""
    http = replace(settings.http, port=choose_port(settings.http.host, settings.http.port))
    # Ray's own news would come between ours and the user.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    grace_s = max(s.graceful_shutdown_timeout_s for s in (settings.worker, settings.ingress))
    try:
        on_term = signal.getsignal(signal.SIGTERM)
        context = ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(num_cpus_needed(settings))),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address=LOOPBACK,
        )
        # Ray has taken the signal for itself, and would exit without stopping anything.
        signal.signal(signal.SIGTERM, on_term)
        yield Running(_deploy(settings, http), Path(context.address_info["session_dir"]) / "logs")
    finally:
        if ray.is_initialized():
            _stop(context.address_info["gcs_address"], grace_s + STOP_MARGIN_S)


def _deploy(settings: AppSettings, http: HttpSettings) -> str:
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": http.host, "port": http.port},
        logging_config={"log_level": "WARNING"},
    )
    # Returns when every replica is ready, and raises when one cannot start.
    try:
        serve.run(build_app(settings), name=APP_NAME, route_prefix="/")
    except RuntimeError as error:
        raise ModelLoadError(f"the application did not start: {_reasons() or error}") from error
    url = f"http://{reachable_host(http.host)}:{http.port}"
    _wait_healthy(url)
    return url


def _reasons() -> str:
    """Return the last line of what Serve knows of each deployment that failed: its cause."""
    application = serve.status().applications[APP_NAME]
    failed = {
        name: deployment.message.rstrip().rpartition("\n")[2]
        for name, deployment in application.deployments.items()
        if deployment.status == DeploymentStatus.DEPLOY_FAILED
    }
    return "; ".join(f"{name}: {message}" for name, message in failed.items())


def _wait_healthy(url: str, timeout_s: float = 30.0) -> None:
    """Wait for the proxy to know the route: it learns of it a moment after the deployment."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=timeout_s).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url}/health did not become healthy in {timeout_s:g} s")
        time.sleep(0.1)


def _stop(gcs_address: str, timeout_s: float) -> None:
    """Let the replicas end their streams, then stop Ray.

    A signal to the whole process group has stopped Ray already; asking it would then wait until
    Ray's own library ends this process.
    """
    if _is_reachable(gcs_address):
        deletion = threading.Thread(target=_delete, daemon=True)
        deletion.start()
        deletion.join(timeout_s)
    ray.shutdown()


def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def _delete() -> None:
    try:
        # Not `serve.shutdown()`: it also ends the controller, which then shows an error of its own.
        serve.delete(APP_NAME)
    except (RayServeException, RayError) as error:
        logger.debug("nothing to delete: %s", error)
