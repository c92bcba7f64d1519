"""The command behind each script: options, the way of a row from the originals to the file, messages."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from dagrl.config.errors import counted
from dagrl.data.prepare.dataset import DataSet, Drop, Record
from dagrl.data.prepare.errors import exit_on_errors
from dagrl.data.prepare.originals import HUBS, records
from dagrl.data.prepare.output import all_or_nothing
from dagrl.data.prepare.report import ProgressLines, SplitReport
from dagrl.data.prompt_file import PromptRow, write_prompts

Length = Callable[[PromptRow], int]


def run(data_set: DataSet, arguments: list[str] | None = None) -> None:
    """Do what the command line (or `arguments`) asks. A mistake of the user ends it with one sentence and status 2.

    The files of all splits and report.json appear together at the end; a failure leaves what was there before.
    """
    options = _options(data_set, arguments)
    try:
        with exit_on_errors(f"{data_set.name}.py"):
            _write(data_set, options)
    except KeyboardInterrupt:
        print(f"{data_set.name}.py: stopped; nothing was written", file=sys.stderr)
        sys.exit(130)


def _options(data_set: DataSet, arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{data_set.name}.py",
        description=data_set.title,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    splits = list(data_set.originals)
    written = " and ".join(f"{split}.parquet" for split in splits)
    parser.add_argument("--local_dir", type=Path, required=True, help=f"folder to write {written} to")
    parser.add_argument("--source", type=Path, help="folder with the original files; default: a hub")
    parser.add_argument(
        "--hub", choices=HUBS, default=HUBS[0], help="where from without --source; default: %(default)s"
    )
    parser.add_argument("--hub_name", help="OWNER/NAME of a copy on the hub; default: the authors' own")
    parser.add_argument("--hub_split", help="split to read on the hub; default: the one of the same name")
    parser.add_argument(
        "--splits", nargs="+", choices=splits, default=splits, metavar="SPLIT", help="default: " + " ".join(splits)
    )
    parser.add_argument("--limit", type=_positive, help="read only so many rows of each split")
    parser.add_argument(
        "--tokenizer", help="a Hugging Face folder, or bytes: report prompt lengths in its tokens, not in characters"
    )
    if data_set.instruction:
        shown = data_set.instruction.replace("%", "%%")
        parser.add_argument(
            "--instruction", default=data_set.instruction, help=f"what follows each question; default: {shown}"
        )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of rows above 0")
    return number


def _write(data_set: DataSet, options: argparse.Namespace) -> None:
    length, unit = _measure(options.tokenizer)
    reports = {}
    with all_or_nothing(options.local_dir) as stage:
        for split in dict.fromkeys(options.splits):
            report = reports[split] = SplitReport(unit)
            progress = ProgressLines(split)
            original = data_set.originals[split]
            if options.hub_split:
                original = replace(original, hub_split=options.hub_split)
            rows = records(original, split, options.source, options.hub, options.hub_name)
            instruction = getattr(options, "instruction", "")
            prompts = _prompts(data_set, islice(rows, options.limit), instruction, report, progress, length)
            _write_split(data_set, prompts, stage / f"{split}.parquet", report)
            _say(options.local_dir / f"{split}.parquet", report, progress.seconds)
        summary = {split: report.as_dict() for split, report in reports.items()}
        text = json.dumps({"data_set": data_set.name, "splits": summary}, indent=2, ensure_ascii=False)
        (stage / "report.json").write_text(text + "\n", encoding="utf-8")


def _write_split(data_set: DataSet, prompts: Iterable[PromptRow], path: Path, report: SplitReport) -> None:
    import pyarrow as pa

    size = data_set.rows_per_group
    try:
        write_prompts(path, prompts, data_set.extra_info, data_set.columns, rows_per_group=size)
    except (pa.ArrowTypeError, pa.ArrowInvalid, OverflowError, UnicodeEncodeError) as error:
        rows = f"one of the rows {max(report.read - size, 0)} to {report.read} of {path.stem}"
        raise ValueError(f"{rows} does not fit the columns ({error}); mend the original") from error
    if not report.read:
        raise ValueError(f"there is not one row of {path.stem} in the original; look whether it was fetched whole")
    if not report.kept:
        whole = f"none of the {report.read} rows" if report.read > 1 else "not even the only row"
        raise ValueError(f"{whole} of {path.stem} can be used{report.drops()}")


def _prompts(
    data_set: DataSet,
    rows: Iterable[Record],
    instruction: str,
    report: SplitReport,
    progress: ProgressLines,
    length: Length,
) -> Iterator[PromptRow]:
    """The prompts of a split; each row is entered in the report, and counted where it is dropped."""
    seen: dict[bytes, str] = {}
    for record in rows:
        data_set.check(record)
        row = data_set.make_row(record, instruction)
        if row is None:
            continue
        report.read += 1
        progress.step(report.read)
        reason = row.reason if isinstance(row, Drop) else _repeated(row, seen) if data_set.unique else None
        if reason is not None:
            report.dropped[reason] += 1
            continue
        assert isinstance(row, PromptRow)
        _check_text(row, record.place)
        report.kept += 1
        report.lengths[length(row)] += 1
        yield row


def _check_text(row: PromptRow, place: str) -> None:
    """ValueError naming the place where a text has half of a character, as a pair of escapes of JSON that was cut."""
    further = (value for value in row.extra_info.values() if isinstance(value, str))
    for text in (row.answer, row.data_source, *further, *(message["content"] for message in row.messages)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])
            raise ValueError(f"{place}: {half} is half of a character, which no file can hold; mend the row") from error


def _repeated(row: PromptRow, seen: dict[bytes, str]) -> str | None:
    """Why a row is dropped as a repetition, if it is one; `seen` keeps a digest of each prompt, not its text."""
    text = json.dumps(row.prompt, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if digest not in seen:
        seen[digest] = row.answer
        return None
    return "asked before" if seen[digest] == row.answer else "asked before, with another answer"


def _say(path: Path, report: SplitReport, seconds: float) -> None:
    print(f"{path}: {counted(report.kept, 'row')}{report.drops()}")
    for line in report.lines():
        print(line)
    print(f"  {seconds:.1f} s")


def _measure(tokenizer: str | None) -> tuple[Length, str]:
    """How long a prompt is, and the unit of that. With a tokenizer, as the prompt loader counts: by chat template."""
    if tokenizer is None:
        return _characters, "characters"
    from dagrl.config.schema import ModelSpec, TokenizerSpec
    from dagrl.model_files.tokenizer import chat_text, load_tokenizer

    named: Any = TokenizerSpec(kind="bytes") if tokenizer == "bytes" else Path(tokenizer)
    if isinstance(named, Path) and not named.is_dir():
        raise ValueError(f"--tokenizer {tokenizer} is no folder; give a Hugging Face folder on this machine, or bytes")
    loaded = load_tokenizer(ModelSpec(init={}, tokenizer=named))
    if not loaded.chat_template:
        fact = f"the tokenizer {tokenizer} has no chat template, and the prompts are chats"
        raise ValueError(f"{fact}; give the tokenizer of an instruction-tuned model")

    def tokens(row: PromptRow) -> int:
        return len(loaded.encode(chat_text(loaded, row.messages), add_special_tokens=False))

    return tokens, "tokens"


def _characters(row: PromptRow) -> int:
    return sum(len(message["content"]) for message in row.messages)
