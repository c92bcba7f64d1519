"""Trinity-RFT's keys that have no counterpart, or need none."""

from __future__ import annotations

from dagrl.importing.table import implied, refused, refused_unless, under
from dagrl.importing.trinity.common import MODEL, TASKS

RULES = (
    refused_unless(
        (1.0, 0, None),
        "log-probs would be those of another policy",
        "model.repetition_penalty model.min_response_tokens",
    ),
    refused("prepare the file beforehand", "data_processor.* service*"),
    refused(
        "samples travel through Ray's object store, and are trained on in their own step",
        "buffer.trainer_input.experience_buffer.*",
    ),
    refused(
        "experts' responses are `{op: mix}` with `data.responses` (docs/offline.md)",
        "buffer.trainer_input.auxiliary_buffers* algorithm.sample_strategy*",
    ),
    refused("an engine that follows none judges: {op: judge} (docs/rewards.md)", "explorer.auxiliary_models*"),
    refused("a run for each stage, from what `dagrl export` makes of the one before", "stages*"),
    refused("is a tool or an environment (docs/multi_turn.md)", under(TASKS, "taskset.workflow_args* *workflow_args*")),
    implied(
        "columns are those of the converted file",
        under(TASKS, "eval_tasksets.*.format.* eval_tasksets.*.storage_type eval_tasksets.*.subset_name"),
    ),
    refused("all validation sets share reward and format", under(TASKS, "eval_tasksets.* default_eval_workflow_type")),
    refused("several task sets are one file", under(TASKS, "tasksets.*")),
    refused("trackers read their own environment", "monitor.monitor_args*"),
    implied(
        "`nodes.rollout.tool_timeout_s` bounds a call, `on_environment_error` says what follows",
        "explorer.max_timeout explorer.max_retry_times",
    ),
    implied(
        "is `dagrl run --run-dir DIR`; a run goes on in its folder by itself",
        "checkpoint_root_dir continue_from_checkpoint trainer.save_hf_checkpoint",
    ),
    implied("`sleep: auto` offloads where engines share GPUs", "trainer.*offload*"),
    implied(
        "follows from the pipeline",
        under(TASKS, "taskset.*"),
        under(MODEL, "*"),
        "model.* explorer.* synchronizer.* monitor.* trainer.trainer_type trainer.balance_batch "
        "trainer.enable_preview trainer.save_strategy trainer.* buffer.* cluster.* log* ray_namespace "
        "ignore_validator_suggestions algorithm.optimizer.* algorithm.enable_router_replay",
    ),
)
