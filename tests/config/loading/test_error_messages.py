import pytest
from project import told

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline

CASES = [
    # what stands in the file, what is written instead, where the problem is, what it says
    ("name: tiny", "name: tiny\nnam: x #!", "nam", "unknown key `nam`; did you mean `name`?"),
    ("steps: 10}", "steps: 10, stepz: 3} #!", "run.stepz", "unknown key `stepz`; did you mean `steps`?"),
    ("  train: {cpus_per_node: 2}", "  train: {cpu_per_node: 2} #!", "groups.train.cpu_per_node", "`cpus_per_node`?"),
    ("frozen_copy_of: actor}", "share: actor} #!", "engines.reference.share", "did you mean `frozen_copy_of`?"),
    ("kl_coef: 0.01}}", "kl_coeff: 0.01}} #!", "nodes.update.loss.kl_coeff", "did you mean `kl_coef`?"),
    ("run: {steps: 10}", "run: {steps: 10.5} #!", "run.steps", "expected a whole number, got 10.5"),
    ("run: {steps: 10}", 'run: {steps: "10"} #!', "run.steps", "expected a whole number, got '10'"),
    ("run: {steps: 10}", "run: {steps: true} #!", "run.steps", "expected a whole number, got true"),
    ("run: {steps: 10}", "run: {steps: [10]} #!", "run.steps", "expected a whole number, got a list"),
    ("run: {steps: 10}", "run: {steps: -1} #!", "run.steps", "must be at least 1, got -1; choose"),
    ("run: {steps: 10}", "run: {} #!", "run.steps", "the key is missing; add `steps:` (steps to train)"),
    ("run: {steps: 10}", "run: 10 #!", "run", "expected a mapping, got 10; write `key: value` lines beneath it"),
    ("run: {steps: 10}", "", "run", "the key is missing; add `run:`"),
    (
        "groups:\n  train: {cpus_per_node: 2}\n  rollout: {cpus_per_node: 1}\n",
        "",
        "groups",
        "add `groups:` (GPUs or CPU slots",
    ),
    ("name: tiny", "name: 3 #!", "name", "expected text, got 3; write a word, or text in quotes"),
    ("name: tiny", "name: a/b #!", "name", "'a/b' is not a name that can stand here; use letters, digits"),
    (
        "run: {steps: 10}",
        "run: {steps: 10, start_timeout_s: .inf} #!",
        "run.start_timeout_s",
        "a finite number, got inf",
    ),
    ("run: {steps: 10}", "run: {steps: 10, node_timeout_s: 1e9} #!", "run.node_timeout_s", "must be at most 1e+07"),
    (
        "run: {steps: 10}",
        "run: {steps: 10, host_workers: 1000000} #!",
        "run.host_workers",
        "must be at most 4,096, got 1000000",
    ),
    ("fn: exact}", "fn: exact, concurrency: 5000} #!", "nodes.reward.concurrency", "must be at most 4,096, got 5000"),
    ("{cpus_per_node: 2}", "{cpus_per_node: 2000} #!", "groups.train.cpus_per_node", "must be at most 1,024, got 2000"),
    ("{cpus_per_node: 2}", "{gpus_per_node: 2000} #!", "groups.train.gpus_per_node", "must be at most 1,024, got 2000"),
    ("{cpus_per_node: 2}", "{cpus_per_node: 2, nodes: 20000} #!", "groups.train.nodes", "must be at most 16,384, got"),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8}, tool_concurrency: 5000} #!",
        "nodes.rollout.tool_concurrency",
        "must be at most 4,096, got 5000",
    ),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8}, max_parallel_calls: 5000} #!",
        "nodes.rollout.max_parallel_calls",
        "must be at most 4,096, got 5000",
    ),
    (
        "{op: reward, fn: exact}",
        '{op: judge, endpoint: "http://a/v1", model: m, prompt: "?", concurrency: 5000} #!',
        "nodes.reward.concurrency",
        "must be at most 4,096, got 5000",
    ),
    ("name: tiny", f"name: {'x' * 201} #!", "name", "`-`, at most 200 of them, and begin"),
    ("train: train.parquet", "train: 3 #!", "data.train", "expected text, got 3; write a word"),
    ("prompts_per_step: 8", "prompts_per_step: 8\n  shuffle: 1 #!", "data.shuffle", "expected true or false, got 1"),
    (
        "op: rollout, engine: generator, n: 4, sampling: {max_new_tokens: 8}}",
        "op: rollot} #!",
        "nodes.rollout.op",
        "did you mean `rollout`?",
    ),
    (
        "estimator: grpo}",
        "estimator: a2c} #!",
        "nodes.advantage.estimator",
        "'a2c' is not known here (your own is written `module:function`); choose from: grpo",
    ),
    ("  actor:\n    backend: megatron", "  actor:\n    backend: megatro #!", "engines.actor.backend", "`megatron`?"),
    ("{op: reward, fn: exact}", "{fn: exact} #!", "nodes.reward.op", "the key is missing; add `op:`"),
    ("{op: reward, fn: exact}", "exact #!", "nodes.reward", "expected a mapping, got 'exact'"),
    ("fn: exact}", "fn: exact, on_error: go} #!", "nodes.reward.on_error", "expected `stop` or a number, got 'go'"),
    (
        "fn: exact}",
        "fn: exact, on_error: .nan} #!",
        "nodes.reward.on_error",
        "expected `stop` or a finite number, got nan",
    ),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8, temperature: .inf}} #!",
        "nodes.rollout.sampling.temperature",
        "expected a finite number, got inf; write it in digits",
    ),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8, stop_token_ids: [-1]}} #!",
        "nodes.rollout.sampling.stop_token_ids[0]",
        "must be at least 0, got -1",
    ),
    (
        "run: {steps: 10}",
        "run: {steps: 10, seed: 9223372036854775808} #!",
        "run.seed",
        "must be less than 9,223,372,036,854,775,808, got",
    ),
    ("write: ref_logprob}", "write: 3} #!", "nodes.ref.write", "expected text or a mapping, got 3"),
    (
        "  rollout: {cpus_per_node: 1}",
        "  Roll-Out: {cpus_per_node: 1} #!",
        "groups.Roll-Out",
        "begin with a lower-case",
    ),
    ("max_new_tokens: 8}}", "max_new_tokens: 8, top_p: 1.5}} #!", "nodes.rollout.sampling.top_p", "must be at most 1"),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8, n: 4}} #!",
        "nodes.rollout.sampling.n",
        "is said by the node; write it",
    ),
    (
        "max_new_tokens: 8}}",
        "max_new_tokens: 8, repetition_penalty: 1.1}} #!",
        "nodes.rollout.sampling.repetition_penalty",
        "changes the logits, and log-probs would be those of another policy; take it out",
    ),
    ("max_new_tokens: 8}}", "max_new_tokens: 8, stop: [x]}} #!", "nodes.rollout.sampling.stop", "say `stop_token_ids`"),
    ("kl_coef: 0.01}}", "clip_ratio: 1}} #!", "nodes.update.loss.clip_ratio", "must be less than 1, got 1"),
    ("run: {steps: 10}", "run: {steps: 10}\nprofile: {steps: [0]} #!", "profile.steps[0]", "must be at least 1, got 0"),
    ("run: {steps: 10}", "run: {steps: 10}\nprofile: {steps: []} #!", "profile.steps", "is empty; it needs at least"),
    (
        "run: {steps: 10}",
        "run: {steps: 10}\nprofile: {steps: [1], nodes: []} #!",
        "profile.nodes",
        "is empty; it needs at least one entry",
    ),
    (
        "run: {steps: 10}",
        "run: {steps: 10}\nprofile: {steps: [1], ranks: []} #!",
        "profile.ranks",
        "is empty; it needs at least one entry",
    ),
    ("run: {steps: 10}", "run: {steps: 10}\ntrack: console #!", "track", "expected a list, got 'console'"),
    ("run: {steps: 10}", "run: {steps: 10}\ntrack: [console, wanbd] #!", "track[1]", "did you mean `wandb`?"),
    ("run: {steps: 10}", "run: {steps: 10}\ntrack: [console, null] #!", "track[1]", "null is not known here; choose"),
    ("prompts_per_step: 8", "prompts_per_step: 9999999999 #!", "data.prompts_per_step", "at most 2,147,483,647, got"),
    (
        "estimator: grpo}",
        "estimator: grpo, cosine_reward: {right: [1.0]}} #!",
        "nodes.advantage.cosine_reward.right",
        "expected 2 entries, got 1; write 2",
    ),
    (
        "estimator: grpo}",
        "estimator: grpo, cosine_reward: {wrong: []}} #!",
        "nodes.advantage.cosine_reward.wrong",
        "expected 2 entries, got 0; write 2",
    ),
    (
        "estimator: grpo}",
        "estimator: grpo, cosine_reward: {wrong: [0.1, 0.2, 0.3]}} #!",
        "nodes.advantage.cosine_reward.wrong",
        "expected 2 entries, got 3; write 2",
    ),
]


@pytest.mark.parametrize(
    ("old", "new", "place", "fragment"), CASES, ids=[f"{place}: {message[:30]}" for _, _, place, message in CASES]
)
def test_mistakes_of_form_are_told_in_plain_words(project, old, new, place, fragment):
    path = project.pipeline((old, new))
    with pytest.raises(PipelineError) as caught:
        load_pipeline(path)
    (problem,) = caught.value.problems
    marked = [number for number, line in enumerate(path.read_text().splitlines(), start=1) if "#!" in line]
    assert [problem.line] == (marked or [1])
    assert problem.place == place
    told(problem, fragment)


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
        "model.tokenizer.kind": "'chars' is not known here; did you mean `characters`?",
        "model.tokenizer.alphabt": "unknown key `alphabt`; did you mean `alphabet`?",
    }
