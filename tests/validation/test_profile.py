import pytest

from dagrl.validation import check_file

RUN = "run: {steps: 10}"


@pytest.mark.parametrize(
    ("profile", "place", "fragment"),
    [
        ("steps: [2, 11]", "steps[1]", "unknown-step"),
        ("steps: [2], nodes: [updat]", "nodes[0]", "unknown-node"),
        (
            "steps: [2], nodes: [reward]",
            "nodes[0]",
            "unknown-node",
        ),
        (
            "steps: [2], tool: nsys, nodes: [reward]",
            "nodes[0]",
            "unknown-node",
        ),
    ],
)
def test_missing_parts_of_the_run_are_reported(project, profile, place, fragment):
    path = project.pipeline((RUN, f"{RUN}\nprofile: {{{profile}}} #!"))
    project.assert_problem(path, f"profile.{place}", fragment)


GPUS = ("train: {cpus_per_node: 2}", "train: {gpus_per_node: 2}")


def test_nsys_records_no_source_lines(project):
    path = project.pipeline(
        GPUS,
        ("rollout: {cpus_per_node: 1}", "rollout: {gpus_per_node: 1}"),
        (RUN, f"{RUN}\nprofile: {{steps: [2], tool: nsys, with_stack: true}} #!"),
    )
    project.assert_problem(path, "profile.with_stack", "option-without-effect")


def test_supported_settings_pass(project):
    profile = "{steps: [1, 10], nodes: [update, rollout], ranks: [0, 1], with_stack: true, with_memory: true}"
    check_file(project.folder / "p.yaml", [f"profile={profile}"])
