"""How fast prompts are read from a source with many rows, and whether memory stays flat.

    python benchmarks/prompt_reading.py                         # 10 million rows of parquet
    python benchmarks/prompt_reading.py --format jsonl --rows 1000000

Writes the rows into a folder, and reads all of them in steps of 1,024: decoded in the order of the file, decoded in the
shuffled order of training, and, for `--tokenised` of them, as the token ids of a step. Figures are CPU time, so that
they say the same on a busy machine; memory is the process's own (RssAnon), without pages of files.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from reports import Verdict, tell

from dagrl.config.schema import SourceSpec, TokenizerSpec
from dagrl.data.order.passes import shuffled
from dagrl.data.prompt_table import PromptTable
from dagrl.data.sources import Source, open_source
from dagrl.model_files.tokenizer import make_tokenizer

LEAST_PER_S = 50_000
MOST_GROWTH_MIB = 64
"""Between a tenth of the rows and all of them."""
Piece = Callable[[int], np.ndarray]
"""Place in an epoch -> the rows from there on."""
_STEP = 1024
_WRITTEN = 1 << 18
_COLUMNS = ("prompt", "reward_model.ground_truth", "data_source", "extra_info")


def main() -> None:
    """Measure, and say whether the aims are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--format", choices=("parquet", "jsonl", "arrow"), default="parquet")
    parser.add_argument("--rows-per-group", type=int, default=8192)
    parser.add_argument("--tokenised", type=int, default=200_000)
    parser.add_argument("--out", type=Path, help="file for the result in JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch
        path = Path(scratch) / f"rows.{options.format}"
        write(path, options.rows, options.rows_per_group)
        started = time.process_time()
        source = open_source("sums", SourceSpec(path=path))
        print(f"{len(source):,} rows, {path.stat().st_size / 1e9:.2f} GB of {options.format}")
        print(f"opened in {time.process_time() - started:.1f} s")
        verdicts = []
        window = shuffled(source.group_rows, (0,), source.kept_groups)
        orders: dict[str, Piece] = {
            "in file order": lambda place: np.arange(place, min(place + _WRITTEN, len(source))),
            "shuffled": lambda place: window(0, place)[0],
        }
        for name, piece in orders.items():
            rate, growth = read(source, piece)
            print(f"{name}: {rate:,.0f} prompts/s, memory {own_mib():.0f} MiB, {growth:+.0f} MiB after the first tenth")
            verdicts += [
                Verdict(f"prompts/s {name}", rate, "at least", LEAST_PER_S),
                Verdict(f"growth of memory in MiB {name}", growth, "at most", MOST_GROWTH_MIB),
            ]
        tokenised = tokenise(source, window(0, 0)[0], options.tokenised)
        print(f"tokenised, shuffled: {tokenised:,.0f} prompts/s")
    tell({"rows": options.rows, "format": options.format, "tokenised_per_s": tokenised}, verdicts, options.out)


def write(path: Path, rows: int, rows_per_group: int) -> None:
    """Sums in verl's schema, 260 bytes each."""
    writer = None
    for start in range(0, rows, _WRITTEN):
        table = _table(start, min(_WRITTEN, rows - start))
        if path.suffix == ".parquet":
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table, rows_per_group)
        elif path.suffix == ".arrow":
            writer = writer or pa.ipc.new_stream(path, table.schema)
            writer.write_table(table, max_chunksize=1000)
        else:
            with path.open("a") as file:
                file.writelines(f"{json.dumps(row)}\n" for row in table.to_pylist())
    if writer is not None:
        writer.close()


def _table(start: int, count: int) -> pa.Table:
    numbers = pa.array(np.arange(start, start + count))
    text = numbers.cast(pa.string())
    question = (
        "Natalia sold some clips to her friends in April, and then half as many clips in May, as the list on page "
    )
    asked = pc.binary_join_element_wise(question, text, " shows. How many clips did Natalia sell altogether?", "")
    messages = pa.StructArray.from_arrays([pa.array(["user"] * count), asked], ["role", "content"])
    extra = pa.StructArray.from_arrays([pa.array(["train"] * count), numbers], ["split", "index"])
    model = pa.StructArray.from_arrays([text, pa.array(["rule"] * count)], ["ground_truth", "style"])
    chats = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), messages)
    columns = {"prompt": chats, "reward_model": model, "data_source": pa.array(["sums"] * count), "extra_info": extra}
    return pa.table(columns)


def read(source: Source, piece: Piece) -> tuple[float, float]:
    """Prompts per second, and the growth of memory in MiB after the first tenth of the rows."""
    spent, done, highest = 0.0, 0, 0.0
    first: float | None = None
    for rows in steps(source, piece):
        started = time.process_time()
        found = source.values(rows, _COLUMNS)
        spent += time.process_time() - started
        assert found["prompt"][0][0]["content"].find(f" {rows[0]} ") > 0
        done += len(rows)
        if first is None and done >= len(source) / 10:
            first = own_mib()
        elif first is not None and done % (_STEP * 64) == 0:
            highest = max(highest, own_mib())
    assert done == len(source)
    return done / spent, max(highest, own_mib()) - (first or 0.0)


def steps(source: Source, piece: Piece) -> Iterator[list[int]]:
    """Rows of each step, in an order that comes in pieces."""
    place = 0
    while place < len(source):
        rows = piece(place)
        place += len(rows)
        yield from (rows[start : start + _STEP].tolist() for start in range(0, len(rows), _STEP))


def tokenise(source: Source, rows: np.ndarray, count: int) -> float:
    """Prompts per second that become token ids, of a tokenizer of bytes."""
    table = PromptTable(source, make_tokenizer(TokenizerSpec(kind="bytes")))
    table.hold(rows[:1].tolist())
    started = time.process_time()
    chosen = rows[:count]
    for start in range(0, len(chosen), _STEP):
        some = chosen[start : start + _STEP].tolist()
        table.hold(some)
        for row in some:
            table.prompt(row)
        table.texts(some)
    return len(chosen) / (time.process_time() - started)


def own_mib() -> float:
    """Memory of this process without pages of files, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


if __name__ == "__main__":
    main()
