import pytest

from dagrl.validation import check_file

RUN = "run: {steps: 10}"


@pytest.mark.parametrize(
    ("profile", "place", "fragment"),
    [
        ("steps: [2, 11]", "steps[1]", "the run ends with step 10 (run.steps), before step 11; name a step up to 10"),
        ("steps: [2], nodes: [updat]", "nodes[0]", "there is no node `updat`; did you mean `update`?"),
        (
            "steps: [2], nodes: [reward]",
            "nodes[0]",
            "`reward` runs on the host, and only nodes on engines are profiled",
        ),
        (
            "steps: [2], ranks: [0, 2]",
            "ranks[1]",
            "no engine has a rank 2, for they count from 0 and the largest has 2",
        ),
        (
            "steps: [2], tool: nsys",
            "tool",
            "nsys looks at GPUs, and engine generator is on CPU slots; say tool: torch",
        ),
        (
            "steps: [2], tool: nsys, nodes: [reward]",
            "nodes[0]",
            "`reward` runs on the host, and only nodes on engines are profiled",
        ),
    ],
)
def test_what_the_run_does_not_have_is_told(project, profile, place, fragment):
    path = project.pipeline((RUN, f"{RUN}\nprofile: {{{profile}}} #!"))
    project.assert_problem(path, f"profile.{place}", fragment)


GPUS = ("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}")


def test_nsys_records_no_source_lines(project):
    path = project.pipeline(
        GPUS,
        ("rollout: {cpus_per_node: 1}", "rollout: {gpus_per_node: 1}"),
        (RUN, f"{RUN}\nprofile: {{steps: [2], tool: nsys, with_stack: true}} #!"),
    )
    project.assert_problem(path, "profile.with_stack", "only the torch profiler records that; take it out")


@pytest.mark.parametrize("group", ["train", "rollout"])
def test_nsys_needs_gpus_of_the_nodes_that_are_profiled_only(project, group):
    """`ref` runs on the ranks of the engine that it is a frozen copy of: on GPUs here with `update`, or not."""
    edit = GPUS if group == "train" else ("rollout: {cpus_per_node: 1}", "rollout: {gpus_per_node: 1}")
    profile = "{steps: [2], tool: nsys, nodes: [ref]}"
    path = project.pipeline(edit, (RUN, f"{RUN}\nprofile: {profile} #!"))
    if group == "train":
        check_file(path)
        return
    project.assert_problem(path, "profile.tool", "engine reference is on CPU slots; say tool: torch")
    check_file(path, ["profile.nodes=[rollout]"])


def test_what_it_has_passes(project):
    profile = "{steps: [1, 10], nodes: [update, rollout], ranks: [0, 1], with_stack: true, with_memory: true}"
    check_file(project.folder / "p.yaml", [f"profile={profile}"])
