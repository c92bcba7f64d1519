"""A run from a checked pipeline to its end: opens folder, cluster, workers and driver, and closes them in reverse."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dagrl.backends.registry import backend_of
from dagrl.config.loading.loader import LoadedPipeline
from dagrl.config.schema import EngineSpec, Pipeline
from dagrl.orchestrator.cluster.interrupts import InterruptHandler, signals_as_ctrl_c
from dagrl.orchestrator.cluster.ray_cluster import cluster
from dagrl.orchestrator.cluster.session import while_ray_lives
from dagrl.orchestrator.driver import Driver
from dagrl.orchestrator.exchange import Exchange, open_exchange
from dagrl.orchestrator.export import policies
from dagrl.orchestrator.folder.buffers import check_buffers
from dagrl.orchestrator.folder.checkpoint import RunState
from dagrl.orchestrator.folder.run_folder import RunFolder, open_run_folder
from dagrl.orchestrator.groups.task_group import run_with_notes
from dagrl.orchestrator.groups.worker_failures import RestartPolicy
from dagrl.orchestrator.groups.worker_group import WorkerGroups
from dagrl.orchestrator.outcome import RunOutcome
from dagrl.tracking import Trackers, open_trackers
from dagrl.tracking.console import Verbosity
from dagrl.tracking.metrics_file import last_step
from dagrl.validation import CheckedPipeline
from dagrl.validation.prepare import PreparedPipeline, placed
from dagrl.workers.errors import InterruptedRunError, RayLostError, RefusedFolderError, RunError, WorkerLostError
from dagrl.workers.messages import StartEngine


def run_pipeline(
    prepared: PreparedPipeline,
    run_dir: Path,
    verbosity: Verbosity = Verbosity.NORMAL,
    experience: Path | None = None,
) -> RunOutcome:
    """Train from the start, or from the last checkpoint in the run folder; or validate alone, as `RunSpec` says.

    `experience`: the folder through which parts of a pipeline exchange data. Default: ``experience`` in the run folder.

    Raises RunError for any failure, RefusedFolderError if the folder is not for this run. If workers are lost that
    cannot be restarted one by one, all workers restart from the last checkpoint.
    """
    began, stop_after_s = time.monotonic(), prepared.loaded.pipeline.run.stop_after_s
    stop_at = None if stop_after_s is None else began + stop_after_s
    restarts = RestartPolicy(prepared.loaded.pipeline.run.max_restarts)
    failure = ""
    with signals_as_ctrl_c():
        while True:
            try:
                outcome = _go_on(prepared, run_dir, restarts, failure, verbosity, stop_at, experience)
                exported = tuple(policies(prepared.loaded.pipeline))
                return replace(outcome, seconds=time.monotonic() - began, policies=exported)
            except RefusedFolderError as refused:
                if failure:  # the run has failed while it restarted
                    raise RunError(refused.cause, hint=refused.hint) from refused
                raise
            except WorkerLostError as lost:
                failure = restarts.use_restart(lost, "all of the run goes on from its last checkpoint")


def _go_on(
    prepared: PreparedPipeline,
    run_dir: Path,
    restarts: RestartPolicy,
    failure: str,
    verbosity: Verbosity,
    stop_at: float | None,
    experience: Path | None,
) -> RunOutcome:
    """Run from the last checkpoint until the end, a failure or `stop_at`, by the monotonic clock.

    `failure` describes the previous start's failure; empty for the first start.
    """
    loaded, rows = prepared.loaded, sum(prepared.train_rows.values())
    pipeline = loaded.pipeline
    opened = open_run_folder(
        run_dir,
        pipeline,
        loaded.resolved,
        modules=loaded.folder,
        graph=prepared.graph,
        again=bool(failure),
        rows=rows,
    )
    with opened as folder:
        done, alone = folder.resumed.step if folder.resumed else 0, pipeline.run.only_validates
        if alone:
            prepared = plan_validation(prepared, folder.resumed)
            loaded = prepared.loaded
        elif folder.resumed and folder.resumed.finishes(pipeline.run, rows):
            return RunOutcome(done, stopped=False, before=True, changed=folder.changed)
        exchange = open_exchange(prepared, folder, experience or run_dir / "experience")
        exchange.check()
        if not alone:
            check_buffers(prepared, folder)
        with _opened(loaded, folder, verbosity) as trackers:
            changed = folder.changed and f"changed since the last start of the run: {folder.changed}"
            for note in filter(None, (failure, *folder.torn, changed)):
                trackers.note(note)
            trackers.note(
                f"run folder {folder.path}" + (f", {'with' if alone else 'going on after'} step {done}" if done else "")
            )
            exchange.note = trackers.note
            prepared = exchange.prepare(prepared)
            pipeline = prepared.loaded.pipeline
            used = {name: group for name, group in pipeline.groups.items() if name in prepared.plan.groups}
            with cluster(
                pipeline.model_copy(update={"groups": used}), folder.path / "logs", trackers.note, patient=bool(failure)
            ):
                return asyncio.run(_train(prepared, folder, trackers, restarts, stop_at, exchange))


def _opened(loaded: LoadedPipeline, folder: RunFolder, verbosity: Verbosity) -> Trackers:
    pipeline = loaded.pipeline
    # A run that trains nothing keeps the records of all steps.
    kept = folder.resumed.step if folder.resumed else None
    if pipeline.run.only_validates:
        kept = last_step(folder.path / "metrics.jsonl")
    try:
        return open_trackers(
            pipeline.trackers,
            run_dir=folder.path,
            run_name=pipeline.name,
            config=loaded.resolved,
            total_steps=pipeline.run.steps,
            resumed_step=kept,
            shown_samples=pipeline.run.log_val_generations,
            verbosity=verbosity,
            folder=loaded.folder,
        )
    except (OSError, ValueError) as error:
        raise RunError(str(error)) from error


async def _train(
    prepared: PreparedPipeline,
    folder: RunFolder,
    trackers: Trackers,
    restarts: RestartPolicy,
    stop_at: float | None,
    exchange: Exchange,
) -> RunOutcome:
    plan = prepared.plan
    groups = WorkerGroups(plan, prepared.loaded.pipeline)
    pipeline = prepared.loaded.pipeline
    # The user's sampler is made and loaded here, and may take long.
    driver = await run_with_notes(
        lambda: Driver(prepared, groups, folder, trackers, restarts, exchange),
        lambda: pipeline.data.ordering.sampler or "data.order",
        trackers.note,
        pipeline.run.node_timeout_s,
    )

    def stop_in_time() -> None:
        stop_after = pipeline.run.stop_after
        trackers.note(f"run.stop_after: {stop_after} have passed; stopping after this step, with a checkpoint")
        driver.request_stop()

    with InterruptHandler(driver.request_stop, trackers.note) as interrupts:
        try:
            async with while_ray_lives():
                await _start_workers(groups, prepared, folder, trackers)
                restarts.has_run = True
                await exchange.start(groups)
                if not plan.only_validates:  # a validation has nothing to save
                    interrupts.training = True
                    if stop_at is not None:
                        loop = asyncio.get_running_loop()
                        loop.call_later(stop_at - time.monotonic(), stop_in_time)
                await driver.train()
        except asyncio.CancelledError as cancelled:
            raise InterruptedRunError from cancelled
        except RunError as error:
            folder.keep_details(error)
            if not isinstance(error, RayLostError):
                with suppress(asyncio.CancelledError):  # Ctrl-C ends the wait; the failure is reported
                    await groups.abandon()
            raise
        except OSError as error:
            raise RunError(str(error), hint="is the disk full, or the run folder no longer writable?") from error
    out_of_time = stop_at is not None and time.monotonic() >= stop_at
    # Everything is saved; Ctrl-C only ends the wait.
    with suppress(asyncio.CancelledError, RayLostError):
        async with while_ray_lives():
            await groups.close()
    scheduler = driver.scheduler
    stopped = scheduler.committed < scheduler.last_step
    if exchange.is_part:
        stopped = exchange.stop_requested and scheduler.committed < plan.steps
    exchange.close(finished=not stopped)
    alarm = driver.alarms.stopped_by
    return RunOutcome(
        scheduler.committed,
        stopped=stopped,
        out_of_time=stopped and out_of_time and alarm is None,
        alarm="" if alarm is None else f"step {alarm.step}: {alarm}",
        only_validated=plan.only_validates,
    )


async def _start_workers(
    groups: WorkerGroups, prepared: PreparedPipeline, folder: RunFolder, trackers: Trackers
) -> None:
    began, loaded = time.time(), prepared.loaded
    trackers.note(f"starting {', '.join(prepared.plan.executors)}")
    resumed_from = folder.resumed_from and folder.resumed_from.resolve()
    setup = StartEngine(loaded.pipeline, loaded.folder, folder.path.resolve())
    await groups.launch(setup, resumed_from, trackers.note)
    groups.write_info(folder.path)
    trackers.note(f"{len(prepared.plan.executors)} executors started in {time.time() - began:.0f} s")


def plan_validation(checked: CheckedPipeline, validated: RunState | None) -> PreparedPipeline:
    """The pipeline of a run that validates a checkpoint, or the start weights: None."""
    pipeline = checked.loaded.pipeline
    # Records and profiles belong to steps of training.
    update: dict[str, object] = {"run": pipeline.run.model_copy(update={"record": None}), "profile": None}
    if validated is None:
        engines = {name: _on_start_weights(pipeline, name) for name in pipeline.engines}
        update["engines"] = engines
    loaded = replace(checked.loaded, pipeline=pipeline.model_copy(update=update))
    prepared = placed(replace(checked, loaded=loaded))
    return replace(prepared, plan=replace(prepared.plan, steps=validated.step if validated else 0))


def _on_start_weights(pipeline: Pipeline, name: str) -> EngineSpec:
    """The section of an engine. The engine loads a model's folder itself if its source has the same weights."""
    engine = pipeline.engines[name]
    source = pipeline.engines.get(engine.weights_from or "")
    if source is None or pipeline.model_of(name).path is None or backend_of(source).start_folder(source):
        return engine
    return engine.model_copy(update={"weights_from": None, "model": pipeline.model_of(name)})
