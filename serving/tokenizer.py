"""Wraps the model's tokenizer and chat template.

Owns encoding, decoding and the rendering of messages. Knows no pixels and no HTTP. Invariant: a
client's text never becomes a special token in a chat: special tokens written in it are encoded
as the plain characters they are, so nobody can open another turn or place an image by typing.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Self

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from serving.token_bytes import TokenBytes
from serving.tools.formats import detect_format
from serving.tools.tagged import END, START
from workers.errors import InvalidRequest, ModelLoadError

# What a template can end in for some content: its own refusal, and Python's errors in what it
# computes (a list joined to a string, an attribute that a string lacks, a division).
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


_TAG = re.compile(r"<[^\s<>]+>")


class Segment(NamedTuple):
    """A stretch of a rendered prompt."""

    text: str
    # Whether special tokens in it are only characters.
    is_plain: bool


class SpecialTokenEscaper:
    """Takes special tokens out of text before a template sees it, and puts them back after.

    A template joins its own special tokens and the client's text into one string, in which they
    cannot be told apart. So each special token in the text is replaced by a mark that nobody can
    guess. The rendered string is cut at the marks, and the pieces are encoded apart. Text that
    ends in the beginning of a special token gets an empty mark, lest what follows complete it.
    Text without special tokens is untouched, and encoded as the library would.
    """

    def __init__(self, special_tokens: Sequence[str]) -> None:
        ordered = sorted(special_tokens, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._beginnings = {t[:n] for t in special_tokens for n in range(1, len(t))}
        nonce = secrets.token_hex(16)
        # Private-use characters: no template trims or changes them.
        self._mark = f"\ue000{nonce}.{{}}\ue001"
        self._marks = re.compile(f"\ue000{nonce}\\.(\\d+)\ue001")
        self._taken: list[str] = []

    def escape(self, text: str) -> str:
        """Return `text` with marks in place of special tokens."""
        if self._specials is None:
            return text
        escaped = self._specials.sub(lambda match: self._take(match.group()), text)
        longest = max((len(b) for b in self._beginnings), default=0)
        if any(text.endswith(text[-n:]) and text[-n:] in self._beginnings
               for n in range(1, min(longest, len(text)) + 1)):  # fmt: skip
            escaped += self._take("")
        return escaped

    def split(self, rendered: str) -> Iterator[Segment]:
        """Cut a rendered prompt at its marks."""
        end = 0
        for match in self._marks.finditer(rendered):
            yield Segment(rendered[end : match.start()], is_plain=False)
            yield Segment(self._taken[int(match.group(1))], is_plain=True)
            end = match.end()
        yield Segment(rendered[end:], is_plain=False)

    def _take(self, text: str) -> str:
        self._taken.append(text)
        return self._mark.format(len(self._taken) - 1)


class ServingTokenizer:
    """The tokenizer of one checkpoint; safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Any,
        image_token_id: int | None = None,
        video_token_id: int | None = None,
        model_type: str = "",
    ) -> None:
        if not tokenizer.is_fast:
            raise ModelLoadError("only tokenizers with a tokenizer.json are supported")
        self._tokenizer = tokenizer
        # The library's wrapper changes state on the shared backend per call; these two never do.
        self._backend: Tokenizer = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._plain: Tokenizer = Tokenizer.from_str(self._backend.to_str())
        self._plain.encode_special_tokens = True
        added = self._backend.get_added_tokens_decoder()
        self._special_tokens = tuple(token.content for token in added.values() if token.special)
        # Tokens of their own, special or not, that a grammar does not take for text.
        names = {token.content for token in added.values() if _TAG.fullmatch(token.content)}
        self.tag_tokens = frozenset(names & {START, END})
        self.free_tokens = tuple(sorted(names - {START, END} - set(self._special_tokens)))
        self._special_ids = frozenset(
            i
            for i, token in added.items()
            if token.special and token.content not in self.tag_tokens
        )
        # Tags of calls are text to whoever reads an answer, also where they are special tokens.
        self._decoder = _with_visible(self._backend, self.tag_tokens)
        self._bytes = TokenBytes(self._backend)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.image_token_id = image_token_id
        self.video_token_id = video_token_id
        # The model's family, as its config names it.
        self.model_type = model_type

    @classmethod
    def load(cls, path: str, revision: str | None) -> Self:
        """Load from a directory or hub id, with the placeholder ids from the model's config."""
        tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=False)
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        values = config.to_dict()
        placeholders = (values.get("image_token_id"), values.get("video_token_id"))
        return cls(tokenizer, *placeholders, config.model_type)

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Render messages with the chat template; one placeholder for each image and video.

        Args:
            messages: `role`, `content`, and what belongs to calls of tools; content is a text or a
                list of `{"type": "text", "text": ...}`, `{"type": "image"}` and
                `{"type": "video"}`.
            add_generation_prompt: Whether the prompt ends where the answer begins.
            tools: The functions that the model may call, in OpenAI's shape.
        """
        escaper = SpecialTokenEscaper(self._special_tokens)
        try:
            rendered = self._tokenizer.apply_chat_template(
                [_map_texts(message, escaper.escape) for message in messages],
                tools=[_map_texts(tool, escaper.escape) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except TEMPLATE_ERRORS as error:
            # Templates refuse what their model was not trained on, such as two user turns in a row.
            raise InvalidRequest(f"the chat template refused: {error}", "messages") from error
        ids: list[int] = []
        for segment in escaper.split(rendered):
            backend = self._plain if segment.is_plain else self._backend
            ids.extend(_encode(backend, segment.text, add_special_tokens=False))
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a raw prompt: special tokens in it count, and the model's own are added."""
        return _encode(self._backend, text, add_special_tokens=True)

    def encode_control(self, text: str) -> list[int]:
        """Encode text of ours as it stands inside a chat: special tokens in it count."""
        return _encode(self._backend, text, add_special_tokens=False)

    @property
    def video_pad(self) -> str:
        """The token that a template writes for a video; only where there is one."""
        assert self.video_token_id is not None
        return str(self._backend.id_to_token(self.video_token_id))

    @property
    def tool_format(self) -> str | None:
        """How the model writes calls of tools; None if its template has no format we know."""
        template = self._tokenizer.chat_template
        # Several templates have names; the library takes this one where there are tools.
        if isinstance(template, dict):
            template = template.get("tool_use", template.get("default"))
        return detect_format(template or "")

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered."""
        return bool(self._tokenizer.chat_template)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without special tokens."""
        text: str = self._decoder.decode(list(ids), skip_special_tokens=True)
        return text

    def decode_all(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, special tokens as they are written."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary writes each token; "" for one that it does not have."""
        return [self._backend.id_to_token(token_id) or "" for token_id in ids]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes behind a token; none for one beyond the vocabulary."""
        return self._bytes.of(token_id)

    def has_text(self, token_id: int) -> bool:
        """Return whether `decode` looks at the token, rather than leave it out.

        It leaves out special ones, and those beyond the vocabulary: a model may have more rows.
        """
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None


def _with_visible(backend: Tokenizer, tags: Collection[str]) -> Tokenizer:
    """Return a tokenizer that decodes the tags although they are special tokens."""
    if not tags:
        return backend
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in tags
    return Tokenizer.from_str(json.dumps(state))


def _encode(backend: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # `encode` would hold the interpreter's lock, and so the event loop, for as long as it runs.
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Change every text in a JSON value, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_map_texts(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    return value
