import json

import pytest
from model_folders import write_model, write_tensors, write_tokenizer

from dagrl.validation import check_file

INIT = (
    "  init: {model_type: qwen3, hidden_size: 64, num_attention_heads: 4, num_key_value_heads: 2, "
    "intermediate_size: 128}"
)
TOKENIZER = '  tokenizer: {kind: characters, alphabet: "0123456789+= "}'
CASES = {
    "nothing": (f"model:\n{INIT}\n{TOKENIZER}", f"model: #!\n{TOKENIZER}", "model", "missing-model"),
    "both": (INIT, f"{INIT}\n  path: somewhere #!", "model.path", "two-models"),
    "no folder": (
        INIT,
        "  path: ./Qwen/Qwen3-8B #!",
        "model.path",
        "invalid-model-folder",
        "set the path to Qwen/Qwen3-8B",
    ),
    "no folder of a model that is known": (
        INIT,
        "  path: /gone/Qwen9-8B #!",
        "model.path",
        "invalid-model-folder",
        "Qwen9-8B does not exist",
    ),
    "a file": (INIT, "  path: train.parquet #!", "model.path", "invalid-model-folder", "is a file"),
    "no model type": ("model_type: qwen3, ", "", "model.init.model_type", "missing-model-type"),
    "no tokenizer": (
        f"model:\n{INIT}\n{TOKENIZER}",
        f"model: #!\n{INIT}",
        "model",
        "missing-tokenizer",
    ),
    "size as text": (
        "hidden_size: 64",
        "hidden_size: '64'",
        "model.init.hidden_size",
        "invalid-config",
        "from 1 to 262144, got '64'",
    ),
    "heads": (
        "model_type: qwen3, hidden_size: 64",
        "model_type: qwen2, hidden_size: 66",
        "model.init",
        "invalid-config",
        "num_attention_heads 4",
        "hidden_size 66",
    ),
    "groups": (
        "num_key_value_heads: 2",
        "num_key_value_heads: 3",
        "model.init",
        "invalid-config",
        "num_key_value_heads 3",
        "num_attention_heads 4",
    ),
    "vocabulary": (
        "hidden_size: 64",
        "hidden_size: 64, vocab_size: 13",
        "model.init.vocab_size",
        "vocabulary-too-small",
        "13 rows",
    ),
    "vocabulary without the special tokens": (
        "hidden_size: 64",
        "hidden_size: 64, vocab_size: 15",
        "model.init.vocab_size",
        "vocabulary-too-small",
        "16 tokens",
    ),
    "no alphabet": (
        TOKENIZER,
        "  tokenizer: {kind: characters} #!",
        "model.tokenizer.alphabet",
        "missing-key",
    ),
    "doubled": (
        TOKENIZER,
        "  tokenizer: {kind: characters, alphabet: abcab} #!",
        "model.tokenizer.alphabet",
        "invalid-value",
        "'a', 'b'",
    ),
    "bytes with alphabet": (
        TOKENIZER,
        "  tokenizer: {kind: bytes, alphabet: ab} #!",
        "model.tokenizer.alphabet",
        "invalid-value",
        "bytes",
    ),
    "more experts than there are": (
        INIT,
        "  init: {model_type: qwen3_moe, num_experts: 4, num_experts_per_tok: 5} #!",
        "model.init",
        "invalid-config",
        "num_experts_per_tok 5",
    ),
    "a head of odd size": (
        INIT,
        "  init: {model_type: qwen3, head_dim: 15} #!",
        "model.init",
        "invalid-config",
        "head_dim 15",
    ),
    "a head's size as text": (
        INIT,
        '  init: {model_type: qwen3, head_dim: "16"} #!',
        "model.init.head_dim",
        "invalid-config",
        "from 1 to 16384, got '16'",
    ),
    "tokenizer nowhere": (TOKENIZER, "  tokenizer: tok #!", "model.tokenizer", "missing-tokenizer", "tok"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_errors_of_the_model_are_reported(project, case):
    old, new, place, code, *named = case
    path = project.pipeline((old, new))
    if "#!" in new:
        project.assert_problem(path, place, code, *named)
    else:
        problem = project.only_problem(path)
        assert (problem.line, problem.place, problem.code) == (3, place, code)
        assert all(word in problem.message for word in named)


def test_an_architecture_that_the_engine_does_not_have(project):
    path = project.pipeline(("model_type: qwen3", "model_type: gpt2"))
    problem = project.only_problem(path)
    assert (problem.place, problem.code) == ("model.init.model_type", "unknown-family")
    assert "'gpt2'; choose from: deepseek_v3, gemma2, " in problem.message


def test_latent_attention_has_heads_of_a_size_of_their_own(project):
    edit = "model_type: deepseek_v3, kv_lora_rank: 16, hidden_size: 66"
    check_file(project.pipeline(("model_type: qwen3, hidden_size: 64", edit)))


class TestFolder:
    @pytest.fixture
    def folder(self, project):
        folder = project.folder / "model"
        write_model(folder, model_type="qwen3", num_attention_heads=3, num_key_value_heads=3, hidden_size=6)
        write_tokenizer(folder, {"1": 0})
        return folder

    @pytest.fixture
    def path(self, project):
        return project.pipeline((f"{INIT}\n{TOKENIZER}", "  path: model #!"))

    def test_a_whole_one_passes(self, folder, path):
        check_file(path)

    def test_its_config_is_held_against_the_layout(self, project, folder, path):
        problem = project.only_problem(path, "engines.actor.parallel.tensor_model_parallel_size=2")
        assert "2 does not divide the model's num_attention_heads, 3" in problem.message

    @pytest.mark.parametrize(
        ("name", "code"),
        [
            ("config.json", "invalid-model-folder"),
            ("tokenizer.json", "missing-tokenizer"),
            ("model.safetensors", "invalid-weights"),
        ],
    )
    def test_a_missing_file(self, project, folder, path, name, code):
        (folder / name).unlink()
        project.assert_problem(path, "model.path", code, str(folder))

    def test_broken_files(self, project, folder, path):
        (folder / "config.json").write_text("{")
        (folder / "model.safetensors").write_bytes(b"")
        config, weights = project.problems(path)
        assert (config.code, weights.code) == ("invalid-model-folder", "invalid-weights")
        assert config.message.startswith(f"{folder / 'config.json'} ")
        assert weights.message.startswith(f"{folder / 'model.safetensors'} is empty")

    def test_weight_files_that_the_index_names_must_be_there(self, project, folder, path):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(b"x")
        project.assert_problem(path, "model.path", "invalid-weights", ".bin files")
        index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        write_tensors(folder / "two.safetensors", {"b": ("F32", (1,))})
        project.assert_problem(path, "model.path", "invalid-weights", "one.safetensors")

    @pytest.mark.parametrize(
        ("name", "content", "fragment"),
        [
            ("config.json", b"[" * 100_000, "config.json is not a JSON object; copy the file again"),
            ("config.json", b"{}", "config.json names no architecture (model_type); give the folder of a Hugging Face"),
            ("config.json", b'{"model_type": 3}', "config.json names no architecture (model_type)"),
            (
                "config.json",
                b'{"model_type": "qwen3", "hidden_size": "6"}',
                "has a wrong value of `hidden_size`: expected a whole n",
            ),
            (
                "config.json",
                b'{"model_type": "qwen3", "num_hidden_layers": -1}',
                "`num_hidden_layers`: expected a whole number from 1 to 10000, got -1",
            ),
            (
                "config.json",
                b'{"model_type": "qwen3", "rope_scaling": {"type": [1]}}',
                "expected text for `type`, got a list",
            ),
            ("model.safetensors", b"version https://git-lfs", "is no safetensors file"),
            (
                "model.safetensors",
                (5000).to_bytes(8, "little") + b"{" + b" " * 2000,
                "is no safetensors file",
            ),
            ("tokenizer.json", b"version https://git-lfs", "tokenizer.json is not a JSON object; copy the file again"),
            (
                "model.safetensors.index.json",
                b'{"weight_map": {"a": [1]}}',
                "does not say which file holds which weight",
            ),
            (
                "model.safetensors.index.json",
                b'{"weight_map": {"a": "config.json"}}',
                "config.json is no safetensors file",
            ),
        ],
    )
    def test_a_file_that_does_not_match_its_name_is_refused(self, project, folder, path, name, content, fragment):
        (folder / name).write_bytes(content)
        project.assert_problem(path, "model.path", fragment)

    def test_its_config_is_held_against_the_engine(self, project, folder, path):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": [1]}}))
        project.assert_problem(path, "model.path", "expected text for `type`, got a list")

    def test_tokenizer_of_its_own_folder(self, project, folder, path):
        empty = project.folder / "empty"
        empty.mkdir()
        problem = project.only_problem(path, f"model.tokenizer={empty}")
        assert problem.code == "missing-tokenizer"


@pytest.mark.parametrize(
    ("said", "field", "fragment"),
    [
        ("hidden_act: gelu", "hidden_act", "the megatron engine has no qwen3 with hidden_act 'gelu'; it takes 'silu'"),
        ("attention_bias: true", "attention_bias", "has no qwen3 with attention_bias true; it takes false"),
        ("use_sliding_window: true", "use_sliding_window", "it takes false"),
        (
            "rope_scaling: {type: yarn, factor: 2}",
            "rope_scaling",
            "no rope scaling of type 'yarn'; it knows default or llama3",
        ),
        ("rope_parameters: {rope_type: x}", "rope_parameters", "no rope scaling of type 'x'"),
        ("rms_norm_eps: -1.0", "rms_norm_eps", "expected a number above 0, got -1.0"),
        ("rope_theta: 0.0", "rope_theta", "expected a number above 0, got 0.0"),
    ],
)
def test_an_unsupported_architecture_is_reported_before_the_engine_starts(project, said, field, fragment):
    path = project.pipeline(("intermediate_size: 128", f"intermediate_size: 128, {said}"), (TOKENIZER, TOKENIZER))
    problem = project.only_problem(path)
    assert problem.place == f"model.init.{field}"
    assert fragment in problem.message


def test_usual_hugging_face_folders_pass(project):
    usual = "hidden_act: silu, attention_bias: false, use_sliding_window: false, rope_scaling: null, rms_norm_eps: 1e-6"
    check_file(project.pipeline(("intermediate_size: 128", f"intermediate_size: 128, {usual}")))
