"""slime's model: its folder, its shape and adapters."""

from __future__ import annotations

from dagrl.importing.table import Translation, implied, joint, to

_MODEL = """
    spec disable-bias-linear add-qkv-bias qk-layernorm group-query-attention num-attention-heads num-query-groups
    kv-channels num-layers hidden-size ffn-hidden-size use-gated-attention normalization apply-layernorm-1p
    position-embedding-type norm-epsilon rotary-percent rotary-base swiglu untie-embeddings-and-output-weights
    vocab-size
    moe-ffn-hidden-size moe-shared-expert-intermediate-size moe-router-score-function moe-router-topk moe-layer-freq
    num-experts moe-token-drop-policy attention-output-gate moe-shared-expert-gate linear-attention-freq
    linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim linear-num-key-heads linear-num-value-heads
    moe-router-pre-softmax moe-router-enable-expert-bias moe-router-topk-scaling-factor moe-router-num-groups
    moe-router-group-topk multi-latent-attention q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
    rotary-scaling-factor mscale mscale-all-dim use-rotary-position-embeddings rope-type max-position-embeddings
    seq-length no-position-embedding make-vocab-size-divisible-by post-self-attn-layernorm post-mlp-layernorm
    use-rope-scaling rope-scaling-factor no-rope-fusion moe-shared-expert-overlap window-size window-attn-skip-freq
    padded-vocab-size bf16 model-name megatron-to-hf-mode tokenizer-type tokenizer-model attention-softmax-in-fp32
    rotary-interleaved no-rope-freq moe-latent-size experimental-attention-variant
""".split()  # noqa: SIM905 (a list would take a line for each)
"""Arguments that say what the model is: dagrl reads its config.json. bfloat16 softmax is computed in float32."""


def _lora(t: Translation) -> None:
    if not t.number("--lora-rank", 0):
        t.imply_all("there are no adapters")
        return
    t.write("engines.actor.lora.rank", t.get("--lora-rank"), "--lora-rank")
    t.write("engines.actor.lora.alpha", t.get("--lora-alpha", 16), "--lora-alpha")
    if t.number("--lora-dropout"):
        t.write("engines.actor.lora.dropout", t.get("--lora-dropout"), "--lora-dropout")
    if t.get("--target-modules") in (None, "all-linear"):
        t.imply("all linear layers, as by default", "--target-modules")
    else:
        t.refuse("names layers in Megatron's names: `lora.target_modules`", "--target-modules")


RULES = (
    to("--hf-checkpoint", "model.path"),
    joint(_lora, "--lora-* --target-modules"),
    implied(
        "the model's folder has weights and tokenizer; Megatron's are `dist_checkpointing_path`", "--ref-load --load"
    ),
    implied("follows from the model's config.json", *(f"--{name}" for name in _MODEL)),
)
