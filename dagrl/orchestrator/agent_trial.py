"""Runs the agent of a rollout once, on a generator with the model's initial weights.

In this process, or as ``python -m dagrl.orchestrator.agent_trial`` in the environment of the generator.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np

from dagrl.backends.base import GenerateEngine, GenerationRequest
from dagrl.backends.environments import python_in
from dagrl.config.errors import counted
from dagrl.config.schema import Pipeline, RolloutNode
from dagrl.data.batch import Batch, Column
from dagrl.data.image_column import ImageColumn, images_at
from dagrl.data.prompt_table import PromptTable
from dagrl.data.sources import open_source
from dagrl.model_files.images import image_settings, shortened
from dagrl.ops.agents.play import AgentRollouts
from dagrl.ops.agents.rows import agent_row
from dagrl.ops.base import Context, Resources
from dagrl.ops.response import Response
from dagrl.ops.rollout import sample_seed
from dagrl.ops.work import RolloutWork
from dagrl.scheduler.plan import Plan
from dagrl.validation.prepare import PreparedPipeline
from dagrl.workers.engine_factory import make_engine
from dagrl.workers.listener import listen
from dagrl.workers.messages import StartEngine


def try_agent(prepared: PreparedPipeline, row: int) -> None:
    """Run the agent on a row of the training file, and print a report.

    Raises ValueError if no rollout has an agent, the row does not exist, or the generator cannot run.
    """
    pipeline, folder, plan = prepared.loaded.pipeline, prepared.loaded.folder, prepared.plan
    environment = pipeline.engines[_rollout_with_agent(pipeline)[1].engine].environment
    if environment is None:
        _print_trial(pipeline, folder, plan, row)
        return
    from dagrl.workers.serialization import serialize

    message, _ = serialize((pipeline, folder, plan, row))
    ended = subprocess.run([python_in(environment), "-m", __spec__.name], input=message, check=False)
    if ended.returncode:
        raise ValueError(f"the agent could not be tried in {environment}; the reason is above")


def _print_trial(pipeline: Pipeline, folder: Path, plan: Plan, row: int) -> None:
    name, node = _rollout_with_agent(pipeline)
    with TemporaryDirectory(prefix="dagrl-try-") as made, _generator(pipeline, node.engine, plan, Path(made)) as engine:
        resources = Resources(pipeline, folder, Path(made))
        work = RolloutWork(
            step=1, task=name, op=node.op, node=name, validation=False, committed=0, shards=1, outputs={},
            sampled_by=name, metric_prefix="",
        )  # fmt: skip
        context = Context(work, resources, engine)
        batch = _batch(pipeline, resources, row, context.sequences)
        prompt, images = batch["prompt_tokens"][0], tuple(images_at(batch, 0))
        sampling = context.own_samplings.get(next(iter(pipeline.data.sources)))
        requests = {
            place: GenerationRequest(prompt, sample_seed(context, place), images=images, sampling=sampling)
            for place in range(len(batch))
        }
        responses = [response for _, response in AgentRollouts(batch, requests, context).run()]
        for line in _report(responses, resources):
            print(line)


def _rollout_with_agent(pipeline: Pipeline) -> tuple[str, RolloutNode]:
    with_agent = [(name, node) for name, node in pipeline.rollouts.items() if node.agent is not None]
    if not with_agent:
        raise ValueError("no rollout of this pipeline has an `agent`")
    return with_agent[0]


@contextmanager
def _generator(pipeline: Pipeline, name: str, plan: Plan, run_dir: Path) -> Iterator[GenerateEngine]:
    """One replica of a generator, with the model's own weights."""
    spec = pipeline.engines[name]
    alone = spec.model_copy(update={"weights_from": None, "model": pipeline.model_of(name)})
    pipeline = pipeline.model_copy(update={"engines": {**pipeline.engines, name: alone}})
    executor = next(other for other in plan.executors.values() if name in other.engines)
    ranks = sum(place.dp == 0 for place in executor.places)
    on_gpus = bool(pipeline.groups[str(spec.group)].gpus_per_node)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = (visible.split(",") if visible else [str(gpu) for gpu in range(ranks)])[:ranks] if on_gpus else []
    listener = listen("127.0.0.1")
    setup = StartEngine(
        pipeline,
        None,
        run_dir,
        name,
        master_addr="127.0.0.1",
        master_port=listener.getsockname()[1],
        gpus=tuple(gpus) if spec.replicas_are_servers else (),
    )
    engine = make_engine(setup, listener.detach())
    try:
        yield cast(GenerateEngine, engine)
    finally:
        engine.close()


def _batch(pipeline: Pipeline, resources: Resources, row: int, copies: int) -> Batch:
    data = pipeline.data
    settings = image_settings(pipeline.model, data) if data.image_key else None
    source = open_source(*next(iter(data.sources.items())))
    column = ImageColumn(source, data.image_key, settings) if data.image_key and settings else None
    table = PromptTable(source, resources.tokenizer, images=column)
    if not 0 <= row < len(table):
        raise ValueError(f"{source.title} has the rows 0 to {len(table) - 1}, and no row {row}")
    prompt = table.prompt(row)
    once = table.texts([row]) | table.images([row])
    texts = {name: column.take(np.zeros(copies, dtype=np.int64)) for name, column in once.items()}
    rows = np.arange(copies, dtype=np.int64)
    prompts = Column.ragged([prompt] * copies, "int64")
    return Batch(rows, {"group_id": Column(np.zeros(copies, dtype=np.int64)), "prompt_tokens": prompts, **texts})


def _report(responses: list[Response], resources: Resources) -> Iterator[str]:
    tokenizer: Any = resources.tokenizer
    pipeline = resources.pipeline
    vision = image_settings(pipeline.model) if pipeline.data.image_key else None

    def text(tokens: np.ndarray) -> str:
        return tokenizer.decode(shortened(tokens, vision) if vision else tokens)

    first = agent_row(responses[0])
    for number, response in enumerate(responses, 1):
        if not response.turns:
            continue
        prompt = agent_row(response).prompt
        yield f"-- sequence {number}: {counted(len(prompt), 'token')} of prompt, {len(response.tokens)} of response"
        yield text(prompt)
        end = 0
        for turn, span in enumerate(response.turns, 1):
            if span.begin > end:
                yield "-- told"
                yield text(response.tokens[end : span.begin])
            trained = "" if response.mask[span.begin : span.end].any() else ", not trained on here"
            yield f"-- turn {turn} of the policy: {counted(span.end - span.begin, 'token')}{trained}"
            yield tokenizer.decode(response.tokens[span.begin : span.end])
            end = span.end
    trajectory, dropped = first.trajectory, first.dropped
    requests = counted(len(trajectory.tree.exchanges), "request")
    yield f"-- {requests}, {trajectory.seconds:.2f} s, {responses[0].finish_reason}"
    if dropped:
        rows = counted(len(responses), "row")
        yield f"{dropped:.0%} of the sampled tokens are not in the {rows} of the sample; raise `sequences`"
    if trajectory.error is not None:
        yield f"the agent failed: {trajectory.error}"
    else:
        yield f"reward {trajectory.verdict.reward}"
    for name, value in trajectory.verdict.metrics.items():
        yield f"{name} {value:g}"
    if trajectory.verdict.output:
        yield "-- output of the agent"
        yield trajectory.verdict.output.rstrip()


if __name__ == "__main__":
    from dagrl.workers.serialization import deserialize

    try:
        _print_trial(*deserialize(sys.stdin.buffer.read(), []))
    except (ValueError, OSError) as error:
        sys.exit(f"dagrl agent try: {error}")
