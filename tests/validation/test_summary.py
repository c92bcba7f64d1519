"""What `dagrl validate` says of engines."""

import pytest

from dagrl.validation import check_file
from dagrl.validation.summary import summarize


@pytest.mark.parametrize(
    ("parallel", "shown"),
    [
        ("{}", "tp 1, dp 16"),
        ("{tensor_model_parallel_size: 2, sequence_parallel: true}", "tp 2 + sp, dp 8"),
        (
            "{pipeline_model_parallel_size: 2, virtual_pipeline_model_parallel_size: 3, context_parallel_size: 4}",
            "tp 1, pp 2 x 3, cp 4, dp 2",
        ),
        ("{expert_model_parallel_size: 4, expert_tensor_parallel_size: 2}", "tp 1, ep 4, etp 2, dp 16"),
    ],
)
def test_layouts_are_printed_with_all_sizes(project, parallel, shown):
    path = project.pipeline(
        ("model_type: qwen3, hidden_size: 64", "model_type: qwen3_moe, hidden_size: 64, num_hidden_layers: 12"),
        ("train: {cpus_per_node: 2}", "train: {nodes: 2, gpus_per_node: 8}"),
    )
    assert f"  on train: {shown}\n" in summarize(check_file(path, [f"engines.actor.parallel={parallel}"]))


@pytest.mark.parametrize(
    ("rollout", "server", "shown"),
    [
        ("{cpus_per_node: 2}", "{}", "2 servers, weights from actor"),
        ("{gpus_per_node: 1}", "{}", "1 server, weights from actor"),
        ("{gpus_per_node: 4}", "{tp_size: 2}", "2 servers of 2 GPUs, weights from actor"),
        ("{nodes: 2, gpus_per_node: 2}", "{tp_size: 4}", "1 server of 4 GPUs, weights from actor"),
    ],
)
def test_servers_are_listed_with_their_size(project, rollout, server, shown):
    engine = f"{{backend: sglang, group: rollout, weights_from: actor, server: {server}}}"
    overrides = [f"engines.generator={engine}", f"groups.rollout={rollout}"]
    if "gpus" in rollout:
        overrides.append("groups.train={gpus_per_node: 2}")
    assert f"  on rollout: {shown}\n" in summarize(check_file(project.pipeline(), overrides))


def test_overlapping_steps_are_described(project):
    path = project.folder / "p.yaml"

    def told(*overrides):
        return summarize(check_file(path, overrides)).partition("\nschedule\n")[2]

    assert told() == ""
    sentence = "  samples up to 1 version behind the weights that train on them; new weights arrive between rollouts\n"
    assert told("schedule.max_staleness=1").startswith(sentence)
    sglang = "engines.generator={backend: sglang, group: rollout, weights_from: actor, weight_sync: {pause: retract}}"
    ahead = told("schedule={max_staleness: 2, in_flight_weight_update: true, stream_update: true}", sglang)
    assert "up to 2 versions behind" in ahead and "during rollouts" in ahead and "updates start with" in ahead


def test_separate_heads_and_models_are_listed(project):
    critic = (
        "  critic: {backend: megatron, group: train, head: value, model: {init: {model_type: qwen2, hidden_size: 64}}}"
    )
    path = project.pipeline(("  generator: {backend", f"{critic}\n  generator: {{backend"))
    shown = "on train: tp 1, dp 2, value head, its own model qwen2 with random weights (hidden_size 64)\n"
    assert shown in summarize(check_file(path))


@pytest.mark.parametrize(("prompts", "repeats"), [(32, False), (33, True)])
def test_fewer_prompts_than_a_step_takes_are_reported_without_a_warning(project, prompts, repeats):
    told = summarize(check_file(project.folder / "p.yaml", [f"data.prompts_per_step={prompts}"]))
    assert ("(32 prompts; a step takes 33, so some come more than once)" in told) is repeats
    assert "warnings" not in told
