"""What `dagrl validate` says of engines."""

import pytest

from dagrl.spec.checks import check_file
from dagrl.spec.summary import summarize


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
def test_layouts_are_told_in_all_their_sizes(project, parallel, shown):
    path = project.pipeline(
        ("model_type: qwen3, hidden_size: 64", "model_type: qwen3_moe, hidden_size: 64, num_hidden_layers: 12"),
        ("train: {cpus_per_node: 2}", "train: {nodes: 2, gpus_per_node: 8}"),
    )
    assert f"  on train: {shown}\n" in summarize(check_file(path, [f"engines.actor.parallel={parallel}"]))
