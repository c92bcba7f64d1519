"""Checks the replay buffer of a run folder before anything starts."""

from __future__ import annotations

from dagrl.data.replay_buffer import BufferFiles
from dagrl.model_files.fingerprint import fingerprints
from dagrl.orchestrator.folder.run_folder import RunFolder
from dagrl.validation.prepare import PreparedPipeline
from dagrl.workers.errors import RefusedFolderError

_NEW = ("sample_id", "group_id")
"""Columns that returned groups get anew."""


def check_buffers(prepared: PreparedPipeline, folder: RunFolder) -> None:
    """Raise RefusedFolderError if groups in a buffer cannot return to the run."""
    pipeline = prepared.loaded.pipeline
    for task in prepared.plan.tasks:
        if task.replays:
            files = BufferFiles(folder.path, task.node, fingerprints(pipeline.model))
            columns = [name for name in task.outputs if name in task.inputs and name not in _NEW]
            try:
                files.check(folder.start.step, columns, pipeline.rows_per_prompt())
            except ValueError as error:
                raise RefusedFolderError.of(str(error)) from error
