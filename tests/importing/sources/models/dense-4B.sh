MODEL_ARGS=(
   --swiglu
   --num-layers 36
   --hidden-size 2560
   --num-attention-heads 32
   --group-query-attention
   --num-query-groups 8
   --normalization "RMSNorm"
   --rotary-base "${ROTARY_BASE:-1000000}"
   --vocab-size 151936
)
