"""Writes the inputs of both: a model folder with a tokenizer of bytes, and the same prompts in the schema of each."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from cases import Case
from pipelines import prompt_texts, write_prompt_file
from workload import MODELS, write_model

_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_AHEAD = 2
"""Steps whose prompts a run takes beyond those that are measured."""


def write_inputs(case: Case, folder: Path, weights: Path) -> tuple[Path, Path]:
    """Write weights and prompts of a case. Return the model folder and dagrl's prompt file."""
    folder.mkdir(parents=True, exist_ok=True)
    model = write_model(weights / case.model, MODELS[case.model])
    write_tokenizer(model)
    steps = case.steps + _AHEAD
    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(prompt_texts(case.load, steps))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "verl_prompts.parquet")
    return model, write_prompt_file(folder / "dagrl_prompts.parquet", case.load, steps)


def write_tokenizer(folder: Path) -> None:
    """Add a tokenizer whose tokens are bytes, as dagrl's `bytes` has them, and a chat template that adds nothing.

    Model and generation configs name no end token, so every response has all the tokens that it may have.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytes_of = {chr(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.WordLevel(bytes_of, unk_token=chr(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=chr(0), pad_token=chr(0), eos_token=chr(1))
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
