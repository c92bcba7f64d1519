"""The command line: one small function for each command, none with logic of its own.

Exit codes: 0 all went well; 1 what was asked failed; 2 the pipeline or the call is wrong, one line for each problem on
stderr; 3 what was planned does not fit.
What a command needs is imported in it, so that ``dagrl validate`` is quick and needs neither torch nor ray.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dagrl.config.errors import PipelineError

_OVERRIDES_HELP = "set a key for this call: engines.actor.optimizer.lr=3e-6 (YAML value; null takes the key away)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    options = vars(known)
    # argparse takes positionals in one go: overrides that stand after an option come back as unknown.
    if rest and (any(argument.startswith("-") for argument in rest) or "overrides" not in options):
        hint = "; a key is set without dashes: run.steps=10" if any("=" in each for each in rest) else ""
        parser.error(f"unknown arguments: {' '.join(rest)}{hint}")
    if "overrides" in options:
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
    from dagrl.planner.fitting.sleep_policy import decide_sleep
    from dagrl.planner.fitting.warning import warn_of_memory
    from dagrl.validation import check_file
    from dagrl.validation.summary import summarize

    print(summarize(warn_of_memory(decide_sleep(check_file(pipeline, overrides)))), end="")
    return 0


def plan(
    pipeline: Path,
    overrides: list[str],
    gpu: str | None,
    as_json: bool,
    simulate: Path | None,
    prompt_tokens: float | None,
    response_tokens: float | None,
    search: bool,
    **cluster: int,
) -> int:
    """Say what a run will take of GPUs, hosts and time, before one is touched."""
    from dagrl.models.gpus import DEFAULT_GPU
    from dagrl.planner.cost.lengths import Assumed
    from dagrl.planner.hardware import why_unread
    from dagrl.planner.showing import report, show, show_steps

    assumed = Assumed(prompt_tokens, response_tokens)
    try:
        if search and simulate is not None:
            raise ValueError("--simulate shows one layout; take --search out, or simulate what it proposes")
        if cluster and not search:
            raise ValueError(f"--{next(iter(cluster)).replace('_', '-')} is for --search; add that, or take it out")
        found = report.report(pipeline, overrides, gpu=DEFAULT_GPU if gpu is None else gpu)
        if search:
            sections = show_steps.search_sections(pipeline, overrides, gpu=gpu, assumed=assumed, **cluster)
        else:
            sections = [*show.memory_sections(found), show_steps.step_section(found, assumed)]
    except PipelineError:
        raise
    except ValueError as error:
        print(f"dagrl plan: {error}", file=sys.stderr)
        return 2
    if gpu is not None and not search and (why := why_unread(found.pipeline)):
        print(f"dagrl plan: --gpu {gpu} has no effect, as {why}", file=sys.stderr)
    print((show.as_json if as_json else show.as_text)(found, sections), end="", flush=True)
    if search:
        return 0 if any(section.value for section in sections) else 3
    if simulate is not None and found.fits:
        from dagrl.orchestrator.report import write_planned

        try:
            told = write_planned(found, simulate, assumed)
        except OSError as error:
            print(f"dagrl plan: {error}", file=sys.stderr)
            return 2
        # Beside JSON it is not for the program that reads that.
        print(told, file=sys.stderr if as_json else sys.stdout)
    for line in show.problems_in_words(found):
        print(line, file=sys.stderr)
    return 0 if found.fits else 3


def graph(pipeline: Path, overrides: list[str], output: Path | None) -> int:
    """Draw the DAG, as text on stdout or into a file."""
    from dagrl.config.loading.loader import load_pipeline
    from dagrl.graph.dag import build_graph
    from dagrl.graph.drawing.draw import draw_text, write_drawing
    from dagrl.graph.plugins.isolation import isolated_imports

    loaded = load_pipeline(pipeline, overrides)
    with isolated_imports():
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
    from dagrl.planner.fitting.sleep_policy import decide_sleep
    from dagrl.planner.fitting.warning import warn_of_memory
    from dagrl.validation import check_file

    checked = warn_of_memory(decide_sleep(check_file(pipeline, overrides)))
    for warning in checked.warnings:
        print(f"dagrl run: warning: {warning}", file=sys.stderr)
    folder = run_dir or Path("runs") / checked.loaded.pipeline.name
    # What follows takes seconds to import.
    print(f"starting {checked.loaded.pipeline.name}, {checked.loaded.pipeline.run.steps} steps", flush=True)
    from dagrl.orchestrator.run import run_pipeline
    from dagrl.workers.errors import InterruptedRunError, RefusedFolderError, RunError

    try:
        outcome = run_pipeline(checked, folder)
    except RefusedFolderError as error:
        print(f"dagrl run: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        left = f"; what there is lies in {folder}" if folder.is_dir() else ""
        print(f"dagrl run: failed{left}", *error.lines(), sep="\n", file=sys.stderr)
        return 1
    except (InterruptedRunError, KeyboardInterrupt):
        told = "stopped at once; `dagrl run` goes on from the last checkpoint, if there is one,"
        print(f"dagrl run: {told} in {folder}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        # All is cleaned up. Ray's libraries can crash at the end of a process that was interrupted while it connected.
        os._exit(130)
    print(outcome.summary(folder))
    return 0


def launch(pipeline: Path, overrides: list[str], run_dir: Path | None) -> int:
    """Train on several machines, where this is called on each."""
    from dagrl.launcher.command import launch_pipeline
    from dagrl.launcher.errors import LaunchError

    try:
        code = launch_pipeline(pipeline, overrides, run_dir)
    except LaunchError as error:
        print(f"dagrl launch: {error}", file=sys.stderr)
        return error.code
    return run(pipeline, overrides, run_dir) if code is None else code


def doctor() -> int:
    """Say what this machine can run, and what is missing."""
    from dagrl.doctor.command import examine
    from dagrl.doctor.probe import Edges

    return examine(Edges(), lambda line: print(line, flush=True))


def report(run_dir: Path, timeline: bool, gpu: str | None) -> int:
    """Say what a run has come to."""
    from dagrl.orchestrator.report import report_run

    try:
        if gpu is not None and not timeline:
            raise ValueError("--gpu is for --timeline; add that, or take it out")
        print(report_run(run_dir, timeline=timeline, gpu=gpu), end="")
    except PipelineError:
        raise
    except ValueError as error:
        print(f"dagrl report: {error}", file=sys.stderr)
        return 2
    return 0


def export(run_dir: Path, output: Path, step: int | None, engine: str | None, best: bool) -> int:
    """Write a run's policy as a Hugging Face folder."""
    from dagrl.orchestrator.export import export_run

    return _written("export", lambda: export_run(run_dir, output, step=step, engine=engine, best=best))


def convert(source: Path, output: Path, to: str, model: Path | None) -> int:
    """Write weights in the other format."""
    from dagrl.orchestrator.export import convert_to_hf, convert_to_megatron

    if to == "megatron":
        return _written("convert", lambda: convert_to_megatron(source, output))
    if model is None:
        print("dagrl convert: --to hf needs --model, a Hugging Face folder for config and tokenizer", file=sys.stderr)
        return 2
    return _written("convert", lambda: convert_to_hf(source, model, output))


def _written(command: str, write: Callable[[], str]) -> int:
    """Carry out a command that writes weights; says in a line what it did, or why it could not."""
    from dagrl.orchestrator.weight_folders import WrongCallError

    try:
        print(write())
    except PipelineError:
        raise
    except (ValueError, OSError) as error:
        print(f"dagrl {command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, WrongCallError) else 1
    return 0


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a call; the usage is in ``--help``."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see `{self.prog} --help`\n")


def _parser() -> argparse.ArgumentParser:
    from dagrl import __version__

    parser = _Parser(
        prog="dagrl", description="Reinforcement learning of language models, declared as a DAG in a pipeline file."
    )
    parser.add_argument("--version", action="version", version=f"dagrl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    _add_checks(commands)
    _add_plan(commands)
    _add_runs(commands)
    _add_report(commands)
    _add_weights(commands)
    _add(
        commands,
        doctor,
        "what this machine can run",
        "Look at this machine: Python and its packages, GPUs, memory, disks, limits, network, the variables of a job. "
        "A line for each, `ok`, `hint` or `missing`; exits 1 where something is missing that runs need.",
    )
    return parser


def _add_checks(commands: Any) -> None:
    command = _add(
        commands,
        validate,
        "check a pipeline file",
        "Check a pipeline file, the files it names and the code it names. Prints a summary and exits 0, or prints "
        "every problem as FILE:LINE: place: what is wrong; what to do, and exits 2. Needs no GPU.",
    )
    _add_pipeline(command)

    command = _add(
        commands,
        graph,
        "draw a pipeline's DAG",
        "Draw the DAG that follows from what the nodes read and write: as text, or as a picture with -o.",
    )
    _add_pipeline(command)
    command.add_argument(
        "-o", "--output", type=_path, metavar="FILE", help="write FILE.svg, .png, .mmd (Mermaid) or .txt"
    )


def _add_plan(commands: Any) -> None:
    command = _add(
        commands,
        plan,
        "say what a run will take",
        "Estimate, without a GPU, the data or the weights, what each engine of a pipeline takes of GPUs and hosts, "
        "awake and asleep, and whether it fits. Exits 3 where it does not, and says which engine, how many GiB over, "
        "and the nearest change that fits.",
    )
    _add_pipeline(command)
    command.add_argument(
        "--gpu", metavar="NAME", help="the GPU of groups that do not say theirs, such as H200 (default: H100)"
    )
    command.add_argument("--json", action="store_true", dest="as_json", help="one JSON object instead of tables")
    command.add_argument(
        "--simulate", type=_path, metavar="FILE", help="write what will run when as a Chrome trace, such as plan.json"
    )
    _add_estimate(command)


def _add_runs(commands: Any) -> None:
    command = _add(
        commands,
        run,
        "train",
        "Train as a pipeline file says, or go on from the newest checkpoint in the run folder. Ctrl-C saves and stops. "
        "Exits 0 at the end; 1 if the run failed, with node, worker and cause on the last lines.",
    )
    _add_run(command)

    command = _add(
        commands,
        launch,
        "train on several machines",
        "The same command on every machine of a job, which PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, "
        "PET_MASTER_ADDR (or MASTER_ADDR) and PET_MASTER_PORT describe. Rank 0 runs the pipeline as `dagrl run` does, "
        "on all of them; all exit with its code. On one machine it is `dagrl run`.",
    )
    _add_run(command)


def _add_estimate(command: argparse.ArgumentParser) -> None:
    half = "on average (default: half of the longest"
    command.add_argument("--prompt-tokens", type=float, metavar="N", help=f"tokens of a prompt {half})")
    command.add_argument(
        "--response-tokens", type=float, metavar="N", help=f"tokens of a response {half}, all with ignore_eos)"
    )
    search = command.add_argument_group("search")
    search.add_argument(
        "--search", action="store_true", help="propose layouts and group sizes for a cluster, the fastest step first"
    )
    # Left out, they are what the function called has for them.
    search.add_argument(
        "--gpus", type=_count, metavar="N", default=argparse.SUPPRESS, help="GPUs of the cluster (default: the file's)"
    )
    search.add_argument("--nodes", type=_count, metavar="N", default=argparse.SUPPRESS, help="its machines")
    search.add_argument(
        "--gpus-per-node", type=_count, metavar="N", default=argparse.SUPPRESS, help="GPUs of each (default: 8)"
    )
    search.add_argument(
        "--top", type=_count, metavar="N", default=argparse.SUPPRESS, help="proposals that are shown (default: 5)"
    )


def _count(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text.strip() or repr(text)} is not a whole number of 1 or more")
    return int(text)


def _path(text: str) -> Path:
    """A path, with the home folder in place of ``~``. An empty text would be the working directory."""
    if not text.strip() or "\0" in text:
        raise argparse.ArgumentTypeError("expected a path, got an empty text or one with a NUL character")
    return Path(os.path.expanduser(text))  # noqa: PTH111 (an unknown user's `~name` stays as it is)


def _add_report(commands: Any) -> None:
    command = _add(
        commands,
        report,
        "say what a run has come to",
        "Rewards, seconds by node, idle groups and restarts of a run, out of its folder, also while it goes on.",
    )
    command.add_argument("run_dir", type=_path, metavar="RUN", help="the run folder")
    command.add_argument(
        "--timeline",
        action="store_true",
        help="put what was planned beside what was, as tables and as RUN/timeline_planned.json",
    )
    command.add_argument("--gpu", metavar="NAME", help="with --timeline: the GPU of groups that do not say theirs")


def _add_weights(commands: Any) -> None:
    command = _add(
        commands,
        export,
        "write a run's policy as a Hugging Face folder",
        "Write the policy of a run as a Hugging Face folder: weights to the bit, config, tokenizer. Needs neither the "
        "run's layout nor a GPU.",
    )
    command.add_argument("run_dir", type=_path, metavar="RUN", help="the run folder")
    _add_written_folder(command)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="its checkpoint (default: the newest)")
    which.add_argument("--best", action="store_true", help="the best checkpoint, by the metric of run.keep_best")
    command.add_argument("--engine", metavar="NAME", help="the engine, where the run trains several")

    command = _add(
        commands,
        convert,
        "convert weights between Hugging Face and Megatron",
        "Write a Hugging Face folder in Megatron's distributed format (for dist_checkpointing_path, or for "
        "Megatron-LM), or the other way round.",
    )
    command.add_argument("source", type=_path, metavar="SOURCE", help="the folder to read")
    _add_written_folder(command)
    command.add_argument("--to", choices=("hf", "megatron"), required=True, help="the format to write")
    command.add_argument("--model", type=_path, metavar="FOLDER", help="with --to hf: where config and tokenizer are")


def _add(commands: Any, command: Callable[..., int], summary: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command, which is called as its function is."""
    parser = commands.add_parser(command.__name__, help=summary, description=description)
    parser.set_defaults(command=command)
    return parser


def _add_written_folder(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", type=_path, metavar="DIR", required=True, help="the folder to write")


def _add_run(command: argparse.ArgumentParser) -> None:
    _add_pipeline(command)
    command.add_argument("--run-dir", type=_path, metavar="DIR", help="the run folder (default: runs/NAME)")


def _add_pipeline(command: argparse.ArgumentParser) -> None:
    command.add_argument("pipeline", type=_path, metavar="PIPELINE", help="the pipeline's YAML file")
    command.add_argument("overrides", nargs="*", default=[], metavar="KEY=VALUE", help=_OVERRIDES_HELP)


if __name__ == "__main__":
    sys.exit(main())
