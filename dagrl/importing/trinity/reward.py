"""Trinity-RFT's rewards, and operators on experiences."""

from __future__ import annotations

from dagrl.importing.parts import DAPO
from dagrl.importing.table import Translation, joint, under
from dagrl.importing.trinity.common import TASKS


def _reward(t: Translation) -> None:
    t.put("nodes.reward.op", "reward")
    # A task set's own types go first.
    flow, key = (
        next((each for each in (f"{TASKS}.taskset.{name}", f"{TASKS}.{name}") if t.given(each)), f"{TASKS}.{name}")
        for name in ("default_workflow_type", "default_reward_fn_type")
    )
    value = str(t.get(key) or "")
    if value in ("", "None", "math_reward", "math_boxed_reward", "math_dapo_reward", "accuracy_reward") and "math" in (
        value + str(t.get(flow))
    ):
        t.write(
            "nodes.reward.fn",
            "math",
            *(each for each in (key, flow) if t.given(each)),
            note="without points for the format" + (DAPO if "dapo" in value else ""),
        )
    else:
        t.put("nodes.reward.fn", "math")
        t.note(key if t.given(key) else flow, "nodes.reward.fn", "set `fn`: math, or your own; math stands in")
    for each in (f"{TASKS}.default_workflow_type", f"{TASKS}.taskset.default_workflow_type"):
        if "math" in str(t.get(each)):
            t.imply("one response to a question", each)
        elif t.given(each):
            t.refuse("a Workflow of your own is `nodes.rollout.agent` (docs/gateway.md)", each)


def _penalty(t: Translation) -> None:
    prefix = f"{TASKS}.taskset.reward_fn_args"
    if t.flag(f"{prefix}.enable_overlong_penalty"):
        t.write(
            "nodes.advantage.overlong_buffer.len",
            t.get(f"{prefix}.cache_length"),
            f"{prefix}.cache_length",
            f"{prefix}.enable_overlong_penalty",
        )
        t.write(
            "nodes.advantage.overlong_buffer.penalty_factor",
            t.get(f"{prefix}.penalty_factor", 1.0),
            f"{prefix}.penalty_factor",
        )
        t.imply("the penalty ends at `max_new_tokens`", f"{prefix}.max_response_length")
    t.refuse("arguments of the function are `nodes.reward.args`", *(key for key in t.current if not t.is_recorded(key)))


def _operators(t: Translation) -> None:
    for key in t.current:
        name = t.get(key)
        if not key.endswith(".name"):
            continue
        if name in ("dapo_dynamic_sampling", "reward_std_filter", "reward_filter"):
            t.write("nodes.keep.op", "filter", key)
            threshold = key.removesuffix(".name") + ".args.threshold"
            if t.number(threshold):
                t.write("nodes.keep.min_std", t.get(threshold), threshold)
        elif name == "mask_response_truncated":
            t.refuse("a mask of your own leaves them out (docs/migration.md)", key)
        else:
            t.refuse("has no counterpart: a node of your own (docs/your_own.md)", key)
    t.refuse("samples are trained on in their own step", *(key for key in t.current if not t.is_recorded(key)))


RULES = (
    joint(
        _reward,
        under(
            TASKS,
            "default_workflow_type default_reward_fn_type taskset.default_workflow_type taskset.default_reward_fn_type",
        ),
        always=True,
    ),
    joint(_penalty, under(TASKS, "taskset.reward_fn_args.*")),
    joint(_operators, "data_processor.experience_pipeline.operators.*"),
)
