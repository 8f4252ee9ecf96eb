"""The demo tokenizer: a small byte-level BPE with Qwen's special tokens and chat format.

Owns the special tokens, the chat template and how the vocabulary is learnt. Knows nothing of
models or pictures beyond their placeholder. Invariants: every UTF-8 text survives encoding and
decoding (no normaliser, all 256 bytes in the alphabet), and the special tokens have the highest
ids, as in Qwen's checkpoints.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Iterable

END_OF_TEXT: Final = "<|endoftext|>"
TURN_START: Final = "<|im_start|>"
TURN_END: Final = "<|im_end|>"
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
IMAGE_PAD: Final = "<|image_pad|>"
VIDEO_PAD: Final = "<|video_pad|>"
SPECIAL_TOKENS: Final = (
    END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD,
)  # fmt: skip
VOCAB_SIZE: Final = 740  # before the special tokens
MAX_LENGTH: Final = 2048

# Qwen's pattern, but for numbers: like words, they are whole and keep their leading blank.
_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Qwen's format without its default system prompt, which would lengthen every demo prompt. The
# models never saw a tool in training: calls are in the template to show the server.
CHAT_TEMPLATE: Final = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0]['role'] == 'system' -%}
{{- messages[0]['content'] + '\\n\\n' -}}
{%- endif -%}
{{- '# Tools\\n\\nThese functions may be called:\\n<tools>' -}}
{%- for tool in tools -%}
{{- '\\n' + (tool | tojson) -}}
{%- endfor -%}
{{- '\\n</tools>\\n\\nA call is a JSON object between tags:\\n' -}}
{{- '<tool_call>\\n{"name": NAME, "arguments": {...}}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message['role'] == 'system') -%}
{%- if message['role'] == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message['content'] -}}
{{- '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ('image', 'image_url') or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or () -%}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- (call['function']['arguments'] | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn a tokenizer from texts; equal texts in equal order give an equal tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=list(SPECIAL_TOKENS),
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
