import pytest
from project import assert_code

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline

CASES = [
    # what stands in the file, what is written instead, where the problem is, what it says
    ("name: tiny", "name: tiny\nnam: x #!", "nam", "unknown-key"),
    ("steps: 10}", "steps: 10, stepz: 3} #!", "run.stepz", "unknown-key"),
    ("  train: {cpus_per_node: 2}", "  train: {cpu_per_node: 2} #!", "groups.train.cpu_per_node", "`cpus_per_node`?"),
    ("frozen_copy_of: actor}", "share: actor} #!", "engines.reference.share", "unknown-key"),
    ("kl_coef: 0.01}}", "kl_coeff: 0.01}} #!", "nodes.update.loss.kl_coeff", "unknown-key"),
    ("run: {steps: 10}", "run: {steps: 10.5} #!", "run.steps", "invalid-value"),
    ("run: {steps: 10}", 'run: {steps: "10"} #!', "run.steps", "invalid-value"),
    ("run: {steps: 10}", "run: {steps: true} #!", "run.steps", "invalid-value"),
    ("run: {steps: 10}", "run: {steps: [10]} #!", "run.steps", "invalid-value"),
    ("run: {steps: 10}", "run: {steps: -1} #!", "run.steps", "invalid-value"),
    ("run: {steps: 10}", "run: {} #!", "run.steps", "missing-key"),
    ("run: {steps: 10}", "run: 10 #!", "run", "invalid-value"),
    ("run: {steps: 10}", "", "run", "missing-key"),
    (
        "groups:\n  train: {cpus_per_node: 2}\n  rollout: {cpus_per_node: 1}\n",
        "",
        "groups",
        "missing-key",
    ),
    ("name: tiny", "name: 3 #!", "name", "invalid-value"),
    ("name: tiny", "name: a/b #!", "name", "invalid-value"),
    (
        "run: {steps: 10}",
        "run: {steps: 10, start_timeout_s: .inf} #!",
        "run.start_timeout_s",
        "invalid-value",
    ),
    ("run: {steps: 10}", "run: {steps: 10, node_timeout_s: 1e9} #!", "run.node_timeout_s", "invalid-value"),
    (
        "run: {steps: 10}",
        "run: {steps: 10, host_workers: 1000000} #!",
        "run.host_workers",
        "invalid-value",
    ),
    ("fn: exact}", "fn: exact, concurrency: 5000} #!", "nodes.reward.concurrency", "invalid-value"),
    ("{cpus_per_node: 2}", "{cpus_per_node: 2000} #!", "groups.train.cpus_per_node", "invalid-value"),
    ("{cpus_per_node: 2}", "{gpus_per_node: 2000} #!", "groups.train.gpus_per_node", "invalid-value"),
    ("{cpus_per_node: 2}", "{cpus_per_node: 2, nodes: 20000} #!", "groups.train.nodes", "invalid-value"),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8}, tool_concurrency: 5000} #!",
        "nodes.rollout.tool_concurrency",
        "invalid-value",
    ),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8}, max_parallel_calls: 5000} #!",
        "nodes.rollout.max_parallel_calls",
        "invalid-value",
    ),
    (
        "{op: reward, fn: exact}",
        '{op: judge, endpoint: "http://a/v1", model: m, prompt: "?", concurrency: 5000} #!',
        "nodes.reward.concurrency",
        "invalid-value",
    ),
    ("name: tiny", f"name: {'x' * 201} #!", "name", "invalid-value"),
    ("train: train.parquet", "train: 3 #!", "data.train", "invalid-value"),
    ("prompts_per_step: 8", "prompts_per_step: 8\n  order: shufled #!", "data.order", "invalid-value"),
    (
        "op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}",
        "op: rollot} #!",
        "nodes.rollout.op",
        "unknown-op",
    ),
    (
        "estimator: grpo}",
        "estimator: a2c} #!",
        "nodes.advantage.estimator",
        "unknown-option",
    ),
    ("  actor:\n    backend: megatron", "  actor:\n    backend: megatro #!", "engines.actor.backend", "`megatron`?"),
    ("{op: reward, fn: exact}", "{fn: exact} #!", "nodes.reward.op", "missing-key"),
    ("{op: reward, fn: exact}", "exact #!", "nodes.reward", "invalid-value"),
    ("fn: exact}", "fn: exact, on_error: go} #!", "nodes.reward.on_error", "invalid-value"),
    (
        "fn: exact}",
        "fn: exact, on_error: .nan} #!",
        "nodes.reward.on_error",
        "invalid-value",
    ),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8, temperature: .inf}} #!",
        "nodes.rollout.sampling.temperature",
        "invalid-value",
    ),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8, stop_token_ids: [-1]}} #!",
        "nodes.rollout.sampling.stop_token_ids[0]",
        "invalid-value",
    ),
    (
        "run: {steps: 10}",
        "run: {steps: 10, seed: 9223372036854775808} #!",
        "run.seed",
        "invalid-value",
    ),
    ("write: ref_logprob}", "write: 3} #!", "nodes.ref.write", "invalid-value"),
    (
        "  rollout: {cpus_per_node: 1}",
        "  Roll-Out: {cpus_per_node: 1} #!",
        "groups.Roll-Out",
        "invalid-name",
    ),
    ("max_new_tokens: 8}}", "max_new_tokens: 8, top_p: 1.5}} #!", "nodes.rollout.sampling.top_p", "invalid-value"),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8, n: 4}} #!",
        "nodes.rollout.sampling.n",
        "refused-key",
    ),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8, repetition_penalty: 1.1}} #!",
        "nodes.rollout.sampling.repetition_penalty",
        "refused-key",
    ),
    ("max_new_tokens: 8}}", "max_new_tokens: 8, stop: ['']}} #!", "nodes.rollout.sampling.stop[0]", "invalid-value"),
    ("kl_coef: 0.01}}", "clip_ratio: 1}} #!", "nodes.update.loss.clip_ratio", "invalid-value"),
    ("run: {steps: 10}", "run: {steps: 10}\nprofile: {steps: [0]} #!", "profile.steps[0]", "invalid-value"),
    ("run: {steps: 10}", "run: {steps: 10}\nprofile: {steps: []} #!", "profile.steps", "invalid-value"),
    (
        "run: {steps: 10}",
        "run: {steps: 10}\nprofile: {steps: [1], nodes: []} #!",
        "profile.nodes",
        "invalid-value",
    ),
    (
        "run: {steps: 10}",
        "run: {steps: 10}\nprofile: {steps: [1], ranks: []} #!",
        "profile.ranks",
        "invalid-value",
    ),
    ("run: {steps: 10}", "run: {steps: 10}\ntrack: console #!", "track", "invalid-value"),
    ("run: {steps: 10}", "run: {steps: 10}\ntrack: [console, wanbd] #!", "track[1]", "unknown-option"),
    ("run: {steps: 10}", "run: {steps: 10}\ntrack: [console, null] #!", "track[1]", "unknown-option"),
    ("prompts_per_step: 8", "prompts_per_step: 9999999999 #!", "data.prompts_per_step", "invalid-value"),
    (
        "estimator: grpo}",
        "estimator: grpo, cosine_reward: {right: [1.0]}} #!",
        "nodes.advantage.cosine_reward.right",
        "invalid-value",
    ),
    (
        "estimator: grpo}",
        "estimator: grpo, cosine_reward: {wrong: []}} #!",
        "nodes.advantage.cosine_reward.wrong",
        "invalid-value",
    ),
    (
        "estimator: grpo}",
        "estimator: grpo, cosine_reward: {wrong: [0.1, 0.2, 0.3]}} #!",
        "nodes.advantage.cosine_reward.wrong",
        "invalid-value",
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "place", "fragment"), CASES, ids=[f"{place}: {message[:30]}" for _, _, place, message in CASES]
)
def test_errors_of_form_have_plain_messages(project, old, new, place, fragment):
    path = project.pipeline((old, new))
    with pytest.raises(PipelineError) as caught:
        load_pipeline(path)
    (problem,) = caught.value.problems
    marked = [number for number, line in enumerate(path.read_text().splitlines(), start=1) if "#!" in line]
    assert [problem.line] == (marked or [1])
    assert problem.place == place
    assert_code(problem, fragment)


def test_no_message_speaks_pydantic(project):
    edits = [(old, new) for old, new, _, _ in CASES]
    for edit in edits:
        with pytest.raises(PipelineError) as caught:
            load_pipeline(project.pipeline(edit))
        text = str(caught.value).lower()
        for jargon in ("pydantic", "http", "input should", "validation error", "extra inputs", "literal[", "_type"):
            assert jargon not in text


def test_a_misspelt_required_key_is_one_problem_not_two(project):
    problem = project.only_problem(project.pipeline(("prompts_per_step", "prompt_per_step")))
    assert problem.message == "unknown key `prompt_per_step`; did you mean `prompts_per_step`?"


def test_a_choice_of_two_types_is_judged_by_the_one_that_it_looks_like(project):
    places = {
        problem.place: problem.message
        for problem in project.problems(project.pipeline(("kind: characters, alphabet", "kind: chars, alphabt")))
    }
    assert places == {
        "model.tokenizer.kind": "'chars' is not one of the options; did you mean `characters`?",
        "model.tokenizer.alphabt": "unknown key `alphabt`; did you mean `alphabet`?",
    }
