"""Puts an engine together from its settings.

Owns the order of loading and the number of KV blocks: what the memory setting holds, counted over
every model of the worker, since all share one block table. Knows no requests. Invariant: an engine
that is returned has answered a warm-up request, so a contract with a library that no longer holds
shows at start and not in the first client's request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch

from workers.config import CacheConfig, EngineConfig
from workers.contracts import GenerationRequest, SamplingParams
from workers.engine import Engine
from workers.errors import ConfigError, ModelLoadError
from workers.kv.linear_state import LinearShape
from workers.kv.pool import KVShape
from workers.kv.state_slots import StateSlots
from workers.models.families import ModelAdapter
from workers.models.loader import LoadedModel, load_model, resolve_device
from workers.models.runner import ImageCache, ModelRunner
from workers.sampling.grammar import GrammarCompiler
from workers.spec.registry import load_drafter

logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig) -> Engine:
    """Load the models, size the K/V and return a warm engine.

    Raises:
        ConfigError: The memory holds no block, or the device does not exist.
        ModelLoadError: A checkpoint cannot be served, or a warm-up request failed.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    device = resolve_device(config.device)
    target = load_model(config.target, device)
    source = load_drafter(config, target, device)
    shapes = [target.adapter.kv_shape]
    linear = target.adapter.linear_shape
    if source is not None and source.kv_shape is not None:
        shapes.append(source.kv_shape)
    workspace = workspace_bytes(config, target.adapter.vocab_size)
    if linear is not None:
        workspace += config.cache.state_cache_bytes
    state_bytes = 0 if linear is None else linear.state_bytes
    if source is not None and source.state_bytes:
        state_bytes += source.state_bytes
        config = _without_prefix_caching(config)
    running_states = config.scheduler.max_running * state_bytes
    num_blocks = count_blocks(config.cache, shapes, device, workspace, running_states)
    states = None if linear is None else make_state_slots(config, linear, num_blocks)
    runner = ModelRunner(
        target.adapter,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        device=device,
        attention_backend=config.attention_backend,
        num_state_slots=0 if states is None else states.num_slots,
        image_cache=ImageCache(config.cache.image_cache_bytes),
    )
    drafter = None if source is None else source.place(runner)
    engine = Engine(
        config,
        runner,
        num_ids=target.num_ids,
        drafter=drafter,
        states=states,
        grammars=_load_grammars(target),
    )
    _warm_up(engine, target.adapter)
    logger.info("engine ready: %d blocks of %d tokens", num_blocks, config.cache.block_size)
    return engine


def _load_grammars(target: LoadedModel) -> GrammarCompiler | None:
    """Prepare for requests with a grammar, which takes a tokenizer and a token that ends."""
    eos_ids = frozenset(i for i in target.adapter.eos_ids if i < target.num_ids)
    reason = "the model has no tokenizer or no end-of-sequence id"
    if target.tokenizer is not None and eos_ids:
        try:
            return GrammarCompiler(target.tokenizer, target.adapter.vocab_size, eos_ids)
        except ValueError as error:  # tokens whose bytes cannot be told
            reason = str(error)
    logger.warning("grammars are refused: %s", reason)
    return None


def _without_prefix_caching(config: EngineConfig) -> EngineConfig:
    """A draft's recurrent state is kept at no place where a prefix could end."""
    if config.cache.prefix_caching:
        logger.warning("no prefix is reused: the draft model has linear attention")
    return replace(config, cache=replace(config.cache, prefix_caching=False))


def workspace_bytes(config: EngineConfig, vocab_size: int) -> int:
    """Return what the sampler needs at the fullest step, which K/V must leave free.

    The rows are every sequence's last token and its drafts, in float32: the logits, the copy for
    log-probabilities, the scaled copy, the noise or counts, and one more while they are filtered;
    and what each sequence has said, 5 bytes an id.
    """
    drafts = 0 if config.speculation.method == "none" else config.speculation.num_draft_tokens
    running = config.scheduler.max_running
    rows = running * (1 + drafts)
    return vocab_size * (5 * rows * torch.float32.itemsize + 5 * running)


def make_state_slots(config: EngineConfig, linear: LinearShape, num_blocks: int) -> StateSlots:
    """Return the slots of recurrent state: one a running sequence, and what the cache holds."""
    cache = config.cache
    num_checkpoints = 0
    if cache.prefix_caching:
        # More than the blocks' tokens can reach would never be found again.
        reachable = num_blocks * cache.block_size // cache.state_interval
        num_checkpoints = min(cache.state_cache_bytes // linear.state_bytes, reachable)
        if num_checkpoints == 0:
            logger.warning(
                "no prefix is reused: cache.state_cache_bytes (%d) holds no recurrent state of %d"
                " bytes, or all blocks together fewer tokens than cache.state_interval (%d)",
                cache.state_cache_bytes,
                linear.state_bytes,
                cache.state_interval,
            )
    logger.info(
        "recurrent state: %d bytes a sequence, %d sequences and %d checkpoints",
        linear.state_bytes,
        config.scheduler.max_running,
        num_checkpoints,
    )
    return StateSlots(config.scheduler.max_running, num_checkpoints, cache.state_interval)


def count_blocks(
    cache: CacheConfig,
    shapes: Iterable[KVShape],
    device: torch.device,
    workspace: int = 0,
    running_states: int = 0,
) -> int:
    """Return how many blocks the settings allow.

    Args:
        cache: The settings.
        shapes: Every model's.
        device: On CUDA its free memory counts, else `cache.memory_bytes`.
        workspace: Bytes of a CUDA device to leave for the steps and for cached states.
        running_states: Bytes of the running sequences' recurrent states, taken from the same.

    Raises:
        ConfigError: Not even one.
    """
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = sum(shape.block_bytes(cache.block_size) for shape in shapes)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        available = int(free - total * (1 - cache.gpu_memory_fraction)) - workspace
    else:
        available = cache.memory_bytes
    available -= running_states
    if available < block_bytes:
        raise ConfigError(
            "cache", f"{available} bytes", f"must hold at least one block of {block_bytes} bytes"
        )
    return available // block_bytes


def _warm_up(engine: Engine, adapter: ModelAdapter) -> None:
    """Run prompt, decode and verification, with an image where the model takes one, and forget it.

    Once with drafts and once without, so that what a plain step costs is known from the start.

    Raises:
        ModelLoadError: The target failed, or the drafter did.
    """
    images = (adapter.blank_image(start=1),) if adapter.takes_images else ()
    prompt_ids = (0, adapter.image_token_id, 0) if adapter.takes_images else (0, 0, 0)
    room = engine.scheduler.max_sequence_len - len(prompt_ids)
    sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=min(8, room), ignore_eos=True)
    for max_drafts in (None, 0):
        request = GenerationRequest(
            "warm-up", prompt_ids, replace(sampling, max_draft_tokens=max_drafts), images
        )
        engine.add(request)
        while engine.has_work:
            failures = engine.step().failures
            if failures:
                raise ModelLoadError(f"the warm-up request failed: {failures['warm-up']}")
    spec_failures = engine.stats().spec_failures
    if spec_failures:
        raise ModelLoadError(f"drafting failed in the warm-up: {', '.join(spec_failures)}")
    engine.forget_statistics()
