"""Templates, placeholders and parameters: from a body to a request in token ids."""

from __future__ import annotations

import copy
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.images import ImageLimits
from serving.parameters import to_sampling
from serving.prompts import PromptBuilder
from serving.schema import ChatBody, CompletionBody
from serving.textstream import TextRequest
from serving.tokenizer import ServingTokenizer
from tests.serving.doubles import (
    SPECIALS,
    data_url,
    make_hf_tokenizer,
    make_processor,
    make_text_tokenizer,
    make_tokenizer,
    picture,
)
from workers.errors import InvalidRequest


def builder(*, vision: bool = True, limits: ImageLimits | None = None) -> PromptBuilder:
    tokenizer = make_tokenizer() if vision else make_text_tokenizer()
    return PromptBuilder(tokenizer, make_processor() if vision else None, limits or ImageLimits())


def chat_body(content: Any, **fields: Any) -> ChatBody:
    return ChatBody(model="demo", messages=[{"role": "user", "content": content}], **fields)


async def build(content: Any, **options: Any) -> TextRequest:
    return await builder(**options).chat(chat_body(content), "r")


def image_part(color: str = "red", size: tuple[int, int] = (60, 40)) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture(*size, color))}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def test_ordinary_text_is_encoded_as_the_library_does() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello 中"}]
    request = await builder().chat(ChatBody(model="demo", messages=messages), "r")
    expected = make_hf_tokenizer().apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert list(request.generation.prompt_ids) == expected


async def test_developer_is_system() -> None:
    prompts = [
        (await builder().chat(
            ChatBody(model="demo", messages=[{"role": role, "content": "x"}]), "r"
        )).generation.prompt_ids
        for role in ("system", "developer")
    ]  # fmt: skip
    assert prompts[0] == prompts[1]


async def test_images_are_expanded_in_order() -> None:
    content = [
        image_part("red"),
        text_part("and"),
        image_part("blue", (100, 30)),
        image_part("red"),
    ]
    generation = (await build(content)).generation
    pad = make_tokenizer().image_token_id
    for image in generation.images:
        assert set(generation.prompt_ids[image.start : image.end]) == {pad}
        t, h, w = image.grid_thw
        assert image.num_tokens == t * h * w // 4
    assert generation.prompt_ids.count(pad) == sum(i.num_tokens for i in generation.images)
    first, second, third = generation.images
    assert first.content_hash == third.content_hash != second.content_hash
    assert first.end <= second.start < second.end <= third.start


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("shape", ["text", "parts", "split", "nested", "tail"])
async def test_typed_special_tokens_are_only_text(special: str, shape: str) -> None:
    """A client cannot open a turn or place an image by typing its token."""
    content: Any = {
        "text": f"a {special} b",
        "parts": [text_part(special), text_part(special)],
        "split": [text_part(special[:4]), image_part(), text_part(special[4:])],
        "nested": f"{special[:3]}{special}{special[3:]}",
        "tail": f"{special}{special[:-1]}",
    }[shape]
    generation = (await build(content)).generation
    harmless = (await build([image_part()] if shape == "split" else "x")).generation
    ids = {make_hf_tokenizer().convert_tokens_to_ids(s) for s in SPECIALS}
    kept = [i for i in generation.prompt_ids if i in ids]
    assert kept == [i for i in harmless.prompt_ids if i in ids]
    texts = [content] if isinstance(content, str) else [p.get("text", "") for p in content]
    assert "".join(texts) in make_tokenizer().decode(generation.prompt_ids)


@given(
    st.lists(
        st.sampled_from([*SPECIALS, "<|im_", "end|>", "<", "|>", "image_pad", " ", "x"]),
        max_size=8,
    )
)
@settings(deadline=None)
def test_no_mixture_of_pieces_makes_a_special_token(pieces: list[str]) -> None:
    tokenizer = make_tokenizer()
    parts = [{"type": "text", "text": piece} for piece in pieces]
    ids = tokenizer.encode_chat([{"role": "user", "content": parts}])
    empty = tokenizer.encode_chat([{"role": "user", "content": ""}])
    special = {make_hf_tokenizer().convert_tokens_to_ids(s) for s in SPECIALS}
    assert [i for i in ids if i in special] == [i for i in empty if i in special]
    assert "".join(pieces) in tokenizer.decode(ids)


async def test_more_images_than_the_limit() -> None:
    with pytest.raises(InvalidRequest, match="at most 1") as caught:
        await build([image_part(), image_part()], limits=ImageLimits(max_images=1))
    assert caught.value.param == "messages[0].content[1].image_url"


async def test_more_pixels_than_the_limit() -> None:
    """Each picture may be below its own limit, and all together too large to hold."""
    limits = ImageLimits(max_total_pixels=60 * 40 + 1)
    assert (await build([image_part()], limits=limits)).generation.images
    with pytest.raises(InvalidRequest, match="pixels") as caught:
        await build([image_part(), image_part()], limits=limits)
    assert caught.value.param == "messages[0].content[1].image_url"


class CountingExecutor(Executor):
    """Runs at once, and counts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_calls += 1
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


async def test_pictures_have_threads_of_their_own() -> None:
    """The default executor has dozens of threads, and each would hold a decoded picture."""
    executor = CountingExecutor()
    prompts = PromptBuilder(make_tokenizer(), make_processor(), ImageLimits(), executor)
    await prompts.chat(chat_body([image_part(), image_part()]), "r")
    assert executor.num_calls == 1
    await prompts.chat(chat_body("no picture"), "r")
    assert executor.num_calls == 1
    own = builder().image_executor
    assert own._max_workers == 2  # type: ignore[attr-defined]


async def test_a_text_model_refuses_images() -> None:
    with pytest.raises(InvalidRequest, match="text only"):
        await build([text_part("see"), image_part()], vision=False)
    assert (await build([text_part("a"), text_part("b")], vision=False)).generation.prompt_ids


async def test_a_placeholder_without_image_is_refused() -> None:
    """A19: a raw prompt may hold special tokens, so it can hold a lone placeholder."""
    body = CompletionBody(model="demo", prompt="see <|image_pad|>")
    with pytest.raises(InvalidRequest, match="0 images supplied, 1 placeholders found"):
        await builder().completions(body, "r")
    body = CompletionBody(model="demo", prompt="see <|video_pad|>")
    with pytest.raises(InvalidRequest, match="0 videos supplied, 1 placeholders found"):
        await builder().completions(body, "r")


async def test_the_template_may_refuse() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]
    with pytest.raises(InvalidRequest, match="system must come first"):
        await builder().chat(ChatBody(model="demo", messages=messages), "r")


@pytest.mark.parametrize(
    "expression",
    ["'a' + [1]", "1 // 0", "'{:q}'.format(1)", "'x'.join(1)", "messages[9].role", "range(10**9)"],
)
def test_a_template_that_fails_on_the_content(expression: str) -> None:
    """Templates compute with what clients send; Python's errors in that are no failure of ours."""
    hf = copy.deepcopy(make_hf_tokenizer())
    hf.chat_template = f"{{{{ {expression} }}}}"
    with pytest.raises(InvalidRequest, match="the chat template refused") as caught:
        ServingTokenizer(hf).encode_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


@given(
    st.text(max_size=60) | st.sampled_from(["", " a", "中文😀", "".join(SPECIALS), "a<|im_end|>"])
)
@settings(deadline=None)
def test_encoding_as_a_batch_gives_the_ids_of_encode(text: str) -> None:
    """The batch form releases the interpreter's lock; it must not be another encoding."""
    tokenizer, backend = make_tokenizer(), make_hf_tokenizer().backend_tokenizer
    assert tokenizer.encode_prompt(text) == backend.encode(text).ids
    unmarked = tokenizer.encode_chat([{"role": "user", "content": "abc def"}])
    rendered = make_hf_tokenizer().apply_chat_template(
        [{"role": "user", "content": "abc def"}], add_generation_prompt=True, tokenize=False
    )
    assert unmarked == backend.encode(rendered, add_special_tokens=False).ids


async def test_completion_prompts() -> None:
    ids = make_tokenizer().encode_prompt("hello")
    for prompt in ("hello", ["hello"], ids):
        body = CompletionBody(model="demo", prompt=prompt)
        (request,) = await builder().completions(body, "r")
        assert list(request.generation.prompt_ids) == ids
        assert request.generation.sampling.max_tokens == 16
    with pytest.raises(InvalidRequest, match="no token"):
        await builder().completions(CompletionBody(model="demo", prompt=[1, 99999]), "r")
    with pytest.raises(InvalidRequest, match="no tokens"):
        await builder().completions(CompletionBody(model="demo", prompt=""), "r")


def sampling_of(**fields: Any) -> Any:
    return to_sampling(chat_body("x", **fields), fields.get("max_tokens"))


def test_sampling_parameters() -> None:
    params = sampling_of(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-5, max_tokens=9, min_tokens=2,
        stop_token_ids=[3], ignore_eos=True, speculation={"num_draft_tokens": 2},
    )  # fmt: skip
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 0, 0.1)
    assert (params.seed, params.max_tokens, params.min_tokens) == (-5, 9, 2)
    assert (params.stop_token_ids, params.ignore_eos, params.max_draft_tokens) == ((3,), True, 2)


def test_b14_sampling_defaults() -> None:
    """B14: unseeded requests do not share a stream."""
    first, second = sampling_of(), sampling_of()
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**63
    assert (first.temperature, first.max_tokens, first.max_draft_tokens) == (1.0, None, None)


def test_sampling_corners() -> None:
    assert sampling_of(speculation={"enabled": False}).max_draft_tokens == 0
    nucleus_of_one = sampling_of(top_p=0)
    assert (nucleus_of_one.top_p, nucleus_of_one.top_k) == (1.0, 1)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        sampling_of(max_tokens=2, min_tokens=3)
