import pytest
from model_folders import write_model, write_tokenizer

from dagrl.validation import check_file

TP, PP, VPP = (f"{which}_model_parallel_size" for which in ("tensor", "pipeline", "virtual_pipeline"))
EP, ETP, CP = "expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size"
DENSE = "num_hidden_layers: 12"
DEEPSEEK = {"model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4}
LINEAR = (
    "num_hidden_layers: 12, linear_num_key_heads: 2, linear_num_value_heads: 4, linear_key_head_dim: 8, "
    "linear_value_head_dim: 8"
)
MIXTURE = "num_hidden_layers: 12, num_experts: 6, num_experts_per_tok: 2, moe_intermediate_size: 12"


@pytest.fixture
def laid_out(project):
    """``laid_out(parallel, model, gpus=8, further="")``: the pipeline with the actor in that layout on so many GPUs."""

    def write(parallel: str, model: str = DENSE, gpus: int = 8, further: str = ""):
        family = "qwen3_moe" if "experts" in model else "qwen3_5_text" if "linear" in model else "qwen3"
        return project.pipeline(
            ("model_type: qwen3, hidden_size: 64", f"model_type: {family}, hidden_size: 64, {model}"),
            ("num_attention_heads: 4, num_key_value_heads: 2", "num_attention_heads: 8, num_key_value_heads: 4"),
            ("train: {cpus_per_node: 2}", f"train: {{gpus_per_node: {gpus}}}"),
            ("    group: train\n", f"    group: train\n    parallel: {{{parallel}}} #!\n{further}"),
        )

    return write


CASES = {
    "matrices": (
        f"{TP}: 3",
        DENSE,
        TP,
        "3 does not divide the model's num_attention_heads, 8, nor its intermediate_size, 128, nor its "
        "num_key_value_heads, 4; choose from: 1, 2, 4, 8",
    ),
    "one model": (
        f"{TP}: 2, {PP}: 3",
        DENSE,
        TP,
        "one model takes 6 ranks, which do not divide the 8 of group `train`",
    ),
    "context": (f"{CP}: 3", DENSE, CP, "one model takes 3 ranks, which do not divide the 8"),
    "sequence parallel alone": ("sequence_parallel: true", DENSE, "sequence_parallel", f"set {TP} above 1, or this to"),
    "experts": (f"{EP}: 3", MIXTURE, EP, "one set of experts takes 3 ranks, which do not divide the 8 of a pipeline"),
    "experts on a stage": (
        f"{PP}: 4, {EP}: 2, {ETP}: 2",
        MIXTURE,
        EP,
        "one set of experts takes 4 ranks, which do not divide the 2 of a pipeline stage",
    ),
    "gated delta nets": (
        f"{CP}: 4",
        LINEAR,
        CP,
        f"4 ranks do not divide the model's linear_num_key_heads, 2; choose {TP} and {CP} whose product divides it",
    ),
    "gated delta nets without sequence parallel": (
        f"{TP}: 2",
        LINEAR,
        "sequence_parallel",
        "Megatron shares a model with gated delta nets out over tensor-parallel ranks only if this is true; set it",
    ),
    "no experts": (f"{EP}: 2", DENSE, EP, "the model has no experts to share; leave it at 1"),
    "no experts to split": (f"{ETP}: 2", DENSE, ETP, "the model has no experts to share; leave it at 1"),
    "number of experts": (f"{EP}: 4", MIXTURE, EP, "4 does not divide the model's num_experts, 6"),
    "width of experts": (f"{ETP}: 8", MIXTURE, ETP, "8 does not divide the model's moe_intermediate_size, 12"),
    "mixture without sequence parallel": (
        f"{TP}: 2",
        MIXTURE,
        "sequence_parallel",
        "Megatron shares a model with experts out over tensor-parallel ranks only if this is true; set it to true",
    ),
    "layers": (
        f"{PP}: 8",
        DENSE,
        PP,
        "8 stages do not divide the model's num_hidden_layers, 12; choose a divisor, or share them out with "
        "`transformer: {num_layers_in_first_pipeline_stage: ...}`",
    ),
    "layers of chunks": (
        f"{PP}: 2, {VPP}: 4",
        DENSE,
        VPP,
        "2 stages of 4 chunks do not divide the model's num_hidden_layers, 12; choose a divisor of 6",
    ),
    "chunks of one stage": (f"{VPP}: 2", DENSE, VPP, f"set {PP} above 1, or remove this"),
    "one chunk": (f"{PP}: 2, {VPP}: 1", DENSE, VPP, "remove it, or choose 2 or more"),
}


@pytest.mark.parametrize(("parallel", "model", "key", "fragment"), CASES.values(), ids=CASES.keys())
def test_layouts_that_do_not_fit_are_reported(project, laid_out, parallel, model, key, fragment):
    project.assert_problem(laid_out(parallel, model), f"engines.actor.parallel.{key}", fragment)


@pytest.mark.parametrize(
    ("parallel", "model"),
    [
        (f"{TP}: 2, sequence_parallel: true", DENSE),
        (f"{TP}: 2, {PP}: 2, {CP}: 2", DENSE),
        # Twice as many ranks as key heads.
        (f"{TP}: 8", DENSE),
        (f"{PP}: 2, {VPP}: 3", DENSE),
        (f"{CP}: 2, {EP}: 2", MIXTURE),
        (f"{TP}: 2, sequence_parallel: true, {EP}: 2", MIXTURE),
        (f"{EP}: 2, {ETP}: 4", MIXTURE),
        # What the config does not say is the engine's to find out.
        (f"{PP}: 8", "rms_norm_eps: 1e-6"),
        (f"{EP}: 4", "num_hidden_layers: 12, moe_intermediate_size: 12, norm_topk_prob: true"),
    ],
)
def test_layouts_that_fit_pass(project, laid_out, parallel, model):
    path = laid_out(parallel, model)
    if EP in parallel:
        path.write_text(path.read_text().replace("model_type: qwen3,", "model_type: qwen3_moe,"))
    check_file(path)


def test_layers_may_be_shared_out_unevenly(laid_out):
    uneven = "    transformer: {num_layers_in_first_pipeline_stage: 5}\n"
    check_file(laid_out(f"{PP}: 8", further=uneven))


def test_rounds_of_the_interleaved_schedule_fill_every_stage(project, laid_out):
    path = laid_out(f"{PP}: 4, {VPP}: 3", further="    transformer: {microbatch_group_size_per_vp_stage: 2}\n")
    problem = project.only_problem(path)
    assert problem.place == "engines.actor.transformer.microbatch_group_size_per_vp_stage"
    assert "choose 4 or more" in problem.message


@pytest.mark.parametrize("machines", ["{nodes: 2, gpus_per_node: 4}", "{nodes: 4, gpus_per_node: 2}"])
def test_ranks_that_share_matrices_stay_on_one_machine(project, laid_out, machines):
    path = laid_out(f"{TP}: 4", gpus=8)
    path.write_text(path.read_text().replace("{gpus_per_node: 8}", machines))
    if "gpus_per_node: 4" in machines:
        check_file(path)
        return
    project.assert_problem(
        path,
        f"engines.actor.parallel.{TP}",
        "4 ranks that share matrices would lie on several machines, as each of group `train` has 2; choose a divisor "
        "of 2, and more stages for a large model",
    )


FAMILIES = {
    "mixtral": (
        {"model_type": "mixtral", "num_local_experts": 6, "intermediate_size": 12},
        f"{EP}: 4",
        "4 does not divide the model's num_local_experts, 6",
    ),
    "width of mixtral's experts": (
        {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 12},
        f"{ETP}: 8",
        "8 does not divide the model's intermediate_size, 12",
    ),
    "deepseek": (
        {**DEEPSEEK, "n_routed_experts": 6},
        f"{EP}: 4",
        "4 does not divide the model's n_routed_experts, 6",
    ),
    "dense layers of deepseek": (
        {**DEEPSEEK, "first_k_dense_replace": 1, "intermediate_size": 30},
        f"{TP}: 4, sequence_parallel: true",
        "4 does not divide the model's intermediate_size, 30",
    ),
    "shared experts of deepseek": (
        {**DEEPSEEK, "n_shared_experts": 1, "moe_intermediate_size": 30},
        f"{TP}: 4, sequence_parallel: true",
        "4 does not divide the model's n_shared_experts * moe_intermediate_size, 30",
    ),
    "latent attention without sequence parallel": (
        {"model_type": "deepseek_v3", "kv_lora_rank": 16},
        f"{TP}: 2",
        "only if this is true; set it to true",
    ),
    "key heads": (
        {"model_type": "qwen3", "num_attention_heads": 12, "num_key_value_heads": 3},
        f"{TP}: 2",
        "2 does not divide the model's num_key_value_heads, 3; choose from: 1, 3, 6, 12",
    ),
    "key heads that ranks share": ({"model_type": "qwen3", "num_key_value_heads": 2}, f"{TP}: 4", None),
    # Latent attention has no key heads, a mixture without dense layers no use for their width.
    "deepseek that fits": (
        {"model_type": "deepseek_v3", "first_k_dense_replace": 0, "num_key_value_heads": 2, "intermediate_size": 30},
        f"{TP}: 4, sequence_parallel: true",
        None,
    ),
    "qwen3_moe that fits": (
        {"model_type": "qwen3_moe", "num_experts": 8, "intermediate_size": 30, "mlp_only_layers": []},
        f"{TP}: 4, sequence_parallel: true, {EP}: 8",
        None,
    ),
}


@pytest.mark.parametrize(("config", "parallel", "fragment"), FAMILIES.values(), ids=FAMILIES.keys())
def test_sizes_are_read_from_the_folder_by_the_names_of_its_family(project, config, parallel, fragment):
    folder = project.folder / "model"
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "hidden_size": 48, "intermediate_size": 48}
    write_model(folder, **{**sizes, **config})
    write_tokenizer(folder, {"1": 0})
    text = (project.folder / "p.yaml").read_text()
    begin, end = text.index("  init:"), text.index("data:")
    text = text[:begin] + "  path: model\n" + text[end:]
    text = text.replace("    group: train\n", f"    group: train\n    parallel: {{{parallel}}} #!\n")
    path = project.write("p.yaml", text.replace("train: {cpus_per_node: 2}", "train: {gpus_per_node: 8}"))
    if fragment is None:
        check_file(path)
    else:
        assert fragment in project.only_problem(path).message
