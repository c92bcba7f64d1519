"""Log-probs that servers and endpoints compute: what they cannot do is found before an engine starts."""

from __future__ import annotations

import pytest

from dagrl.config.errors import PipelineError
from dagrl.validation import check_file

SERVED = "  teacher: {backend: sglang, group: rollout, model: {init: {model_type: qwen3, hidden_size: 32}}}"
ENGINE = ("  generator: {backend", f"{SERVED}\n  generator: {{backend")
REF = "{op: logprob, engine: reference, write: ref_logprob}"
ENDPOINT = "{op: logprob, endpoint: 'http://teacher:8000/v1', model: m, write: ref_logprob"
ON_SERVERS = "{op: logprob, engine: teacher, write: ref_logprob"
HOT = ("{max_new_tokens: 8}", "{max_new_tokens: 8, temperature: 0.6}")


def pipeline(project, node, *edits):
    """The pipeline with this node as its reference, and servers with a model of their own."""
    return project.pipeline((REF, f"{node}}} #!"), ENGINE, *edits)


@pytest.mark.parametrize("node", [ENDPOINT, ENDPOINT + ", top_k: 4", ON_SERVERS])
@pytest.mark.parametrize("backend", ["sglang", "vllm"])
def test_right_ones_pass(project, node, backend):
    path = pipeline(project, node)
    path.write_text(path.read_text().replace("backend: sglang", f"backend: {backend}"))
    checked = check_file(path)
    assert [warning.place for warning in checked.warnings] == ["engines.reference"] + (
        [] if node is ON_SERVERS else ["engines.teacher"]
    )
    assert {"ref", "update"} <= checked.graph.nodes.keys()


CASES = {
    "nobody": ("{op: logprob, write: ref_logprob", "nodes.ref", "logprob-source"),
    "two": (ENDPOINT + ", engine: teacher", "nodes.ref", "logprob-source"),
    "no model": (ENDPOINT.replace(", model: m", ""), "nodes.ref.endpoint", "logprob-model"),
    "no host": (ENDPOINT.replace("teacher:8000", ""), "nodes.ref.endpoint", "invalid-value"),
    "a key in the address": (ENDPOINT.replace("teacher:8000", "me:key@teacher"), "nodes.ref.endpoint", "secret-in"),
    "a key for an engine": (ON_SERVERS + ", api_key_env: KEY", "nodes.ref.api_key_env", "option-without-effect"),
    "a timeout for an engine": (ON_SERVERS + ", timeout_s: 3", "nodes.ref.timeout_s", "option-without-effect"),
    "micro-batches over an endpoint": (
        ENDPOINT + ", tokens_per_micro_batch: 99999",
        "nodes.ref.tokens_per_micro_batch",
        "option-without-effect",
    ),
    "micro-batches on servers": (
        ON_SERVERS + ", tokens_per_micro_batch: 99999",
        "nodes.ref.tokens_per_micro_batch",
        "option-without-effect",
    ),
    "the policy's own weights": (
        ON_SERVERS.replace("teacher", "generator"),
        "nodes.ref.engine",
        "wrong-backend",
    ),
    "statistics of servers": (ON_SERVERS + ", statistics: [entropy]", "nodes.ref.statistics", "no-such-output"),
    "statistics over an endpoint": (
        ENDPOINT + ", statistics: [prob_square_sum]",
        "nodes.ref.statistics",
        "no-such-output",
    ),
    "unknown": (ON_SERVERS.replace("teacher", "teecher"), "nodes.ref.engine", "unknown-engine"),
}


@pytest.mark.parametrize(("node", "place", "code"), CASES.values(), ids=CASES)
def test_wrong_ones_are_reported(project, node, place, code):
    problem = project.only_problem(pipeline(project, node))
    assert problem.place == place
    assert code in str(problem.code)


@pytest.mark.parametrize(("node", "key"), [(ENDPOINT, "endpoint"), (ON_SERVERS, "engine")])
def test_samples_of_another_temperature_are_refused(project, node, key):
    path = pipeline(project, node, HOT)
    problem = project.only_problem(path)
    assert (problem.place, problem.code) == (f"nodes.ref.{key}", "other-temperature")
    assert "at temperature 1, and samples are drawn at 0.6 (nodes.rollout.sampling.temperature)" in problem.message
    # A trainer divides by it.
    check_file(project.pipeline(HOT))


def test_a_source_of_another_temperature_is_found(project):
    source = "train: {hot: {path: train.parquet, sampling: {max_new_tokens: 8, temperature: 1.2}}, cold: train.parquet}"
    problem = project.only_problem(pipeline(project, ON_SERVERS, ("train: train.parquet", source)))
    assert "samples are drawn at 1.2 (data.train.hot.sampling.temperature)" in problem.message


def test_servers_that_follow_the_policy_are_refused(project):
    path = pipeline(project, ON_SERVERS)
    path.write_text(
        path.read_text().replace("model: {init: {model_type: qwen3, hidden_size: 32}}", "weights_from: actor")
    )
    problem = project.only_problem(path)
    assert (problem.place, problem.code) == ("nodes.ref.engine", "scores-itself")
    assert (
        "`teacher` has the weights of `actor`, so its log-probs are the policy's own; name `actor`" in problem.message
    )


@pytest.mark.parametrize(
    ("backend", "positions", "server", "fits"),
    [
        ("sglang", 24, "{}", True),
        ("sglang", 23, "{}", False),
        ("sglang", 99, "{context_length: 23}", False),
        ("vllm", 25, "{}", True),
        ("vllm", 24, "{}", False),
        ("vllm", 99, "{max_model_len: 24}", False),
    ],
)
def test_a_teacher_reads_the_longest_row(project, backend, positions, server, fits):
    """Prompts have 16 tokens, responses 8; vLLM samples one more."""
    path = pipeline(project, ON_SERVERS)
    text = path.read_text().replace("backend: sglang", f"backend: {backend}")
    own = f"hidden_size: 32, max_position_embeddings: {positions}}}}}, server: {server}}}"
    path.write_text(text.replace("hidden_size: 32}}}", own))
    if fits:
        check_file(path)
        return
    problem = project.only_problem(path)
    assert problem.code == "context-too-short"
    assert ("nodes.ref.engine" if server == "{}" else "engines.teacher.server") in problem.place


@pytest.mark.parametrize(("positions", "fits"), [(24, True), (23, False)])
def test_a_teacher_on_megatron_that_reads_shorter_rows_is_named(project, positions, fits):
    own = f"model: {{init: {{model_type: qwen3, hidden_size: 32, max_position_embeddings: {positions}}}}}"
    engine = f"  teacher: {{backend: megatron, group: train, {own}}}\n{ENGINE[0]}"
    path = project.pipeline((REF, f"{ON_SERVERS}}}"), (ENGINE[0], engine))
    found = [each for each in check_file(path).warnings if each.code == "sample-too-long"]
    assert [each.place for each in found] == ([] if fits else ["nodes.ref.engine"])
    words = "the longest row has 24 tokens, more than the model's max_position_embeddings, 23"
    assert fits or words in found[0].message


@pytest.mark.parametrize(("told", "fits"), [(40, True), (41, False)])
def test_told_prompts_count_towards_the_longest_row(project, told, fits):
    """A teacher of 48 positions, and responses of 8 tokens."""
    node = ON_SERVERS + ", read: {prompt_tokens: teacher_prompt_tokens}, rows: {teacher_mask: [1]}"
    tell = f"  told: {{op: tell, demonstration: answer, max_prompt_tokens: {told}}}\n  ref: "
    path = pipeline(project, node.replace("ref_logprob", "teacher_logprob"), ("  ref: ", tell))
    text = path.read_text().replace("hidden_size: 32}}}", "hidden_size: 32, max_position_embeddings: 48}}}")
    path.write_text(text.replace("estimator: grpo", "estimator: grpo, distillation: {}"))
    found = [each for each in problems_of(project, path) if each.code == "context-too-short"]
    assert bool(found) != fits
    if found:
        assert "reads up to 48 tokens" in found[0].message and "have 49" in found[0].message


def problems_of(project, path):
    try:
        check_file(path)
    except PipelineError as error:
        return error.problems
    return []
