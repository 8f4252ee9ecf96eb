"""The command line: `specserve serve | check-config | render | chat | observe`.

Owns what is typed and printed. Knows no Ray until `serve` runs, so the other commands start at
once. Invariant: a mistake of the user's ends in one line on stderr and exit code 1, not in a
traceback.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from deploy.client import ChatError, first_model, stream_chat, user_message
from deploy.environment import prepare
from deploy.observe import GRAFANA, ObserveError, observing
from deploy.settings import (
    DEMO_MODELS,
    AppSettings,
    check_models,
    load_settings,
    parse_settings,
    read_yaml,
)
from workers.errors import SpecserveError

if TYPE_CHECKING:  # imports Ray
    from deploy.local import Running

app = typer.Typer(
    help="Serve text and vision-language models with speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
DEFAULT_CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
SAMPLE_IMAGE = DEMO_MODELS / "sample.png"

ConfigOption = Annotated[Path, typer.Option("--config", "-c", help="Settings file (YAML).")]
ConfigArgument = Annotated[Path, typer.Argument(help="Settings file (YAML).")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print an expected error as one line and exit with 1."""
    try:
        yield
    except (SpecserveError, ChatError, TimeoutError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def serve(
    config: ConfigOption = DEFAULT_CONFIG,
    port: Annotated[int | None, typer.Option(help="0 takes any free port.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
) -> None:
    """Start Ray and the application here, and run until Ctrl-C or SIGTERM."""
    with one_line_errors():
        settings = load_settings(config)
        check_models(settings)
        http = settings.http
        http = replace(
            http,
            host=http.host if host is None else host,
            port=http.port if port is None else port,
        )
        _run(settings.model_copy(update={"http": http}))


def _run(settings: AppSettings) -> None:
    prepare(settings.engine_config().num_threads or 1)
    from deploy.local import running  # after that, and late: it imports Ray

    stop = threading.Event()
    started_s = time.monotonic()
    typer.echo(f"starting {settings.model_id}: {settings.worker.num_replicas} workers ...")
    # Until the application runs, a signal interrupts its start; then it ends the wait.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with running(settings) as started:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
            _print_ready(settings, started, time.monotonic() - started_s)
            stop.wait()
            typer.echo("stopping ...")
    except KeyboardInterrupt:
        typer.echo("stopped before it was ready", err=True)
        raise typer.Exit(130) from None
    typer.echo("stopped")


def _print_ready(settings: AppSettings, started: Running, seconds: float) -> None:
    url = started.url
    typer.echo(f"\nready in {seconds:.0f} s at {url}\n")
    typer.echo(f"A chat page is at {url}/; the processes' logs are {started.logs}/worker-*.err\n")
    typer.echo("Try it:\n")
    typer.echo(_curl(url, settings.model_id, '"Count from 3 to 9."'))
    if SAMPLE_IMAGE.is_file():
        image = (
            """{"type": "image_url", "image_url": {"url": "data:image/png;base64,'"$IMAGE"'"}}"""
        )
        question = '{"type": "text", "text": "Describe the image."}'
        typer.echo(f"  IMAGE=$(base64 < {SAMPLE_IMAGE} | tr -d '\\n')")
        typer.echo(_curl(url, settings.model_id, f"[{image}, {question}]"))
    typer.echo("Ctrl-C stops it.")
    sys.stdout.flush()


def _curl(url: str, model_id: str, content: str) -> str:
    """Return a command to paste; `content` is JSON."""
    message = f'{{"role": "user", "content": {content}}}'
    body = f'{{"model": "{model_id}", "stream": true, "temperature": 0, "messages": [{message}]}}'
    return (
        f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"    -d '{body}'\n"
    )


@app.command("check-config")
def check_config(config: ConfigArgument) -> None:
    """Check a settings file and print the settings it amounts to."""
    with one_line_errors():
        settings = load_settings(config)
        check_models(settings)
        # As the processes get them, with their defaults.
        resolved = {
            "engine": asdict(settings.engine_config()),
            "serving": asdict(settings.serving_config()),
            "worker": asdict(settings.worker),
            "ingress": asdict(settings.ingress),
            "observability": asdict(settings.observability),
            "http": asdict(settings.http),
        }
        typer.echo(yaml.safe_dump(resolved, sort_keys=False).rstrip())


@app.command()
def render(config: ConfigArgument) -> None:
    """Write the Ray Serve config (for `serve deploy` or a RayService) to stdout."""
    from deploy.serve_config import serve_config  # imports Ray

    with one_line_errors():
        values = read_yaml(config)
        document = serve_config(values, parse_settings(values, str(config)))
        typer.echo(yaml.safe_dump(document, sort_keys=False).rstrip())


@app.command()
def chat(
    text: Annotated[str | None, typer.Argument(help="Left out: a conversation.")] = None,
    image: Annotated[list[Path] | None, typer.Option(help="May be given several times.")] = None,
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
) -> None:
    """Talk to a running server."""
    with one_line_errors():
        model = first_model(url)
        messages: list[dict[str, Any]] = []
        pending = list(image or [])
        for line in [text] if text is not None else _typed_lines():
            messages.append(user_message(line, pending))
            pending = []  # the images belong to the first question
            answer = ""
            body = {"model": model, "messages": messages, "temperature": temperature}
            for piece in stream_chat(url, body):
                answer += piece
                typer.echo(piece, nl=False)
            typer.echo()
            messages.append({"role": "assistant", "content": answer})


@app.command()
def observe(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    port: Annotated[int, typer.Option(help="Of Prometheus; 0 takes any free port.")] = 9090,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between scrapes.")] = 5.0,
) -> None:
    """Run a Prometheus with our rules against a running server, until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with one_line_errors(), suppress(KeyboardInterrupt):
        with observing(url, port, interval) as (prometheus, process):
            typer.echo(f"Prometheus at {prometheus} reads {url}/metrics every {interval:g} s\n")
            typer.echo(f"  {prometheus}/targets   whether it gets them")
            typer.echo(f"  {prometheus}/alerts    the alerts; docs/runbook.md tells what to do\n")
            typer.echo("A Grafana shows the dashboards, if it is started with these:\n")
            typer.echo(f"  PROMETHEUS_URL={prometheus} SPECSERVE_DASHBOARDS={GRAFANA} \\")
            typer.echo(f"    GF_PATHS_PROVISIONING={GRAFANA / 'provisioning'} grafana server\n")
            typer.echo("Ctrl-C stops Prometheus and throws its data away.")
            sys.stdout.flush()
            process.wait()
        raise ObserveError("Prometheus has ended")


def _typed_lines() -> Iterator[str]:
    """Yield what is typed until Ctrl-D."""
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return


def main() -> None:
    """Run the command line."""
    app()
