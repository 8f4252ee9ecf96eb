"""Builds the Ray Serve application: workers, metrics exporter, ingress.

Owns which deployment gets which options. Knows no requests. Invariant: building starts nothing;
`bind()` needs no cluster. Serve reads the builder's annotation at run time, and silently passes a
plain dictionary if it is not the class itself: so no `from __future__ import annotations` here.
"""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import BackpressureConfig, RequestRouterConfig

from deploy.metrics.exporter import MetricsExporter
from deploy.settings import AppSettings, ReplicaSettings, WorkerSettings
from serving.ingress import Ingress
from workers.actor import Worker

APP_NAME = "specserve"
IMPORT_PATH = "deploy.app:build_app"
WORKER, METRICS, INGRESS = "worker", "metrics", "ingress"
PREFIX_ROUTER = "serving.prefix_router:PrefixRouter"
ROUTING_STATS_PERIOD_S = 2.0
# The exporter takes a report a second from each process, and answers scrapes.
METRICS_CPUS = 0.05
MAX_REPORTS = 1000


def build_app(args: AppSettings) -> Application:
    """Build the application (the `import_path` of Serve configs)."""
    return compose(args, Worker)


def compose(settings: AppSettings, worker_class: type) -> Application:
    """Build the application around a worker class: the real one, or a test's."""
    metrics = serve.deployment(
        MetricsExporter,
        name=METRICS,
        num_replicas=1,
        max_ongoing_requests=MAX_REPORTS,
        ray_actor_options={"num_cpus": METRICS_CPUS},
    ).bind(APP_NAME, settings.observability)
    workers = serve.deployment(
        worker_class,
        name=WORKER,
        max_ongoing_requests=settings.worker_ongoing,
        max_queued_requests=settings.worker.max_queued_requests,
        request_router_config=_router(settings.worker),
        **_replica_options(settings.worker),
    ).bind(settings.engine_config(), metrics)
    return serve.deployment(
        Ingress,
        name=INGRESS,
        max_ongoing_requests=settings.ingress_ongoing,
        max_queued_requests=settings.worker.max_queued_requests,
        backpressure_config=BackpressureConfig(status_code=429, retry_after_s=1),
        # It writes its own, which knows when a stream ends.
        logging_config={"enable_access_log": False},
        **_replica_options(settings.ingress),
    ).bind(settings.serving_config(), workers, metrics)


def _router(worker: WorkerSettings) -> RequestRouterConfig:
    """Return who picks a worker for each request."""
    if worker.router == "power_of_two":
        return RequestRouterConfig()
    return RequestRouterConfig(
        request_router_class=PREFIX_ROUTER,
        request_router_kwargs={"prefix_weight": worker.prefix_weight},
        request_routing_stats_period_s=ROUTING_STATS_PERIOD_S,
    )


def num_cpus_needed(settings: AppSettings) -> float:
    """Return what Ray must offer for all replicas to be scheduled."""
    replicas = (settings.worker, settings.ingress)
    return METRICS_CPUS + sum(r.num_replicas * r.num_cpus for r in replicas)


def _replica_options(settings: ReplicaSettings) -> dict[str, Any]:
    return {
        "num_replicas": settings.num_replicas,
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        "graceful_shutdown_timeout_s": settings.graceful_shutdown_timeout_s,
        "health_check_period_s": settings.health_check_period_s,
        "health_check_timeout_s": settings.health_check_timeout_s,
    }
