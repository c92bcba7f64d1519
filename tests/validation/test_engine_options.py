import json

import pytest

from dagrl.backends.megatron import options
from dagrl.validation import check_file

ACTOR = "    group: train\n"


@pytest.mark.parametrize("head", ["value", "reward"])
def test_nodes_and_generators_need_a_language_model(project, head):
    path = project.pipeline((ACTOR, f"{ACTOR}    head: {head}\n"))
    problems = {problem.place: problem.message for problem in project.problems(path)}
    assert list(problems) == ["engines.generator.weights_from", "nodes.ref.engine", "nodes.update.engine"]
    assert problems["nodes.ref.engine"] == (
        f"`reference` has a {head} head, and op logprob needs the language model's; name an engine with `head: lm`"
    )


def test_an_engine_with_another_head_that_no_node_uses_is_only_unused(project):
    path = project.pipeline(("  reference:", "  critic: {backend: megatron, group: train, head: value}\n  reference:"))
    assert [warning.place for warning in check_file(path).warnings] == ["engines.critic"]


def test_chunks_of_logits_need_logits(project):
    critic = (
        "  critic: {backend: megatron, group: train, head: value, fused_linear_cross_entropy: true} #!\n  reference:"
    )
    path = project.pipeline(("  reference:", critic))
    project.assert_problem(path, "engines.critic.fused_linear_cross_entropy", "a value head has no logits")


def test_a_guest_has_its_owners_head(project):
    path = project.pipeline(("frozen_copy_of: actor}", "frozen_copy_of: actor, head: value} #!"))
    project.assert_problem(path, "engines.reference.head", "copy-differs")


class TestModelsOfMegatronBridge:
    """Families that megatron-bridge builds, or whose weights it converts."""

    @staticmethod
    def pipeline(project, model_type, engine=""):
        fields = {
            "gemma2": "query_pre_attn_scalar: 16",
            "gpt_oss": "num_local_experts: 4, num_experts_per_tok: 2",
            "mistral": "sliding_window: 4",
        }
        return project.pipeline(
            ("{model_type: qwen3,", f"{{model_type: {model_type}, {fields[model_type]},"), (ACTOR, f"{ACTOR}{engine}")
        )

    def test_no_key_chooses_it(self, project):
        check_file(self.pipeline(project, "mistral"))
        check_file(self.pipeline(project, "gemma2"))

    def test_it_may_not_be_installed(self, project, monkeypatch):
        monkeypatch.setattr(options, "has_bridge", lambda: False)
        message = "megatron-bridge builds models of type mistral, and is not installed; install it with `uv pip"
        problem = project.only_problem(self.pipeline(project, "mistral"))
        assert problem.place == "engines.actor"
        assert problem.message.startswith(message)
        check_file(project.pipeline())

    def test_capped_logits_are_not_computed_in_chunks(self, project):
        path = self.pipeline(project, "gemma2", "    fused_linear_cross_entropy: true #!\n")
        place = "engines.actor.fused_linear_cross_entropy"
        project.assert_problem(path, place, "the logits of gemma2 are capped, which is not done in chunks; remove it")

    def test_adapters_come_before_norms_of_outputs(self, project):
        path = self.pipeline(project, "gemma2", "    lora: {} #!\n")
        project.assert_problem(path, "engines.actor.lora.target_modules", "a norm follows on linear_proj in gemma2")
        check_file(self.pipeline(project, "gemma2", "    lora: {target_modules: [linear_qkv, linear_fc1]}\n"))
        check_file(self.pipeline(project, "mistral", "    lora: {}\n"))

    def test_weights_that_it_converts_have_neither_adapters_nor_heads(self, project):
        path = self.pipeline(project, "gpt_oss", "    lora: {} #!\n")
        project.assert_problem(path, "engines.actor.lora", "models of type gpt_oss have no adapters here")
        path = self.pipeline(project, "gpt_oss")
        critic = "  critic: {backend: megatron, group: train, head: value} #!\n  reference:"
        path.write_text(path.read_text().replace("  reference:", critic, 1))
        project.assert_problem(path, "engines.critic.head", "models of type gpt_oss have no value head here")


class TestStart:
    @pytest.fixture
    def folder(self, project):
        folder = project.folder / "start"
        folder.mkdir()
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "common_backend": "torch"}))
        (folder / ".metadata").write_bytes(b"x")
        (folder / "__0_0.distcp").write_bytes(b"x")
        return folder

    @pytest.fixture
    def path(self, project):
        return project.pipeline((ACTOR, f"{ACTOR}    dist_checkpointing_path: start #!\n"))

    def assert_told(self, project, path, fragment):
        project.assert_problem(path, "engines.actor.dist_checkpointing_path", fragment)

    def test_a_whole_one_passes_wherever_the_run_is_started(self, folder, path):
        checked = check_file(path)
        assert checked.loaded.pipeline.engines["actor"].dist_checkpointing_path == folder

    def test_a_missing_one(self, project, path):
        self.assert_told(project, path, "start does not exist; give a folder in Megatron's distributed format")

    def test_a_file(self, project, path):
        project.write("start", "")
        self.assert_told(project, path, "start is a file, not a folder; give")

    def test_another_folder(self, project, folder, path):
        (folder / "metadata.json").unlink()
        self.assert_told(project, path, "has no metadata.json, so it is no checkpoint in Megatron's distributed format")

    def test_a_torn_one(self, project, folder, path):
        (folder / ".metadata").unlink()
        self.assert_told(project, path, "has no .metadata, which says where each tensor is stored; copy it again")

    @pytest.mark.parametrize(
        ("content", "kind"),
        [
            ('{"sharded_backend": "zarr"}', "zarr"),
            ("{", "of no readable metadata.json"),
            ("[]", "of no readable"),
            ('{"sharded_backend": ["torch_dist"]}', "of no readable"),
            ("[" * 100_000, "of no readable"),
        ],
    )
    def test_another_format(self, project, folder, path, content, kind):
        (folder / "metadata.json").write_text(content)
        self.assert_told(project, path, f"is in the format {kind}")

    @pytest.mark.parametrize("left", [None, b""])
    def test_one_without_tensors(self, project, folder, path, left):
        (folder / "__0_0.distcp").unlink()
        if left is not None:
            (folder / "__0_0.distcp").write_bytes(left)
        self.assert_told(project, path, "has no *.distcp files with tensors; copy it again")

    @pytest.mark.parametrize("newest", ["", "9" * 5000, "²", "../..", "a\0b"])
    def test_the_newest_is_named_by_a_number_or_as_release(self, project, folder, path, newest):
        (folder / "latest_checkpointed_iteration.txt").write_text(newest)
        self.assert_told(project, path, "should say an iteration's number or `release`; correct it")

    @pytest.mark.parametrize(("newest", "name"), [("20", "iter_0000020"), ("release\n", "release")])
    def test_the_parent_folder_means_its_newest_run(self, project, folder, path, newest, name):
        (project.folder / "all").mkdir()
        folder.rename(project.folder / "all" / name)
        (project.folder / "all").rename(folder)
        (folder / "latest_checkpointed_iteration.txt").write_text(newest)
        check_file(path)
        (folder / name / "metadata.json").unlink()
        self.assert_told(project, path, f"start/{name} has no metadata.json")
        (folder / "latest_checkpointed_iteration.txt").write_text("30")
        self.assert_told(project, path, "start/iter_0000030 does not exist")
