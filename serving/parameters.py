"""From OpenAI's parameters to the engine's.

Owns defaults and translations of sampling parameters. Knows no prompt and no tokenizer but for
the ids that a vocabulary has. Invariant: the seed is always set.
"""

from __future__ import annotations

import secrets
from typing import Any

from serving import grammars
from serving.formats import JsonObjectFormat, JsonSchemaFormat
from serving.schema import GenerationBody
from workers.contracts import SamplingParams
from workers.errors import InvalidRequest


def to_sampling(
    body: GenerationBody, max_tokens: int | None, grammar: str | None = None
) -> SamplingParams:
    """Map the body's parameters; what is absent gets the default of `SamplingParams`."""
    min_tokens = body.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens {min_tokens} is above max_tokens", "min_tokens")
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "min_p": body.min_p,
        "ignore_eos": body.ignore_eos,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
    }
    if body.top_p == 0:  # the smallest nucleus is one token
        given |= {"top_p": 1.0, "top_k": 1}
    if body.speculation is not None:
        wish = body.speculation
        given["max_draft_tokens"] = 0 if wish.enabled is False else wish.num_draft_tokens
    return SamplingParams(
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        # A prompt that is only scored still takes a step, and so a token, which nobody sees.
        max_tokens=None if max_tokens is None else max(max_tokens, 1),
        min_tokens=min_tokens,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=tuple((int(key), bias) for key, bias in (body.logit_bias or {}).items()),
        num_logprobs=body.num_logprobs,
        num_prompt_logprobs=body.num_prompt_logprobs,
        grammar=grammar,
        **{name: value for name, value in given.items() if value is not None},
    )


def grammar_of(body: GenerationBody) -> str | None:
    """Return what the whole output must match, if the body says so.

    Raises:
        InvalidRequest: The form cannot be promised.
    """
    wanted = body.response_format
    if isinstance(wanted, JsonObjectFormat):
        return grammars.json_object()
    if isinstance(wanted, JsonSchemaFormat):
        return grammars.json_schema(
            wanted.json_schema.schema_, "response_format.json_schema.schema"
        )
    if (outputs := body.structured_outputs) is None:
        return None
    if outputs.json_ is not None:
        return grammars.json_schema(outputs.json_, "structured_outputs.json")
    if outputs.regex is not None:
        return grammars.regex(outputs.regex, "structured_outputs.regex")
    if outputs.choice is not None:
        return grammars.choice(outputs.choice, "structured_outputs.choice")
    assert outputs.grammar is not None  # the body has one of them
    return grammars.lark(outputs.grammar, "structured_outputs.grammar")


def check_id(token_id: int, param: str, vocab_size: int) -> None:
    """Refuse what is no token."""
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"{param}: {token_id} is no token; token ids are below {vocab_size}", param
        )
