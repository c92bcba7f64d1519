"""A frozen teacher's output layer beside the student's, on the last pipeline stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from dagrl.backends.megatron.engine.model import unwrap
from dagrl.backends.runtime.initial_weights import weight_source
from dagrl.config.schema import ModelSpec
from dagrl.model_files.library_model import load_hf_config
from dagrl.model_files.tensor_names import OUTPUT


@dataclass(frozen=True, slots=True)
class TeacherHead:
    """A tensor-parallel rank's rows of the output layer, for the same tokens as those of the student's."""

    weight: torch.Tensor
    """[width, hidden size of the teacher]; rows of padding are 0."""
    cap: float | None
    """Bound on its logits: "Gemma 2" (arXiv 2408.00118), section 2."""

    @staticmethod
    def load(model: ModelSpec, chunks: Sequence[torch.nn.Module], vocab_size: int, seed: int) -> TeacherHead | None:
        """Read the rank's rows of the output layer, or of the embedding that is tied to it.

        None before the last pipeline stage. `chunks` and `vocab_size` are the student's; `seed` is for random weights.
        ValueError for weights that cannot be read, or are of another vocabulary.
        """
        if not parallel_state.is_pipeline_last_stage():
            return None
        config, source = load_hf_config(model), weight_source(model, seed)
        names = source.names()
        name = OUTPUT if OUTPUT in names else next(each for each in names if each.endswith("embed_tokens.weight"))
        if (found := source.shape(name)[0]) != vocab_size:
            raise ValueError(f"the teacher's {name} has {found} tokens, and the student's output layer {vocab_size}")
        last: Any = unwrap(chunks[-1])
        tied = last.share_embeddings_and_output_weights
        student = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
        width = len(student)
        first = width * parallel_state.get_tensor_model_parallel_rank()
        rows = source.get(name)[first : first + width]
        weight = student.new_zeros(width, rows.shape[1])
        weight[: len(rows)] = rows
        return TeacherHead(weight, getattr(config.get_text_config(), "final_logit_softcapping", None))

    def logits_of(self, hidden: torch.Tensor) -> Callable[[slice], torch.Tensor]:
        """The logits of parts of `hidden`, [T, hidden size], on this rank; [tokens, width] each."""
        hidden = hidden.to(self.weight.dtype)

        def logits(part: slice) -> torch.Tensor:
            given = hidden[part] @ self.weight.t()
            return given if self.cap is None else self.cap * torch.tanh(given / self.cap)

        return logits
