"""The command behind each script: options, conversion of rows, messages."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from dagrl.config.errors import bounded, counted
from dagrl.data.prepare.dataset import DataSet, Drop, Record
from dagrl.data.prepare.originals import HUBS, records
from dagrl.data.prepare.output import all_or_nothing
from dagrl.data.prompt_file import PromptRow, write_prompts


@dataclass(slots=True)
class SplitReport:
    """Counts of one split, filled in row by row."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    def drops(self) -> str:
        return "".join(f"; dropped {rows:,}: {reason}" for reason, rows in self.dropped.items())


@contextmanager
def exit_on_errors(script: str) -> Iterator[None]:
    """Exit with status 2, as commands do, on a ValueError or an OSError, and print it as one sentence.

    `script` is the path of the script. The sentence begins with its file name, as messages of argparse do.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        text = bounded(f"{Path(script).name}: {error}")
        print(text, file=sys.stderr)
        end = SystemExit(text)
        end.code = 2
        raise end from None


def run(data_set: DataSet, arguments: list[str] | None = None) -> None:
    """Run the command line (or `arguments`). A user's mistake ends it with one sentence and status 2.

    The files of all splits and report.json appear together at the end; a failure keeps the earlier files.
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
    parser.add_argument("--limit", type=_positive, help="read at most this many rows of each split")
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
    reports = {}
    with all_or_nothing(options.local_dir) as stage:
        for split in dict.fromkeys(options.splits):
            report = reports[split] = SplitReport()
            original = data_set.originals[split]
            if options.hub_split:
                original = replace(original, hub_split=options.hub_split)
            rows = records(original, split, options.source, options.hub, options.hub_name)
            instruction = getattr(options, "instruction", "")
            prompts = _prompts(data_set, islice(rows, options.limit), instruction, report)
            _write_split(data_set, prompts, stage / f"{split}.parquet", report)
            print(f"{options.local_dir / split}.parquet: {counted(report.kept, 'row')}{report.drops()}")
        summary = {
            split: {"read": report.read, "kept": report.kept, "dropped": dict(report.dropped.most_common())}
            for split, report in reports.items()
        }
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
) -> Iterator[PromptRow]:
    seen: dict[bytes, str] = {}
    for record in rows:
        data_set.check(record)
        row = data_set.make_row(record, instruction)
        if row is None:
            continue
        report.read += 1
        reason = row.reason if isinstance(row, Drop) else _repeated(row, seen) if data_set.unique else None
        if reason is not None:
            report.dropped[reason] += 1
            continue
        assert isinstance(row, PromptRow)
        _check_text(row, record.place)
        report.kept += 1
        yield row


def _check_text(row: PromptRow, place: str) -> None:
    """ValueError with the place of half a surrogate pair in a text, for example from truncated JSON escapes."""
    further = (value for value in row.extra_info.values() if isinstance(value, str))
    for text in (row.answer, row.data_source, *further, *(message["content"] for message in row.messages)):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])
            raise ValueError(f"{place}: {half} is half of a character, which no file can hold; mend the row") from error


def _repeated(row: PromptRow, seen: dict[bytes, str]) -> str | None:
    """The reason for dropping a repeated row, if it is one; `seen` keeps a digest of each prompt, not its text."""
    text = json.dumps(row.prompt, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if digest not in seen:
        seen[digest] = row.answer
        return None
    return "asked before" if seen[digest] == row.answer else "asked before, with another answer"
