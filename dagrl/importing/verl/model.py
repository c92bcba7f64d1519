"""verl's ``actor_rollout_ref.model``."""

from __future__ import annotations

from dagrl.importing.engines import RECOMPUTE
from dagrl.importing.table import Translation, implied, joint, refused_unless, to, under
from dagrl.importing.verl.common import MEMORY, MODEL, is_megatron

_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "linear_qkv"),
    "o_proj": "linear_proj",
    **dict.fromkeys(("gate_proj", "up_proj"), "linear_fc1"),
    "down_proj": "linear_fc2",
}


_ADAPTER_FOLDERS = (f"{MODEL}.lora.adapter_path", f"{MODEL}.lora_adapter_path")


def _recompute(t: Translation) -> None:
    key = f"{MODEL}.enable_gradient_checkpointing"
    if is_megatron(t):
        t.imply("with Megatron, `override_transformer_config` decides what is computed anew", key)
    elif t.flag(key):
        for name, value in RECOMPUTE.items():
            t.write(f"engines.actor.transformer.{name}", value, key)
    else:
        t.imply("nothing is computed anew, as by default", key)


def _lora(t: Translation) -> None:
    nested = bool(t.number(f"{MODEL}.lora.rank", 0))
    rank = t.number(f"{MODEL}.lora.rank", 0) or t.number(f"{MODEL}.lora_rank", 0)
    folder = next((key for key in _ADAPTER_FOLDERS if t.get(key)), None)
    if not rank and folder is None:
        t.imply_all("there are no adapters")
        return
    if folder is not None:
        t.write("engines.actor.lora.path", t.get(folder), folder)
    if not rank:
        reason = "rank, alpha and layers are those of the folder's adapter_config.json; write them"
        t.note(f"{MODEL}.lora_rank", "engines.actor.lora.rank", reason)
        t.imply_all("those of the folder count")
        return
    prefix = f"{MODEL}.lora." if nested else f"{MODEL}.lora_"
    t.write("engines.actor.lora.rank", rank, f"{prefix}rank")
    t.write("engines.actor.lora.alpha", t.get(f"{prefix}alpha"), f"{prefix}alpha")
    if nested:
        for name in ("dropout", "merge"):
            t.copy(f"{prefix}{name}", f"engines.actor.lora.{name}")
    key = f"{MODEL}.lora.target_modules" if nested else f"{MODEL}.target_modules"
    _target_modules(t, key)
    given = [k for k in t.current if not t.is_recorded(k)]
    t.refuse("adapters start as `lora.init` says, on the layers of `lora.target_modules`", *given)


def _target_modules(t: Translation, key: str) -> None:
    modules = t.get(key)
    if not t.given(key) or modules == "all-linear":
        t.imply("all linear layers, as by default", key)
        return
    names = modules if isinstance(modules, list) else [modules]
    layers = [name if str(name).startswith("linear_") else _LAYERS.get(str(name)) for name in names]
    if None in layers:
        t.refuse("names layers that have no counterpart in Megatron", key)
    else:
        t.write("engines.actor.lora.target_modules", list(dict.fromkeys(layers)), key)


RULES = (
    to(f"{MODEL}.path", "model.path", write_default=True),
    to(f"{MODEL}.tokenizer_path", "model.tokenizer"),
    joint(_recompute, under(MODEL, "enable_gradient_checkpointing"), always=True),
    to(f"{MODEL}.use_fused_kernels", "engines.actor.fused_linear_cross_entropy"),
    joint(_lora, under(MODEL, "lora_rank lora_alpha target_modules exclude_modules lora_adapter_path lora.*")),
    refused_unless(False, "draft models are not trained or served", under(MODEL, "mtp.*")),
    refused_unless((None, {}), "the model's config.json holds", under(MODEL, "override_config* hf_config_path")),
    refused_unless(None, "the chat template is the tokenizer's", under(MODEL, "custom_chat_template")),
    implied(
        MEMORY,
        under(
            MODEL,
            "use_remove_padding use_liger enable_activation_offload fused_kernel_options.* "
            "tiled_mlp.* gradient_checkpointing_kwargs*",
        ),
    ),
    implied("follows from the model's folder", under(MODEL, "trust_remote_code use_shm external_lib")),
)
