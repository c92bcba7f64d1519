"""slime's arguments that have no counterpart, or need none."""

from __future__ import annotations

from dagrl.importing.table import implied, refused, refused_unless

RULES = (
    implied("is `dagrl run --run-dir DIR`", "--save --save-debug-*"),
    implied("`sleep: auto` frees the memory while the other engine works", "--offload*"),
    implied("chats go through the tokenizer's chat template", "--apply-chat-template"),
    implied("gradients are reduced in float32, as by default", "--accumulate-allreduce-grads-in-fp32"),
    refused_unless(
        (0, 0.0), "is 0: log-probs in training must not depend on chance", "--attention-dropout --hidden-dropout"
    ),
    implied(
        "is done by itself",
        "--balance-data --balance-by-flops --log-* --metadata-key --data-pad-size-multiplier --seed --num-workers "
        "--use-fault-tolerance --rollout-health-check-* --router-* --slime-router-* --no-save-* --no-load-* --ckpt-* "
        "--no-check-for-nan-in-loss-and-grad --no-gradient-accumulation-fusion",
    ),
    refused_unless("megatron", "trainers are Megatron-core", "--train-backend"),
    refused_unless(
        "policy_loss", "losses are `update` with a policy, or nodes sft and dpo (docs/offline.md)", "--loss-type"
    ),
    refused(
        "is a node, an agent or a loss of your own (docs/your_own.md, docs/gateway.md)",
        "--custom-* --rollout-function-path",
    ),
    refused("draft layers are not trained", "--mtp-* --enable-mtp-training"),
    refused("wandb reads its own environment, such as WANDB_API_KEY and WANDB_PROJECT", "--wandb-*"),
    refused("rewards are functions of a row", "--rm-url --reward-key"),
    refused("advantages are those of `estimator`", "--disable-rewards-normalization"),
    refused("images are `data.image_key` (docs/images.md)", "--multimodal-keys"),
    refused("validation sets are parquet files: `data.val`", "--eval-config"),
    refused("is for tests of slime", "--debug-*"),
    refused(
        "fp8 training is `transformer.fp8` of the engine, and other formats are not built in (docs/fp8.md)",
        "--fp8-* --transformer-impl",
    ),
    refused("weights go over with every step", "--keep-old-actor"),
    refused("prefill and decoding share a server", "--prefill-num-servers"),
)
