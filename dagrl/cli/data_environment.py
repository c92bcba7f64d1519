"""`dagrl data environment`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dagrl.cli.errors import exit_on
from dagrl.cli.help import help_of
from dagrl.cli.parameters import parse_path
from dagrl.config.errors import counted

_TAKES_S = 3600.0


def environment(
    name: Annotated[str, typer.Argument(help="as `agent.environment` of a pipeline", show_default=False)],
    out: Annotated[Path, typer.Option(parser=parse_path, metavar="FILE", help="the parquet file", show_default=False)],
    python: Annotated[
        Path | None,
        typer.Option(parser=parse_path, help="the Python that has its package (default: this one)", show_default=False),
    ] = None,
    args: Annotated[str, typer.Option(metavar="JSON", help="as `agent.args`")] = "{}",
) -> int:
    """Write the tasks of an environment as prompts, for data.train or data.val.

    Examples:
        dagrl data environment openenv --args '{"url": "http://localhost:8000"}' --out data/openenv.parquet
        dagrl data environment my_tasks:Tasks --python envs/tasks/bin/python --out data/tasks.parquet
    """
    with exit_on("data environment", ValueError):
        written = write_tasks(name, out, python, arguments_of(args))
    print(f"{out}: {counted(written, 'row')}")
    return 0


def write_tasks(name: str, out: Path, python: Path | None, args: dict[str, Any]) -> int:
    """Write the tasks of an environment as a prompt file; returns their number. ValueError if it gives none."""
    from dagrl.plugins.agent import NamedAgent
    from dagrl.plugins.agent_python import answers

    agent = NamedAgent(None, name, args, str(Path.cwd()))
    # A link is not followed: Python finds its packages by it.
    with answers(python.absolute() if python else None, agent, "rows", _TAKES_S) as lines:
        return _write(out, _rows(lines, name))


def arguments_of(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f'--args is not JSON ({error}); write an object, such as \'{{"split": "train"}}\'') from error
    if not isinstance(given, dict):
        raise ValueError(f'--args is not an object: {text[:80]}; write it as \'{{"split": "train"}}\'')
    return given


def _rows(lines: Iterator[str], name: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines):
        row = json.loads(line)
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), list):
            raise ValueError(f"row {number} of {name} has no `prompt`, a list of messages; correct its `rows`")
        yield {
            "data_source": str(row.get("data_source") or name),
            "prompt": row["prompt"],
            "ability": "environment",
            "reward_model": {"style": "rule", "ground_truth": _text(row.get("answer"))},
            "extra_info": row.get("extra_info") or {"index": number},
        }


def _text(answer: object) -> str:
    return "" if answer is None else str(answer)


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from dagrl.data.prompt_file import replacing

    table = pa.Table.from_pylist([*rows])
    if not len(table):
        raise ValueError("the environment has no tasks; choose other --args")
    with replacing(path) as aside:
        pq.write_table(table, aside)
    return len(table)


_app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
_app.command("environment", **help_of(environment))(environment)


def data_environment(arguments: Sequence[str]) -> int:
    return int(_app(list(arguments), prog_name="dagrl data environment", standalone_mode=False) or 0)
