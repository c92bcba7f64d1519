"""A tokenizer of bytes with a chat template in Qwen 3's manner."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if tools %}<|im_start|>system
# Tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>
{% endif %}
{%- elif message.role == 'assistant' and loop.last %}<|im_start|>assistant
<think>

</think>

{{ message.content }}<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""In Qwen 3's manner: answers of tools are a user's, those next to each other in one message, and what an assistant has
said is written otherwise where it comes last."""


def chatml_tokenizer(merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Bytes, joined by `merges`, and the special tokens of ChatML."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    backend = Tokenizer(BPE({piece: number for number, piece in enumerate(pieces)}, merges=[*merges]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )
