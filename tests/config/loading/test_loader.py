from pathlib import Path

import pytest
from pydantic import ValidationError

from dagrl.config.errors import PipelineError
from dagrl.config.loading.loader import load_pipeline


def problems(path, *overrides):
    with pytest.raises(PipelineError) as caught:
        load_pipeline(path, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_right_file_becomes_a_frozen_pipeline(project):
    loaded = load_pipeline(project.folder / "p.yaml")
    assert loaded.pipeline.engines["actor"].optimizer == {"lr": 1e-3}
    assert loaded.pipeline.nodes["rollout"].n == 4
    assert loaded.folder == project.folder
    with pytest.raises(ValidationError):
        loaded.pipeline.name = "other"


def test_resolved_yaml_loads_as_the_same_pipeline_from_another_folder(project, tmp_path_factory):
    loaded = load_pipeline(project.folder / "p.yaml", ["run.steps=3"])
    copy = tmp_path_factory.mktemp("run") / "pipeline.yaml"
    copy.write_text(loaded.to_yaml())
    assert load_pipeline(copy).pipeline == loaded.pipeline


class TestExtends:
    def test_only_differences_are_printed(self, project):
        child = project.write(
            "child.yaml", "extends: p\nname: child\nrun: {steps: 20}\nengines: {actor: {optimizer: {clip_grad: 0.5}}}\n"
        )
        pipeline = load_pipeline(child).pipeline
        assert (pipeline.name, pipeline.run.steps) == ("child", 20)
        assert pipeline.engines["actor"].optimizer == {"lr": 1e-3, "clip_grad": 0.5}
        assert list(pipeline.nodes) == ["rollout", "reward", "ref", "advantage", "update"]

    def test_lists_are_replaced_and_null_takes_away(self, project):
        project.write("mid.yaml", "extends: p.yaml\ntrack: [console, wandb]\n")
        child = project.write(
            "child.yaml", "extends: mid\ntrack: [tensorboard]\nnodes: {ref: null, update: {loss: null}}\n"
        )
        pipeline = load_pipeline(child).pipeline
        assert pipeline.track == ("tensorboard",)
        assert "ref" not in pipeline.nodes
        assert pipeline.nodes["update"].loss.kl_coef == 0

    def test_null_is_a_value_of_a_hugging_face_config(self, project):
        grown = project.write(
            "grown.yaml", "extends: p\nmodel: {init: {hidden_size: null, q_lora_rank: null, rope_scaling: null}}\n"
        )
        own = "engines.generator.model={init: {model_type: llama, q_lora_rank: null}}"
        loaded = load_pipeline(grown, ["model.init.rope_scaling=null", "model.init.head_dim=null", own])
        assert loaded.pipeline.engines["generator"].model.init == {"model_type": "llama", "q_lora_rank": None}
        init = loaded.pipeline.model.init
        assert init.keys() == {
            *("model_type", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
            *("q_lora_rank", "head_dim"),
        }
        assert init["q_lora_rank"] is None and init["head_dim"] is None
        copy = project.write("resolved.yaml", loaded.to_yaml())
        assert load_pipeline(copy).pipeline == loaded.pipeline

    def test_templates_are_found_beside_the_file(self, project, base):
        project.write("dag_templates/mine.yaml", base)
        child = project.write("c.yaml", "extends: mine\nname: c\n")
        assert load_pipeline(child).pipeline.name == "c"

    def test_a_file_may_extend_the_template_it_is_named_after(self, project, base):
        project.write("dag_templates/grpo.yaml", base)
        child = project.write("grpo.yaml", "extends: grpo\nname: mine\n")
        assert load_pipeline(child).pipeline.name == "mine"

    def test_problems_name_the_file_of_the_value(self, project):
        parent = project.pipeline(("max_prompt_tokens: 16", "max_prompt_tokens: many"))
        child = project.write("child.yaml", "extends: p\nrun:\n  steps: few\n")
        assert problems(child) == [
            f"{child}:3: run.steps: got 'few'; it must be an integer",
            f"{parent}:8: data.max_prompt_tokens: got 'many'; it must be an integer",
        ]

    def test_paths_are_relative_to_the_file_that_says_them(self, project):
        child = project.write("sub/child.yaml", "extends: ../p.yaml\ndata: {val: val.parquet}\n")
        data = load_pipeline(child).pipeline.data
        assert data.train == project.folder / "train.parquet"
        assert data.val == project.folder / "sub/val.parquet"

    @pytest.mark.parametrize(
        ("parent", "fragment"),
        [
            ("grp0", "there is no template `grp0`; did you mean `grpo`?"),
            ("./grpo.yaml", "there is no file "),
            ("{a: b}", "expected a template's name or a file's path"),
            ("[]", "expected a template's name or a file's path"),
        ],
    )
    def test_a_parent_that_is_not_there(self, project, base, parent, fragment):
        project.write("dag_templates/grpo.yaml", base)
        child = project.write("child.yaml", f"name: x\nextends: {parent}\n")
        (told,) = problems(child)  # What may have been inherited is not called missing.
        assert told.startswith(f"{child}:2: extends: {fragment}")

    def test_certain_errors_are_reported_without_the_parent(self, project):
        child = project.write("child.yaml", "extends: gone\nnamed: x\nrun: {steps: few}\n")
        assert [line.split(": ")[1] for line in problems(child)] == ["extends", "named", "run.steps"]

    def test_a_circle_is_named(self, project):
        one = project.write("one.yaml", "extends: two\n")
        two = project.write("two.yaml", "extends: one\n")
        assert problems(one) == [
            f"{two}:1: extends: the files extend each other in a circle ({one} -> {two} -> {one}); remove one `extends`"
        ]

    def test_errors_in_all_files_of_the_chain_are_reported(self, project, base):
        parent = project.write("p.yaml", base + "run: {steps: 11}\n")
        child = project.write("child.yaml", "extends: p\nname: a\nname: b\n")
        assert [line.split(": ")[0] for line in problems(child)] == [f"{child}:3", f"{parent}:26"]


class TestOverrides:
    def test_values_are_yaml(self, project):
        path = project.folder / "p.yaml"
        overrides = [
            "engines.actor.optimizer.lr=3e-6",
            "engines.actor.parallel.tensor_model_parallel_size=2",
            "track=[console, wandb]",
            "nodes.ref=null",
            "data.order=file",
            "name=007",
        ]
        with pytest.raises(PipelineError, match="override name=007: got 7; it must be text"):
            load_pipeline(path, overrides)
        pipeline = load_pipeline(path, overrides[:-1]).pipeline
        assert pipeline.engines["actor"].optimizer["lr"] == 3e-6
        assert pipeline.engines["actor"].parallel.tensor_model_parallel_size == 2
        assert pipeline.track == ("console", "wandb")
        assert "ref" not in pipeline.nodes
        assert pipeline.data.order == "file"

    def test_paths_are_relative_to_the_working_directory(self, project, monkeypatch):
        elsewhere = project.folder / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        data = load_pipeline("../p.yaml", ["data.val=val.parquet"]).pipeline.data
        assert data.val == elsewhere / "val.parquet"
        assert data.train == project.folder / "train.parquet"

    def test_home_is_expanded(self, project):
        pipeline = load_pipeline(project.folder / "p.yaml", ["data.val=~/v.parquet"]).pipeline
        assert pipeline.data.val == (Path.home() / "v.parquet").resolve()

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("run.stepz=3", "unknown key `stepz`; did you mean `steps`?"),
            ("rum.steps=3", "unknown key `rum`; did you mean `run`?"),
            ("run.steps=abc", "got 'abc'; it must be an integer"),
            ("run.steps=-1", "got -1; it must be greater than or equal to 0"),
            ("engines.acto.group=train", "there is no engine `acto`; did you mean `actor`?"),
            ("run.steps", "is not KEY=VALUE; write for example `run.steps=10`"),
            ("run..steps=1", "is not KEY=VALUE; write for example `run.steps=10`"),
            ("run.steps=", "there is no value; write `KEY=null` to remove the key"),
            ("run.steps=*", "the value is not valid YAML; put it in quotes if it is text"),
            (
                "groups.train={nodes:",
                "the brackets are not closed; quote the whole override, because the shell splits it at spaces",
            ),
            ("extends=grpo", "only a file can extend others; write a file that begins with `extends: NAME`"),
            ('data.train="a\\0b"', "is a path that contains a NUL character; give another"),
            (f"data.train={'a' * 256}", "is a path that is longer than file systems take; give another"),
            (
                f"engines.actor.environment={'a' * 256}/",
                "is a path that is longer than file systems take; give another",
            ),
            ("run.steps.more=1", "`run.steps` is not a section; override it as a whole"),
            ("run.async_save=no", "a bare `no` is ambiguous; write `false`, or quote the word"),
        ],
    )
    def test_mistakes_name_the_override(self, project, override, message):
        lines = problems(project.folder / "p.yaml", "run.seed=2", override)
        assert lines == [f"command line:2: override {override}: {message}"]

    def test_a_mistake_within_a_section_that_is_overridden_names_its_key(self, project):
        override = "run={steps: 3, seeed: 1}"
        message = "run.seeed: unknown key `seeed`; did you mean `seed`?"
        assert problems(project.folder / "p.yaml", override) == [f"command line:1: override {override}: {message}"]

    def test_a_node_that_was_taken_away_is_not_proposed(self, project):
        child = project.write("child.yaml", "extends: p\nnodes: {ref: null}\n")
        (told,) = [line for line in problems(child, "nodes.ref.engine=actor") if "override" in line]
        assert "there is no node `ref`; choose from: rollout, reward, advantage, update" in told
