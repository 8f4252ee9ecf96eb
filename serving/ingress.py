"""The ingress as a Ray Serve deployment: the HTTP app in a replica.

Owns the replica's construction: tokenizer, image processor, handles, app. Knows no routes and no
engine. Invariant: it holds no request state beyond open streams, so any number of replicas can
stand side by side; each sees all workers.
"""

from __future__ import annotations

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from serving.api import COUNTED, Services, build_api
from serving.auth import load_api_keys
from serving.config import ServingConfig
from serving.counters import IngressCounters
from serving.fetch import ImageFetcher
from serving.prompts import PromptBuilder
from serving.relay import Relay
from serving.router import RayWorkerClient, our_errors
from serving.tracing import TracedWorkers
from workers.contracts import Report, Role, WorkerClient
from workers.telemetry.logs import configure
from workers.telemetry.reporter import Reporter
from workers.telemetry.tracing import load_tracing


@serve.ingress()
class Ingress:
    """What `deploy.app` wraps into a Serve deployment."""

    def __init__(
        self, config: ServingConfig, workers: DeploymentHandle, metrics: DeploymentHandle
    ) -> None:
        configure(config.telemetry)
        name = serve.get_replica_context().replica_id.unique_id
        tracing = load_tracing(config.telemetry, Role.INGRESS, name)
        client: WorkerClient = RayWorkerClient(workers, config.health_timeout_s)
        if tracing.is_on:
            client = TracedWorkers(client, tracing)
        self._metrics = metrics
        counters = IngressCounters(COUNTED)
        self._reporter = Reporter(
            Role.INGRESS, config.model_id, name, counters.snapshot, self._pass_on
        )
        self._services = Services(
            model_id=config.model_id,
            prompts=load_prompts(config, counters),
            workers=client,
            relay=Relay(
                client,
                config.max_replays,
                worker_wait_s=config.worker_wait_s,
                counters=counters,
            ),
            counters=counters,
            tracing=tracing,
            metrics=self._render_metrics,
            max_body_bytes=config.max_body_bytes,
            max_open=config.max_open_requests,
            keep_alive_s=config.keep_alive_s or None,
            max_request_s=config.max_request_s or None,
            # Here, so that keys are in no argument that Ray keeps.
            api_keys=load_api_keys(config.api_key_file, config.api_key_env),
            cors_origins=config.cors_origins,
            has_access_log=config.access_log,
            # Serve's proxy passes a request id in, and appends it to the answer.
            echoes_request_id=False,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build the app; Serve calls this once, after the constructor."""
        return build_api(self._services)

    async def check_health(self) -> None:
        """Begin to report; Serve calls this before the first request, and every few seconds."""
        self._reporter.start()

    async def __del__(self) -> None:
        """Say goodbye to the exporter when Serve drops the replica."""
        if reporter := getattr(self, "_reporter", None):  # the constructor may have failed
            await reporter.stop()

    async def _render_metrics(self) -> str:
        # From one process for all ingress replicas: a scrape that met another process each time
        # would see counters jump back.
        with our_errors():
            text: str = await self._metrics.render.remote(await self._reporter.report())
            return text

    async def _pass_on(self, report: Report) -> None:
        with our_errors():
            await self._metrics.take.remote(report)


def load_prompts(config: ServingConfig, counters: IngressCounters) -> PromptBuilder:
    """Load what turns bodies into token ids; text-only models have no image processor."""
    # Here, since whoever builds the application imports this module, and needs no transformers.
    from serving.processor import ImageProcessor, load_videos
    from serving.tokenizer import ServingTokenizer

    tokenizer = ServingTokenizer.load(config.path, config.revision)
    has_images = tokenizer.image_token_id is not None
    processor = ImageProcessor.load(config.path, config.revision) if has_images else None
    videos = None
    if has_images:
        videos = load_videos(tokenizer.model_type, config.path, config.revision)
    fetcher = ImageFetcher(config.fetch, config.images.max_bytes)
    return PromptBuilder(
        tokenizer, processor, config.images, videos=videos, fetcher=fetcher, counters=counters
    )
