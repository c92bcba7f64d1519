"""Folders that cannot be loaded are reported with file, tensor and shape; those that can be loaded pass.

Each case changes a copy of one small folder. What passes is loaded by the engines' own readers, too.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from model_folders import FAMILIES, Tensors, tensors_of, whole_config, write_model, write_tensors, write_weights

from dagrl.backends.backend import WeightReader as Reader
from dagrl.validation import check_file
from dagrl.validation.model_weights import check_weights, readers_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, EMBEDDING, OUTPUT = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
QUERY, DOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
SECOND = "model-00002-of-00003.safetensors"
CHAT = [{"role": "user", "content": "1+1="}]

Change = Callable[[Path], None]


def weights_problem(folder: Path, config: Mapping[str, Any], readers: Sequence[Reader]) -> str | None:
    try:
        check_weights(folder, config, readers)
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 with a tokenizer of characters."""
    from dagrl.config.schema import TokenizerSpec
    from dagrl.model_files.tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("whole") / "model"
    write_model(folder, model_type="qwen3")
    make_tokenizer(TokenizerSpec(kind="characters", alphabet="0123456789+= ")).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(project, whole: Path) -> Path:
    shutil.copytree(whole, project.folder / "model")
    text = (project.folder / "p.yaml").read_text()
    begin, end = text.index("  init:"), text.index("data:")
    (project.folder / "p.yaml").write_text(text[:begin] + "  path: model #!\n" + text[end:])
    return project.folder / "model"


# -- changes ----------------------------------------------------------------------------------------------------------


def remove(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def put(name: str, content: Any) -> Change:
    """A file with that content; what is no bytes or text is JSON."""

    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        data = content if isinstance(content, bytes | str) else json.dumps(content)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())

    return change


def edit(name: str, **fields: Any) -> Change:
    """Other values of keys in a JSON file; `...` removes a key."""

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | fields
        put(name, {key: value for key, value in content.items() if value is not ...})(folder)

    return change


def edit_model(**fields: Any) -> Change:
    """Other values of keys of the model in tokenizer.json."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        content["model"] = {key: value for key, value in (content["model"] | fields).items() if value is not ...}
        put("tokenizer.json", content)(folder)

    return change


def added(number: int, content: str) -> Change:
    """Add a token to tokenizer.json."""

    def change(folder: Path) -> None:
        tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        edit("tokenizer.json", added_tokens=[*tokens, {"id": number, "content": content}])(folder)

    return change


def weights(**tensors: tuple[str, tuple[int, ...]] | None) -> Change:
    """Other tensors, dots written as ``__``; None removes one."""
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return retensor(lambda tensors: tensors | named)


def retensor(change: Callable[[Tensors], dict[str, Any]], files: int = 1) -> Change:
    """The weights written anew after a change."""

    def write(folder: Path) -> None:
        changed = change(tensors_of(json.loads((folder / "config.json").read_text())))
        (folder / WEIGHTS).unlink(missing_ok=True)
        write_weights(folder, {name: tensor for name, tensor in changed.items() if tensor is not None}, files)

    return write


def tensor(name: str, dtype: str = "BF16", *shape: int) -> Change:
    """One tensor of another dtype or shape."""
    return retensor(lambda tensors: tensors | {name: (dtype, shape or tensors[name][1])})


def without(*ends: str) -> Change:
    return retensor(lambda tensors: {name: tensors[name] for name in tensors if not name.endswith(ends)})


def remodel(**fields: Any) -> Change:
    """Config and weights of another model."""

    def write(folder: Path) -> None:
        config = whole_config(**{"model_type": "qwen3", "vocab_size": 24, **fields})
        put("config.json", config)(folder)
        write_weights(folder, tensors_of(config))

    return write


def both(*changes: Change) -> Change:
    def change(folder: Path) -> None:
        for each in changes:
            each(folder)

    return change


def cut(name: str, left: int) -> Change:
    """A file of which only the beginning is left; a negative number counts from its end."""
    return lambda folder: put(name, (folder / name).read_bytes()[:left])(folder)


def header(change: Callable[[dict[str, Any]], None], name: str = WEIGHTS) -> Change:
    """A file whose header says something else of the same bytes."""

    def write(folder: Path) -> None:
        data = (folder / name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        content = json.loads(data[8 : 8 + length])
        change(content)
        text = json.dumps(content).encode()
        put(name, len(text).to_bytes(8, "little") + text + data[8 + length :])(folder)

    return write


sharded = retensor(lambda tensors: tensors, files=3)


def reindex(change: Callable[[dict[str, str]], Any]) -> Change:
    """Three files, and an index that says something else."""

    def write(folder: Path) -> None:
        sharded(folder)
        files = json.loads((folder / INDEX).read_text())["weight_map"]
        put(INDEX, {"weight_map": change(files)})(folder)

    return write


# -- what cannot be loaded --------------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[Change, str]] = {
    # Files.
    "cut short": (cut(WEIGHTS, -3), f"{WEIGHTS} was cut short"),
    "too long": (lambda f: put(WEIGHTS, (f / WEIGHTS).read_bytes() + b"x")(f), "or is too long"),
    "cut in the header": (cut(WEIGHTS, 2000), f"{WEIGHTS} is no safetensors file"),
    "cut in the length": (cut(WEIGHTS, 5), f"{WEIGHTS} is no safetensors file"),
    "a header of gigabytes": (put(WEIGHTS, (1 << 40).to_bytes(8, "little") + b"{" * 5000), "is no safetensors file"),
    "PyTorch's own format": (put(WEIGHTS, b"PK\x03\x04" * 1000), "is no safetensors file"),
    "only .bin files": (
        both(remove(WEIGHTS), put("pytorch_model.bin", b"PK")),
        "has no safetensors weights (only PyTorch's .bin files); save the model as safetensors",
    ),
    "consolidated weights alone": (
        lambda f: (f / WEIGHTS).rename(f / "consolidated.safetensors"),
        "has no safetensors weights; save the model as safetensors",
    ),
    "offsets beyond the file": (
        header(lambda h: h[OUTPUT].update(data_offsets=[4992, 9**9])),
        f"{WEIGHTS} is no safetensors file, or is broken: invalid offset for tensor `{OUTPUT}`",
    ),
    "overlapping offsets": (
        header(lambda h: h[NORM].update(data_offsets=[0, 32])),
        f"is broken: invalid offset for tensor `{EMBEDDING}`; copy the file again",
    ),
    "a tensor removed from the header": (header(lambda h: h.pop(DOWN)), "is broken: invalid offset"),
    "a dtype that does not exist": (
        header(lambda h: h[NORM].update(dtype="F17")),
        "unknown variant `F17`",
    ),
    "a dtype of another size": (header(lambda h: h[NORM].update(dtype="F32")), "is broken: invalid shape"),
    "a shape of another size": (header(lambda h: h[NORM].update(shape=[15])), "is broken: invalid shape"),
    "a header without shapes": (header(lambda h: h[NORM].pop("shape")), "is broken: invalid JSON in header: missing"),
    # Indices.
    "no JSON in the index": (both(sharded, put(INDEX, "{")), f"{INDEX} is not a JSON object"),
    "an empty index": (reindex(lambda files: {}), f"{INDEX} does not say which file holds which weight"),
    "an index without a map": (both(sharded, put(INDEX, {"metadata": {}})), f"{INDEX} does not say which file"),
    "an index of numbers": (reindex(lambda files: dict.fromkeys(files, 1)), f"{INDEX} does not say which file"),
    "an index that names a file that is not there": (
        reindex(lambda files: files | {NORM: "model-00004-of-00003.safetensors"}),
        "lacks 1 of its weight files, model-00004-of-00003.safetensors among them; copy them again",
    ),
    "an index that leads out of the folder": (
        both(
            reindex(lambda files: files | {NORM: f"../{SECOND}"}), lambda f: (f.parent / SECOND).hardlink_to(f / SECOND)
        ),
        f"{INDEX} names a file outside its folder, '../{SECOND}'; copy the index and its files again",
    ),
    "an index with the path of a file": (
        reindex(lambda files: files | {NORM: f"/models/{SECOND}"}),
        f"{INDEX} names a file outside its folder, '/models/{SECOND}'",
    ),
    "an index that leads out and back": (
        lambda f: reindex(lambda files: files | {NORM: f"../{f.name}/{SECOND}"})(f),
        f"{INDEX} names a file outside its folder, '../",
    ),
    "an index that is in a cycle of links": (
        both(sharded, remove(SECOND), lambda f: (f / SECOND).symlink_to(SECOND)),
        f"lacks 1 of its weight files, {SECOND} among them",
    ),
    "a weight file that is a device": (
        both(remove(WEIGHTS), lambda f: (f / WEIGHTS).symlink_to("/dev/zero")),
        "has no safetensors weights",
    ),
    "an index that is a device": (
        both(sharded, remove(INDEX), lambda f: (f / INDEX).symlink_to("/dev/zero")),
        "has no safetensors weights",
    ),
    "a huge size of a tensor": (
        header(lambda h: h[NORM].update(shape=[2**40, 2**40])),
        "overflow computing buffer size",
    ),
    "an index that names an absent tensor": (
        reindex(lambda files: files | {"model.layers.2.mlp.gate.weight": SECOND}),
        f"{INDEX} says that {SECOND} holds tensor 'model.layers.2.mlp.gate.weight', and it does not; copy the index",
    ),
    "an index that names other files": (
        reindex(lambda files: dict.fromkeys(files, SECOND)),
        f"says that {SECOND} holds tensor '{EMBEDDING}', and it does not (and 16 more alike)",
    ),
    "a lost file of several": (both(sharded, remove(SECOND)), f"lacks 1 of its weight files, {SECOND} among them"),
    "a file of several cut short": (both(sharded, cut(SECOND, -1)), f"{SECOND} was cut short"),
    "two files of several empty": (
        both(sharded, put(SECOND, b""), put("model-00003-of-00003.safetensors", b"")),
        f"{SECOND} is empty; copy the file again",
    ),
    # Tensors.
    "no tensors": (retensor(lambda tensors: {}), "says num_hidden_layers 2, and the weights hold 0; give the config"),
    "a missing tensor": (without(NORM), f"lacks 1 of the tensors that its config.json asks for, '{NORM}' [16] among"),
    "missing tensors of all layers": (without("k_norm.weight"), "lacks 2 of the tensors that its config.json asks for"),
    "no output layer": (without(OUTPUT), f"lacks 1 of the tensors that its config.json asks for, '{OUTPUT}' [24, 16]"),
    "no last layer": (
        retensor(lambda tensors: {name: tensors[name] for name in tensors if ".layers.1." not in name}),
        "config.json says num_hidden_layers 2, and the weights hold 1; give the config.json that belongs to the",
    ),
    "names without their beginning": (
        retensor(lambda tensors: {name.removeprefix("model."): each for name, each in tensors.items()}),
        "config.json says num_hidden_layers 2, and the weights hold 0",
    ),
    "a tensor of another shape": (
        tensor(QUERY, "BF16", 30, 16),
        f"{WEIGHTS}: tensor '{QUERY}' is [30, 16], and config.json asks for [32, 16]; give the config.json that belon",
    ),
    "a transposed tensor": (tensor(DOWN, "BF16", 24, 16), f"'{DOWN}' is [24, 16], and config.json asks for [16, 24]"),
    "a flattened tensor": (tensor(DOWN, "BF16", 384), f"'{DOWN}' is [384], and config.json asks for [16, 24]"),
    "an embedding with fewer rows": (
        tensor(EMBEDDING, "BF16", 20, 16),
        f"tensor '{EMBEDDING}' is [20, 16], and config.json asks for [24, 16]",
    ),
    "a tensor left over": (
        weights(model__layers__0__mlp__up_proj__bias=("BF16", (24,))),
        "tensor 'model.layers.0.mlp.up_proj.bias' [24] has no place in the qwen3 that config.json describes; give",
    ),
    "a layer left over": (
        edit("config.json", num_hidden_layers=1),
        "tensor 'model.layers.1.input_layernorm.weight' [16] has no place in the qwen3 that config.json describes (and",
    ),
    "an adapter among the weights": (
        weights(model__layers__0__self_attn__q_proj__lora_A__weight=("BF16", (4, 16))),
        "q_proj.lora_A.weight' [4, 16] has no place",
    ),
    "weights of a reward model": (
        lambda f: write_weights(f, tensors_of(whole_config(model_type="qwen3"), "reward")),
        f"lacks 1 of the tensors that its config.json asks for, '{OUTPUT}' [24, 16] among them",
    ),
    "integers": (tensor(QUERY, "I32"), f"'{QUERY}' is I32, and weights must be F64, F32, F16 or BF16; save the model"),
    "8-bit integers": (
        retensor(lambda tensors: {name: ("I8", shape) for name, (_, shape) in tensors.items()}),
        f"tensor '{EMBEDDING}' is I8 (and 24 more alike), and weights must be F64, F32, F16 or BF16; save the model de",
    ),
    "8-bit floats": (tensor(QUERY, "F8_E4M3"), f"tensor '{QUERY}' is F8_E4M3, and weights must be"),
    "truth values": (tensor(NORM, "BOOL"), f"tensor '{NORM}' is BOOL, and weights must be"),
    "scales of fp8": (
        weights(model__layers__0__mlp__down_proj__weight_scale_inv=("F32", (1, 1))),
        "down_proj.weight_scale_inv' belongs to quantised weights, which cannot be trained; save the model dequantised",
    ),
    "gptq without a word in the config": (
        both(
            without("q_proj.weight"),
            lambda f: retensor(
                lambda tensors: {
                    name.replace("q_proj.weight", "q_proj.qweight"): each for name, each in tensors.items()
                }
            )(f),
        ),
        "q_proj.qweight' belongs to quantised weights, which cannot be trained",
    ),
    # Configs.
    "gptq": (
        edit("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "config.json says that the weights are quantised (quantization_config, gptq), and cannot be trained; save the",
    ),
    "fp8": (edit("config.json", quantization_config={"quant_method": "fp8"}), "(quantization_config, fp8)"),
    "a quantisation that is no mapping": (edit("config.json", quantization_config="awq"), "(quantization_config), and"),
    "compressed tensors": (edit("config.json", compression_config={"format": "x"}), "quantised (compression_config),"),
    "no hidden size": (edit("config.json", hidden_size=...), "does not say hidden_size, a size of the model; copy the"),
    "no number of heads": (edit("config.json", num_attention_heads=...), "does not say num_attention_heads, a size"),
    "no number of layers": (edit("config.json", num_hidden_layers=...), "does not say num_hidden_layers, a size"),
    "no vocabulary": (edit("config.json", vocab_size=...), "does not say vocab_size, a size of the model"),
    "no width": (edit("config.json", intermediate_size=...), "does not say intermediate_size, a size of the model"),
    "more layers than weights": (
        edit("config.json", num_hidden_layers=10_000),
        "says num_hidden_layers 10000, and the weights hold 2; give the config.json that belongs",
    ),
    "fewer key heads": (
        edit("config.json", num_key_value_heads=1),
        "k_proj.weight' is [16, 16], and config.json asks for [8, 16] (and 3 more alike)",
    ),
    "another head_dim": (edit("config.json", head_dim=4), "q_proj.weight' is [32, 16], and config.json asks for [16, "),
    "another family": (edit("config.json", model_type="llama"), "q_norm.weight' [8] has no place in the llama that co"),
    "a mixture's config": (
        edit("config.json", **FAMILIES["qwen3_moe"], model_type="qwen3_moe"),
        "lacks 26 of the tensors that its config.json asks for, 'model.layers.0.mlp.gate.weight' [4, 16] among them",
    ),
    "a mixture without its number of experts": (
        both(remodel(model_type="qwen3_moe"), edit("config.json", num_experts=...)),
        "does not say num_experts, a size of the model",
    ),
    "a mixture of thousands of experts": (
        both(remodel(model_type="mixtral"), edit("config.json", num_local_experts=60_000)),
        "lacks 1000 and more of the tensors that its config.json asks for",
    ),
    "an expert that is missing": (
        both(remodel(model_type="mixtral"), without("layers.1.block_sparse_moe.experts.3.w2.weight")),
        "'model.layers.1.block_sparse_moe.experts.3.w2.weight' [16, 24] among them",
    ),
    "latent attention without a rank": (
        both(remodel(model_type="deepseek_v3"), edit("config.json", kv_lora_rank=...)),
        "does not say kv_lora_rank, a size of the model",
    ),
    "deepseek without the router's bias": (
        both(remodel(model_type="deepseek_v3"), without("e_score_correction_bias")),
        "'model.layers.1.mlp.gate.e_score_correction_bias' [4] among them",
    ),
    "a layer that predicts tokens, and no word of it": (
        both(remodel(model_type="deepseek_v3"), weights(model__layers__2__eh_proj__weight=("BF16", (16, 32)))),
        "tensor 'model.layers.2.eh_proj.weight' [16, 32] has no place in the deepseek_v3 that config.json describes",
    ),
    "Qwen2 without biases": (
        both(remodel(model_type="qwen2"), without("k_proj.bias")),
        "lacks 2 of the tensors that its config.json asks for, 'model.layers.0.self_attn.k_proj.bias' [8] among them",
    ),
    # Tokenizers.
    "an empty tokenizer.json": (put("tokenizer.json", ""), "tokenizer.json is not a JSON object; copy the file again"),
    "a torn tokenizer.json": (cut("tokenizer.json", -40), "tokenizer.json is not a JSON object; copy the file again"),
    "no model in tokenizer.json": (put("tokenizer.json", {}), "tokenizer.json has no vocab that lists tokens"),
    "a model of null": (edit("tokenizer.json", model=None), "tokenizer.json has no vocab that lists tokens"),
    "no vocab": (
        edit_model(vocab=...),
        "tokenizer.json has no vocab that lists tokens with their numbers; copy",
    ),
    "a vocab of a list": (edit_model(vocab=["a", "b"]), "has no vocab that lists tokens with their numbers"),
    "a vocab with text for numbers": (edit_model(vocab={"a": "0"}), "has no vocab that lists tokens with their"),
    "a vocab with negative numbers": (edit_model(vocab={"a": -1}), "has no vocab that lists tokens with their"),
    "no merges": (
        edit_model(merges=...),
        "tokenizer.json has no list of merges beside its tokens; copy the file again",
    ),
    "a tokenizer without tokens": (
        both(edit_model(vocab={}), edit("tokenizer.json", added_tokens=[])),
        "tokenizer.json lists no tokens: the tokenizer is empty; copy the file again",
    ),
    "no added_tokens": (edit("tokenizer.json", added_tokens=...), "has no list of added_tokens with content and id"),
    "added_tokens of text": (edit("tokenizer.json", added_tokens=["<a>"]), "has no list of added_tokens with content"),
    "more tokens than rows": (
        edit_model(vocab={"1": 0, "2": 24}),
        "tokenizer.json gives token '2' the number 24, and the model's embedding has 24 rows (vocab_size); take the mo",
    ),
    "an end token beyond the rows": (
        edit("tokenizer.json", added_tokens=[{"id": 30, "content": "<eos>"}]),
        "tokenizer.json gives token '<eos>' the number 30, and the model's embedding has 24 rows",
    ),
    "a token of the template beyond the rows": (
        both(added(24, "<tool>"), put("chat_template.jinja", "{{ '<tool>' }}{{ messages[0].content }}")),
        "tokenizer.json gives token '<tool>' the number 24, and the model's embedding has 24 rows",
    ),
    "an end token beyond the rows in the config": (
        edit("tokenizer_config.json", eos_token="<end>", added_tokens_decoder={"30": {"content": "<end>"}}),
        "gives token '<end>' the number 30, and the model's embedding has 24 rows",
    ),
    "an end token beyond the rows in added_tokens.json": (
        both(edit("tokenizer_config.json", eos_token="<end>"), put("added_tokens.json", {"<end>": 30})),
        "gives token '<end>' the number 30, and the model's embedding has 24 rows",
    ),
    "vocab.json with more tokens than rows": (
        both(remove("tokenizer.json"), put("vocab.json", {"a": 0, "b": 24}), put("merges.txt", "#version: 0.2\n")),
        "vocab.json gives token 'b' the number 24, and the model's embedding has 24 rows",
    ),
    "a torn tokenizer_config.json": (cut("tokenizer_config.json", 30), "tokenizer_config.json is not a JSON object;"),
    "a tokenizer_config.json of a list": (put("tokenizer_config.json", []), "tokenizer_config.json is not a JSON obj"),
    "an eos_token of a number": (
        edit("tokenizer_config.json", eos_token=3),
        "tokenizer_config.json says eos_token: 3, which is no token; copy the file again",
    ),
    "a torn special_tokens_map.json": (put("special_tokens_map.json", "{"), "special_tokens_map.json is not a JSON"),
    "added_tokens.json of a list": (put("added_tokens.json", "[]"), "added_tokens.json is not a JSON object; copy"),
    "a tokenizer_config.json alone": (
        remove("tokenizer.json"),
        "has tokenizer_config.json and no tokens (tokenizer.json, tokenizer.model); copy them there",
    ),
    "an empty tokenizer.model": (
        both(remove("tokenizer.json"), put("tokenizer.model", b"")),
        "tokenizer.model is empty; copy the file again",
    ),
    "a pointer in place of tokenizer.model": (
        both(remove("tokenizer.json"), put("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\n")),
        "tokenizer.model is no tokenizer; copy the file again",
    ),
    "vocab.json without merges": (
        both(remove("tokenizer.json"), put("vocab.json", {"a": 0})),
        "has vocab.json and no merges.txt, which belongs to it; copy it there",
    ),
    "a torn vocab.json": (
        both(remove("tokenizer.json"), put("vocab.json", "{"), put("merges.txt", "#version: 0.2\n")),
        "vocab.json is not a JSON object; copy the file again",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_failed_load_is_one_sentence(project, folder: Path, name: str) -> None:
    change, fragment = BROKEN[name]
    change(folder)
    begun = time.process_time()
    project.assert_problem(project.folder / "p.yaml", "model.path", fragment, str(folder))
    assert time.process_time() - begun < 5


# -- chats and responses ----------------------------------------------------------------------------------------------

TEMPLATE = "chat_template.jinja"
NO_TEMPLATE: dict[str, tuple[Change, str]] = {
    "none": (remove(TEMPLATE), "has no chat template; put the model's own into the folder, as chat_template.jinja, or"),
    "an empty one": (put(TEMPLATE, ""), "has no chat template"),
    "null in the config": (
        both(remove(TEMPLATE), edit("tokenizer_config.json", chat_template=None)),
        "has no chat template; put",
    ),
    "one that only processors read": (
        both(remove(TEMPLATE), put("chat_template.json", {"chat_template": "x"})),
        "has no chat template, only chat_template.json; put",
    ),
    "others by name": (
        both(remove(TEMPLATE), put("additional_chat_templates/rag.jinja", "x")),
        "has no chat template, only rag; put",
    ),
    "an open tag": (put(TEMPLATE, "{% for m in messages %}\n{{ m"), "cannot be read: unexpected end of template"),
    "an unknown tag": (put(TEMPLATE, "a\n{% nothing %}"), "cannot be read: Encountered unknown tag 'nothing'., line 2"),
}


@pytest.mark.parametrize("name", NO_TEMPLATE)
def test_chats_need_a_chat_template(project, row, folder: Path, name: str) -> None:
    change, fragment = NO_TEMPLATE[name]
    change(folder)
    check_file(project.folder / "p.yaml")
    project.write_rows("train.parquet", [row | {"prompt": CHAT}] * 32)
    project.assert_problem(
        project.folder / "p.yaml", "model.path", "train.parquet has chats as prompts, and the", str(folder), fragment
    )


HAS_TEMPLATE: dict[str, Change] = {
    "a file": lambda folder: None,
    "in the config": both(remove(TEMPLATE), edit("tokenizer_config.json", chat_template="{{ messages }}")),
    "in the config by name": both(
        remove(TEMPLATE),
        edit(
            "tokenizer_config.json", chat_template=[{"name": "default", "template": "x"}, {"name": "t", "template": ""}]
        ),
    ),
    "a default among others": both(
        remove(TEMPLATE),
        put("additional_chat_templates/default.jinja", "x"),
        put("additional_chat_templates/rag.jinja", "x"),
    ),
    "tags of transformers": put(
        TEMPLATE,
        "{% for m in messages %}{% if m.role == 'x' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}",
    ),
}


@pytest.mark.parametrize("name", HAS_TEMPLATE)
def test_a_chat_template_is_found_where_transformers_finds_it(project, row, folder: Path, name: str) -> None:
    from dagrl.config.schema import ModelSpec
    from dagrl.model_files.tokenizer import chat_text, load_tokenizer

    HAS_TEMPLATE[name](folder)
    project.write_rows("train.parquet", [row | {"prompt": CHAT}] * 32)
    check_file(project.folder / "p.yaml")
    assert chat_text(load_tokenizer(ModelSpec(path=folder)), CHAT)


# -- what loads -------------------------------------------------------------------------------------------------------

WHOLE: dict[str, Change] = {
    "a single file": lambda folder: None,
    "several files with an index": both(remove(WEIGHTS), sharded),
    "one file with an index": lambda folder: put(
        INDEX, {"weight_map": dict.fromkeys(tensors_of(whole_config(model_type="qwen3")), WEIGHTS)}
    )(folder),
    "a tied output layer that is left out": remodel(tie_word_embeddings=True),
    "a tied output layer that is stored": both(
        remodel(tie_word_embeddings=True), weights(lm_head__weight=("BF16", (24, 16)))
    ),
    "float16": retensor(lambda tensors: {name: ("F16", shape) for name, (_, shape) in tensors.items()}),
    "float32 among bfloat16": both(tensor(NORM, "F32"), tensor(QUERY, "F32")),
    "float64": retensor(lambda tensors: {name: ("F64", shape) for name, (_, shape) in tensors.items()}),
    "frequencies of an old Llama": both(
        remodel(model_type="llama"), weights(model__layers__0__self_attn__rotary_emb__inv_freq=("F32", (2,)))
    ),
    "consolidated weights left over": put("consolidated.safetensors", b"torn"),
    "weights of PyTorch left over": put("pytorch_model.bin", b"PK"),
    "files that the index does not name": both(
        sharded, lambda folder: write_tensors(folder / "adapter.safetensors", {"x": ("I8", (3,))})
    ),
    "tensors that the index does not name": reindex(lambda files: files),
    "a null for quantisation": edit("config.json", quantization_config=None),
    "fields of later versions": edit("config.json", something_new={"a": [1]}),
    "llama without num_key_value_heads": both(
        remodel(model_type="llama", num_key_value_heads=4), edit("config.json", num_key_value_heads=...)
    ),
    "Qwen2": remodel(model_type="qwen2"),
    "Qwen3-MoE": remodel(model_type="qwen3_moe"),
    "Qwen3-MoE with a dense layer": remodel(model_type="qwen3_moe", mlp_only_layers=[0]),
    "Mixtral": remodel(model_type="mixtral"),
    "DeepSeek-V3": remodel(model_type="deepseek_v3"),
    "Moonlight": remodel(model_type="deepseek_v3", q_lora_rank=None, n_shared_experts=2),
    "layers that predict further tokens": both(
        remodel(model_type="deepseek_v3", num_nextn_predict_layers=1),
        weights(model__layers__2__eh_proj__weight=("BF16", (16, 32)), model__layers__2__enorm__weight=("BF16", (16,))),
    ),
    "a vocabulary with rows to spare": remodel(vocab_size=64),
    "no tokenizer_config.json": remove("tokenizer_config.json"),
    "a tokenizer without a type": edit_model(type=...),
    "vocab.json and merges.txt": both(
        remove("tokenizer.json"),
        edit("tokenizer_config.json", tokenizer_class="Qwen2Tokenizer"),
        put("vocab.json", {"a": 0, "b": 1, "ab": 2}),
        put("merges.txt", "#version: 0.2\na b\n"),
    ),
    "a generation config": put("generation_config.json", {"eos_token_id": [1, 2]}),
    "metadata in the header": header(lambda h: h.update({"__metadata__": {"format": "pt"}})),
}


@pytest.mark.parametrize("where", ["tokenizer.json", "added_tokens.json", "tokenizer_config.json"])
def test_a_special_token_beyond_the_rows_is_accepted(project, folder, where) -> None:
    """As the token for images in the tokenizers of Gemma's models for text."""
    more = {"content": "<tool>"}
    {
        "tokenizer.json": added(24, "<tool>"),
        "added_tokens.json": put(where, {"<tool>": 24}),
        "tokenizer_config.json": edit(where, added_tokens_decoder={"24": more}),
    }[where](folder)
    check_file(project.folder / "p.yaml")


def test_a_made_tokenizer_needs_rows_of_the_model(project, folder: Path) -> None:
    path = project.folder / "p.yaml"
    text = path.read_text()
    path.write_text(text.replace("  path: model #!\n", "  path: model\n  tokenizer: {kind: bytes} #!\n"))
    project.assert_problem(path, "model.tokenizer", "vocabulary-too-small", "258 tokens", "24 rows")


@pytest.mark.parametrize("name", WHOLE)
def test_loadable_folders_pass(project, folder: Path, name: str) -> None:
    from dagrl.backends.backend import RankContext
    from dagrl.backends.hf.engine import HfEngine
    from dagrl.backends.hf.section import HfEngineSpec
    from dagrl.config.schema import ModelSpec
    from dagrl.model_files.tokenizer import load_tokenizer

    WHOLE[name](folder)
    check_file(project.folder / "p.yaml")
    model = ModelSpec(path=folder)
    assert len(load_tokenizer(model))
    engine = HfEngine(model, HfEngineSpec(backend="hf", group="g"), RankContext(0, 1, "127.0.0.1", 1, 60.0, seed=0))
    assert engine.policy_version == 0


def test_a_sentencepiece_model_alone_passes(project, folder: Path) -> None:
    both(remove("tokenizer.json"), put("tokenizer.model", b"\x0a\x0e\x0a\x05<unk>\x15"))(folder)
    check_file(project.folder / "p.yaml")


def test_thirty_files_of_a_thousand_tensors_are_read(tmp_path: Path) -> None:
    config = write_model(
        tmp_path, model_type="qwen3_moe", num_hidden_layers=48, num_experts=200, hidden_size=8, num_experts_per_tok=8
    )
    (tmp_path / WEIGHTS).unlink()
    tensors = tensors_of(config)
    assert len(tensors) > 29_000
    write_weights(tmp_path, tensors, files=30)
    assert weights_problem(tmp_path, config, [Reader()]) is None


# -- other readers ----------------------------------------------------------------------------------------------------


CRITIC = "  critic: {backend: megatron, group: train, head: value, optimizer: {lr: 1e-3}, model: {path: model}}\n"
JUDGE = "  judge: {backend: hf, group: rollout, head: reward, model: {path: model}}\n"
SCORER = "  judge: {backend: megatron, group: train, head: reward, model: {path: model}}\n"
TEACHER = "  judge: {backend: sglang, group: rollout, model: {path: model}}\n"


def score(rows: int = 1, columns: int = 16) -> Change:
    shape = ("BF16", (rows, columns))
    return retensor(lambda tensors: {k: v for k, v in tensors.items() if k != OUTPUT} | {"score.weight": shape})


@pytest.mark.parametrize(
    ("engine", "change", "fragment"),
    [
        (CRITIC, lambda folder: None, None),
        (CRITIC, score(), None),
        (CRITIC, score(2), "'score.weight' is [2, 16], and config.json asks for [1, 16]"),
        (CRITIC, without(NORM), f"'{NORM}' [16] among them"),
        (SCORER, score(), None),
        (SCORER, lambda folder: None, "'score.weight' [1, 16] among them"),
        (JUDGE, both(edit("config.json", architectures=["Qwen3ForSequenceClassification"]), score()), None),
        (JUDGE, both(edit("config.json", architectures=["X"] * 0), score(2)), "'score.weight' is [2, 16], and config"),
        (JUDGE, without(NORM), f"'{NORM}' [16] among them"),
        (JUDGE, both(score(), weights(another=("F32", (3,)))), "'score.weight' [1, 16] among them"),
        (TEACHER, edit("config.json", quantization_config={"quant_method": "fp8"}), None),
        (TEACHER, weights(another=("F32", (3,))), None),
        (TEACHER, cut(WEIGHTS, -1), "was cut short"),
        (TEACHER, without(NORM), f"'{NORM}' [16] among them"),
    ],
)
def test_each_engine_reads_weights_in_its_own_way(project, whole: Path, engine, change, fragment) -> None:
    from dagrl.config.loading.loader import load_pipeline

    shutil.copytree(whole, project.folder / "model")
    change(project.folder / "model")
    path = project.pipeline(("  generator: {backend", engine + "  generator: {backend"))
    pipeline = load_pipeline(path).pipeline
    name = engine.partition(":")[0].strip()
    config = json.loads((project.folder / "model" / "config.json").read_text())
    problem = weights_problem(project.folder / "model", config, readers_of(pipeline, [name]))
    assert (problem is None) if fragment is None else (fragment in (problem or "")), problem


@pytest.mark.parametrize("change", [remove(WEIGHTS), cut(WEIGHTS, -1), without(NORM)])
def test_weights_that_no_engine_reads_are_not_asked_for(project, folder: Path, change: Change) -> None:
    start = project.folder / "start"
    start.mkdir()
    (start / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (start / ".metadata").write_bytes(b"x")
    (start / "__0_0.distcp").write_bytes(b"x")
    change(folder)
    check_file(project.folder / "p.yaml", [f"engines.actor.dist_checkpointing_path={start}"])


def test_a_model_of_another_family_is_checked_as_far_as_possible(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 8}
    write_tensors(tmp_path / WEIGHTS, {"h.0.weight": ("F32", (8, 8)), "h.0.attn.masked": ("BOOL", (8, 8))})
    assert weights_problem(tmp_path, config, [Reader()]) is None
    write_tensors(tmp_path / WEIGHTS, {"h.0.weight": ("I8", (8, 8))})
    assert "tensor 'h.0.weight' is I8, and weights must be" in (weights_problem(tmp_path, config, [Reader()]) or "")
    cut(WEIGHTS, -1)(tmp_path)
    assert "was cut short" in (weights_problem(tmp_path, config, [Reader()]) or "")
