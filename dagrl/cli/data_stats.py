"""`dagrl data stats`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.help import help_of
from dagrl.cli.parameters import AsJson, parse_path, print_json
from dagrl.config.errors import counted

if TYPE_CHECKING:
    import numpy as np

    from dagrl.data.prompt_stats import FileStats, Overlap

_QUANTILES = {"median": 0.5, "99%": 0.99, "longest": 1.0}


def stats(
    files: Annotated[
        list[Path],
        typer.Argument(
            parser=parse_path, metavar="FILE ...", help="files, folders or globs, as in data.train", show_default=False
        ),
    ],
    val: Annotated[
        list[Path] | None,
        typer.Option(parser=parse_path, metavar="FILE", help="validation prompts, compared with FILE ...; may repeat"),
    ] = None,
    prompt_key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="as in data.train (default: the first usual column)")
    ] = None,
    answer_key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="as in data.train (default: the first usual column)")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(parser=parse_path, metavar="DIR", help="measure prompts in its tokens (default: in characters)"),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Show lengths, sources, duplicates, answers that no reward can score, and what training and validation share.

    Examples:
        dagrl data stats data/gsm8k/train.parquet --val data/gsm8k/test.parquet
        dagrl data stats data/train/*.jsonl.gz --prompt-key question --answer-key answer --json
        dagrl data stats data/gsm8k --tokenizer models/qwen3-8b
    """
    from dagrl.config.schema import SourceSpec, ValSetSpec
    from dagrl.data.prompt_stats import file_stats, overlap
    from dagrl.data.sources import open_source
    from dagrl.rewards.scorable import Scorable

    with exit_on("data stats", ValueError):
        unit, length = ("characters", _characters) if tokenizer is None else ("tokens", _tokens_of(tokenizer))
        scores = Scorable()

        def measured(path: Path, spec: type[SourceSpec] | type[ValSetSpec]) -> FileStats:
            source = open_source(str(path), spec(path=path))
            return file_stats(source, length, scores, prompt_key=prompt_key, answer_key=answer_key)

        training = [measured(path, SourceSpec) for path in files]
        validation = [measured(path, ValSetSpec) for path in val or []]
        shared = [overlap(training, stats) for stats in validation]
    values = {
        "unit": unit,
        "train": [_values(stats) for stats in training],
        "between_train": _repeated_between(training),
        "val": [_values(stats) | _shared(common) for stats, common in zip(validation, shared, strict=True)],
    }
    if as_json:
        print_json(values)
    else:
        print("\n".join(_lines(values)))
    return 0


_app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
_app.command("stats", **help_of(stats))(stats)


def data_stats(arguments: Sequence[str]) -> int:
    return int(_app(list(arguments), prog_name="dagrl data stats", standalone_mode=False) or 0)


def _characters(texts: Sequence[str]) -> list[int]:
    return [len(text) for text in texts]


def _tokens_of(folder: Path) -> Callable[[Sequence[str]], list[int]]:
    from dagrl.config.schema import ModelSpec
    from dagrl.model_files.tokenizer import load_tokenizer

    loaded = load_tokenizer(ModelSpec(init={}, tokenizer=folder))
    return lambda texts: [len(ids) for ids in loaded(list(texts), add_special_tokens=False)["input_ids"]]


def _values(stats: FileStats) -> dict[str, object]:
    return {
        "file": stats.source.title,
        "rows": len(stats.prompts),
        "prompt_key": stats.prompt_key,
        "answer_key": stats.answer_key,
        "prompt_lengths": _lengths(stats.prompt_lengths),
        "answer_characters": _lengths(stats.answer_lengths) if stats.answer_key else None,
        "sources": dict(stats.sources.most_common()),
        "without_prompt": _places(stats, stats.empty),
        "repeated": _places(stats, stats.repeated()),
        "repeated_with_another_answer": _places(stats, stats.contradicting()),
        "rewards": {reward or "no answer": count for reward, count in stats.rewards.most_common()},
        "without_reward": _places(stats, stats.unscored),
    }


def _places(stats: FileStats, rows: Sequence[int] | np.ndarray) -> dict[str, object]:
    return {"rows": len(rows), "places": stats.places(rows)}


def _lengths(lengths: np.ndarray) -> dict[str, float]:
    import numpy as np

    return {"mean": float(lengths.mean())} | {
        name: float(np.quantile(lengths, part)) for name, part in _QUANTILES.items()
    }


def _repeated_between(training: Sequence[FileStats]) -> int:
    """Prompts that several training files have."""
    import numpy as np

    distinct = [np.unique(stats.prompts) for stats in training]
    return sum(map(len, distinct)) - len(np.unique(np.concatenate(distinct)))


def _shared(common: Overlap) -> dict[str, object]:
    return {
        "also_in_train": _places(common.validation, common.same),
        "similar_to_train": _places(common.validation, common.similar),
        "mostly_in_train": _places(common.validation, common.mostly),
    }


def _lines(values: dict[str, Any]) -> list[str]:
    from dagrl.data.prompt_stats import GRAM

    lines = []
    for file in (*values["train"], *values["val"]):
        lines.append(f"{file['file']}: {counted(file['rows'], 'row')}")
        for name, key, lengths, unit in (
            ("prompts", file["prompt_key"], file["prompt_lengths"], values["unit"]),
            ("answers", file["answer_key"], file["answer_characters"], "characters"),
        ):
            if lengths is not None:
                numbers = ", ".join(f"{what} {number:,.0f}" for what, number in lengths.items())
                lines.append(f"  {name} (`{key}`) in {unit}: {numbers}")
        for key in ("sources", "rewards"):
            if file[key]:
                lines.append(f"  {key}: " + ", ".join(f"{name} {count:,}" for name, count in file[key].items()))
        for key, what in (
            ("without_prompt", "no prompt"),
            ("without_reward", "no answer"),
            ("repeated", "same prompt as an earlier row"),
            ("repeated_with_another_answer", "  with another answer"),
            ("also_in_train", "same prompt as a training row"),
            ("similar_to_train", f"{GRAM} words in a row as in a training row"),
            ("mostly_in_train", "  at least half of the words"),
        ):
            if key in file and file[key]["rows"]:
                places = "; ".join(file[key]["places"])
                more = ", ..." if len(file[key]["places"]) < file[key]["rows"] else ""
                lines.append(f"  {what}: {file[key]['rows']:,} ({places}{more})")
        if "also_in_train" in file and not file["also_in_train"]["rows"] + file["similar_to_train"]["rows"]:
            lines.append(f"  no prompt, and no {GRAM} words in a row, is in the training files")
    if values["between_train"]:
        lines.append(f"prompts in several training files: {values['between_train']:,}")
    return lines
