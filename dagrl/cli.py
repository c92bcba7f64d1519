"""The command line: one small function for each command, none with logic of its own.

Exit codes: 0 all went well; 1 a run failed; 2 the pipeline or the call is wrong, one line for each problem on stderr.
What a command needs is imported in it, so that ``dagrl validate`` is quick and needs neither torch nor ray.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dagrl.spec.errors import PipelineError

_OVERRIDES_HELP = "set a key for this call: engines.actor.optimizer.lr=3e-6 (YAML value; null takes the key away)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    options = vars(known)
    # argparse takes positionals in one go: overrides that stand after an option come back as unknown.
    if rest and (any(argument.startswith("-") for argument in rest) or "overrides" not in options):
        parser.error(f"unknown arguments: {' '.join(rest)}")
    options["overrides"] = [*options["overrides"], *rest]
    command = options.pop("command")
    try:
        code = command(**options)
        sys.stdout.flush()
    except PipelineError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("dagrl: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"dagrl: {error}", file=sys.stderr)
        return 1
    return code


def validate(pipeline: Path, overrides: list[str]) -> int:
    """Check a pipeline file and say what it declares."""
    from dagrl.spec.checks import check_file
    from dagrl.spec.summary import summarize

    print(summarize(check_file(pipeline, overrides)), end="")
    return 0


def graph(pipeline: Path, overrides: list[str], output: Path | None) -> int:
    """Draw the DAG, as text on stdout or into a file."""
    from dagrl.spec.draw import draw_text, write_drawing
    from dagrl.spec.graph import build_graph
    from dagrl.spec.load import load_pipeline

    loaded = load_pipeline(pipeline, overrides)
    dag = build_graph(loaded.pipeline, loaded.folder, loaded.positions)
    if output is None:
        print(draw_text(dag), end="")
        return 0
    try:
        write_drawing(dag, output)
    except (ValueError, OSError) as error:
        print(f"dagrl graph: {error}", file=sys.stderr)
        return 2
    return 0


def run(pipeline: Path, overrides: list[str], run_dir: Path | None) -> int:
    """Train as a pipeline file says."""
    from dagrl.spec.checks import check_file

    checked = check_file(pipeline, overrides)
    folder = run_dir or Path("runs") / checked.loaded.pipeline.name
    from dagrl.runtime.errors import InterruptedRunError, RunError
    from dagrl.runtime.run import run_pipeline

    try:
        outcome = run_pipeline(checked, folder)
    except RunError as error:
        left = f"; what there is lies in {folder}" if folder.is_dir() else ""
        print(f"dagrl run: failed{left}", *error.lines(), sep="\n", file=sys.stderr)
        return 1
    except (InterruptedRunError, KeyboardInterrupt):
        print(f"dagrl run: stopped at once; `dagrl run` goes on from the last checkpoint in {folder}", file=sys.stderr)
        return 130
    print(outcome.summary(folder))
    return 0


def _parser() -> argparse.ArgumentParser:
    from dagrl import __version__

    parser = argparse.ArgumentParser(
        prog="dagrl", description="Reinforcement learning of language models, declared as a DAG in a pipeline file."
    )
    parser.add_argument("--version", action="version", version=f"dagrl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = commands.add_parser(
        "validate",
        help="check a pipeline file",
        description="Check a pipeline file, the files it names and the code it names. Prints a summary and exits 0, or "
        "prints every problem as FILE:LINE: place: what is wrong; what to do, and exits 2. Needs no GPU.",
    )
    _add_pipeline(command)
    command.set_defaults(command=validate)

    command = commands.add_parser(
        "graph",
        help="draw a pipeline's DAG",
        description="Draw the DAG that follows from what the nodes read and write: as text, or as a picture with -o.",
    )
    _add_pipeline(command)
    command.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write FILE.svg, .png, .mmd (Mermaid) or .txt"
    )
    command.set_defaults(command=graph)

    command = commands.add_parser(
        "run",
        help="train",
        description="Train as a pipeline file says, or go on from the newest checkpoint in the run folder. Ctrl-C "
        "saves and stops. Exits 0 at the end; 1 if the run failed, with node, worker and cause on the last lines.",
    )
    _add_pipeline(command)
    command.add_argument("--run-dir", type=Path, metavar="DIR", help="the run folder (default: runs/NAME)")
    command.set_defaults(command=run)
    return parser


def _add_pipeline(command: argparse.ArgumentParser) -> None:
    command.add_argument("pipeline", type=Path, metavar="PIPELINE", help="the pipeline's YAML file")
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=_OVERRIDES_HELP)


if __name__ == "__main__":
    sys.exit(main())
