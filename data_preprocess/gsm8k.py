"""Grade-school math questions (GSM8K, MIT licence) as prompts: python data_preprocess/gsm8k.py --local_dir data/gsm8k.

Takes them from the Hugging Face hub, or with --source from a folder with the authors' own train.jsonl and test.jsonl,
and writes train.parquet and test.parquet in verl's schema.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from dagrl.data.prompt_file import PromptRow, write_prompts

HUB_NAME = "openai/gsm8k"
SPLITS = ("train", "test")
INSTRUCTION = 'Think step by step, and put the final answer after "####".'
EXTRA_INFO = {"split": pa.string(), "index": pa.int64(), "question": pa.string(), "answer": pa.string()}


def records_from_folder(source: Path, split: str) -> Iterator[dict[str, Any]]:
    """The lines of ``source/split.jsonl``. ValueError for a missing file or a line without question and answer."""
    path = source / f"{split}.jsonl"
    if not path.is_file():
        raise ValueError(f"there is no file {path}; --source is a folder with train.jsonl and test.jsonl")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not a line of JSON: {error}") from error
            wrong = [key for key in ("question", "answer") if not _has_text(record, key)]
            if wrong:
                raise ValueError(f"{path}:{number}: no text under {wrong[0]!r}; a line is {{question, answer}}")
            yield record


def _has_text(record: Any, key: str) -> bool:
    return isinstance(record, dict) and isinstance(record.get(key), str)


def records_from_hub(split: str) -> Iterable[dict[str, Any]]:
    """The rows of a split on the hub. ValueError where that cannot be reached."""
    from datasets import load_dataset

    try:
        return load_dataset(HUB_NAME, "main", split=split)
    except OSError as error:
        raise ValueError(
            f"cannot load {HUB_NAME} from the Hugging Face hub: {error}; without network, give the folder of the "
            "original train.jsonl and test.jsonl (github.com/openai/grade-school-math) with --source"
        ) from error


def prompts(
    records: Iterable[dict[str, Any]], split: str, instruction: str, drops: Counter[str]
) -> Iterator[PromptRow]:
    """A prompt for each record; those that nothing can be asked or judged by are left out, and counted by reason."""
    for index, record in enumerate(records):
        question, solution = record["question"].strip(), record["answer"]
        answer = solution.rpartition("####")[2].strip().replace(",", "") if "####" in solution else ""
        if not question:
            drops["no question"] += 1
        elif not answer:
            drops['no final answer after "####"'] += 1
        else:
            extra_info = {"split": split, "index": index, "question": question, "answer": solution}
            yield PromptRow(HUB_NAME, f"{question} {instruction}".strip(), answer, extra_info)


def main(arguments: list[str] | None = None) -> None:
    """Write both splits and report on them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--local_dir", type=Path, required=True, help="folder to write train.parquet and test.parquet to"
    )
    parser.add_argument("--source", type=Path, help="folder with train.jsonl and test.jsonl; default: the hub")
    parser.add_argument("--instruction", default=INSTRUCTION, help="what follows each question; default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        for split in SPLITS:
            records = records_from_folder(options.source, split) if options.source else records_from_hub(split)
            drops: Counter[str] = Counter()
            path = options.local_dir / f"{split}.parquet"
            rows = write_prompts(path, prompts(records, split, options.instruction, drops), EXTRA_INFO)
            dropped = "".join(f"; dropped {count}: {reason}" for reason, count in drops.items())
            print(f"{path}: {rows} rows{dropped}")
    except (ValueError, OSError) as error:
        sys.exit(f"gsm8k.py: {error}")


if __name__ == "__main__":
    main()
