"""`dagrl plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dagrl.cli import completion
from dagrl.cli.errors import exit_on
from dagrl.cli.parameters import AsJson, Only, Overrides, Pipeline, parse_part, parse_path, print_json

if TYPE_CHECKING:
    from dagrl.planner.cost.lengths import Assumed
    from dagrl.planner.showing.report import Report

_DOES_NOT_FIT = 3
_Gpu = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="the GPU of groups that name none, such as H200 (default: H100)",
        autocompletion=completion.gpus,
    ),
]
_Trace = Annotated[
    Path | None,
    typer.Option(parser=parse_path, metavar="FILE", help="write the schedule as a Chrome trace, such as plan.json"),
]
_PromptTokens = Annotated[
    float | None, typer.Option(metavar="N", help="mean tokens of a prompt (default: half of the longest)")
]
_ResponseTokens = Annotated[
    float | None,
    typer.Option(metavar="N", help="mean tokens of a response (default: half of the longest, all with ignore_eos)"),
]
_Run = Annotated[
    Path | None,
    typer.Option(
        "--from", parser=parse_path, metavar="RUN", help="correct the estimates by the times of this run folder"
    ),
]
_Search = Annotated[
    bool, typer.Option("--search", help="propose layouts and group sizes for a cluster, the fastest step first")
]
_Gpus = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="with --search: GPUs of the cluster (default: the file's)")
]
_Nodes = Annotated[int | None, typer.Option(min=1, metavar="N", help="with --search: machines of the cluster")]
_GpusPerNode = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="with --search: GPUs of each machine (default: 8)")
]
_Top = Annotated[int | None, typer.Option(min=1, metavar="N", help="with --search: proposals to show (default: 5)")]


def plan(
    pipeline: Pipeline,
    overrides: Overrides = None,
    only: Only = None,
    gpu: _Gpu = None,
    as_json: AsJson = False,
    simulate: _Trace = None,
    prompt_tokens: _PromptTokens = None,
    response_tokens: _ResponseTokens = None,
    run: _Run = None,
    search: _Search = False,
    gpus: _Gpus = None,
    nodes: _Nodes = None,
    gpus_per_node: _GpusPerNode = None,
    top: _Top = None,
) -> int:
    """Estimate the memory of each engine of a pipeline, and whether it fits, without a GPU, the data or the weights.

    Exits 3 where it does not fit, and prints which engine, how many GiB over, and the nearest change that fits.

    Examples:
        dagrl plan pipeline.yaml --gpu H200
        dagrl plan pipeline.yaml --response-tokens 800 --json
        dagrl plan pipeline.yaml --only rollout,reward
        dagrl plan pipeline.yaml --search --nodes 2 --gpus-per-node 8
    """
    from dagrl.backends.planning.gpus import DEFAULT_GPU
    from dagrl.graph.cut import PartError
    from dagrl.planner.cost.lengths import Assumed
    from dagrl.planner.published import with_published_models
    from dagrl.planner.showing import report, show, show_steps
    from dagrl.reporting.measured_run import run_times

    part = parse_part(only)
    with exit_on("plan", ValueError, PartError):
        cluster = _cluster(search, simulate, gpus=gpus, nodes=nodes, gpus_per_node=gpus_per_node, top=top)
        if search and part is not None:
            raise ValueError("--search lays out whole pipelines; remove --only, or plan the part as it is")
        overrides, notes = with_published_models(pipeline, overrides or [])
        planned = report.report(pipeline, overrides, gpu=DEFAULT_GPU if gpu is None else gpu, part=part)
        if (search or simulate is not None) and planned.fit.plan.only_validates:
            raise ValueError("a run that only validates has no steps to estimate; set run.val_only=false")
        times = run_times(run, gpu=planned.gpu) if run is not None else None
        assumed = Assumed(prompt_tokens, response_tokens)
        assumed = assumed if times is None else times.lengths_for(planned.pipeline, assumed)
        if search:
            sections = show_steps.search_sections(planned, gpu=gpu, assumed=assumed, times=times, **cluster)
        else:
            sections = show_steps.plan_sections(planned, assumed, times)
    if gpu is not None and not search and (why := show.why_gpu_is_unused(planned.pipeline)):
        notes.append(f"--gpu {gpu} has no effect, as {why}")
    for note in notes:
        print(f"dagrl plan: {note}", file=sys.stderr)
    if as_json:
        print_json(show.as_values(planned, sections))
    else:
        print(show.as_text(planned, sections), end="", flush=True)
    if search:
        return 0 if any(section.key == "proposals" and section.value for section in sections) else _DOES_NOT_FIT
    if simulate is not None and planned.fits:
        # Keep stdout one JSON object.
        print(_written(planned, simulate, assumed), file=sys.stderr if as_json else sys.stdout)
    for line in show.problems_in_words(planned):
        print(line, file=sys.stderr)
    return 0 if planned.fits else _DOES_NOT_FIT


def _cluster(search: bool, simulate: Path | None, **counts: int | None) -> dict[str, int]:
    """Return the counts that the call has. ValueError for options that need, or exclude, a search."""
    cluster = {name: count for name, count in counts.items() if count is not None}
    if cluster and not search:
        raise ValueError(f"--{next(iter(cluster)).replace('_', '-')} is for --search; add that, or remove it")
    if search and simulate is not None:
        raise ValueError("--simulate shows one layout; remove --search, or simulate what it proposes")
    return cluster


def _written(planned: Report, trace: Path, assumed: Assumed) -> str:
    from dagrl.reporting.run_report import write_planned

    with exit_on("plan", OSError):
        return write_planned(planned, trace, assumed)
