"""Packs whose rows share prefixes: each run of a `PrefixTree` is computed once, forwards and backwards.

Attention of a run goes over the keys of the runs before it and its own, aligned at the end, as in Transformer Engine's
bottom-right causal mask. The keys and values are gathered for each run, so that any kernel for packed sequences will
do, and the gradient of a shared key is the sum over the runs that read it. All other operations of a layer are per
token.

"Prefix Grouper" (arXiv 2506.05433) shares the prompt of a group; this shares any prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import embedding_bag

from dagrl.backends.megatron.engine.context_parallel import zigzag_index
from dagrl.backends.megatron.engine.transfer import to_device
from dagrl.data.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Readers:
    """The copies of each of T tokens among K gathered keys. Nearly all tokens outside of prefixes have one copy."""

    first: torch.Tensor
    """The first copy of each token, int64 [T]; arbitrary for a token without copies."""
    others: torch.Tensor
    """Tokens with several copies, or none, int64 [S]."""
    copies: torch.Tensor
    """All copies of each of them, one after the other, int64."""
    bounds: torch.Tensor
    """Bounds of each token's copies in `copies`, int64 [S + 1]."""

    @staticmethod
    def of(keys: np.ndarray, tokens: int, device: torch.device) -> Readers:
        """`keys`, int64 [K], are the tokens that were gathered."""
        order = keys.argsort(kind="stable")
        counts = np.bincount(keys, minlength=tokens)
        begins = np.cumsum(counts) - counts
        others = np.flatnonzero(counts != 1)
        first = order[np.minimum(begins, len(order) - 1)]
        arrays = (first, others, order[(counts != 1).repeat(counts)], _bounds(counts[others], np.int64))
        return Readers(*(to_device(array, device) for array in arrays))


@dataclass
class PrefixPack(PackedSeqParams):
    """The parameters of a pack of runs.

    Megatron's own fields describe a single sequence of all tokens, with one rotary angle for each.
    """

    angles: torch.Tensor | None = None
    """Position of each token in its rows, where Megatron looks for its angle, int64 [tokens of all ranks]."""
    keys: torch.Tensor | None = None
    """Keys that the queries attend to, run after run, int64 [K]: indices among the tokens of all context-parallel
    ranks, concatenated."""
    readers: Readers | None = None
    """The inverse of `keys`."""
    attention: PackedSeqParams | None = None
    """Bounds of the queries and of `keys`, aligned at the end of each."""


@dataclass(frozen=True, slots=True)
class _MaskType:
    """A value in place of Megatron's ``AttnMaskType``, which lacks this mask."""

    name: str = "padding_causal_bottom_right"


def prefix_pack(
    tree: PrefixTree, padded: np.ndarray, positions: np.ndarray, rank: int, ranks: int, device: torch.device
) -> PrefixPack:
    """The parameters of a pack of the runs of `tree`, for one of `ranks` context-parallel ranks.

    `padded` are the lengths of the runs in the pack, int [runs], possibly with one of only padding; `positions` are the
    positions of all its tokens in their rows, int64 [tokens].
    """
    starts = np.cumsum(padded) - padded
    queries, keys = _attended(tree, padded, starts, rank, ranks)
    gathered = np.concatenate([zigzag_index(padded, other, ranks) for other in range(ranks)]).argsort()
    held = zigzag_index(padded, rank, ranks)

    on_device = partial(to_device, device=device)
    whole = on_device(np.array([0, len(positions)], dtype=np.int32))
    longest = int(positions.max()) + 1
    read = gathered[np.concatenate(keys)]
    return PrefixPack(
        qkv_format="thd",
        cu_seqlens_q=whole,
        cu_seqlens_kv=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        angles=on_device(_angles(positions[held], rank, ranks)),
        keys=on_device(read),
        readers=Readers.of(read, len(gathered), device),
        attention=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=on_device(_bounds(queries)),
            cu_seqlens_kv=on_device(_bounds([len(places) for places in keys])),
            max_seqlen_q=max(queries),
            max_seqlen_kv=max(len(places) for places in keys),
            # Keys are gathered: the kernel has nothing to exchange.
            local_cp_size=1,
        ),
    )


def _attended(
    tree: PrefixTree, padded: np.ndarray, starts: np.ndarray, rank: int, ranks: int
) -> tuple[list[int], list[np.ndarray]]:
    """Length of each piece of queries that the rank holds, in order, and the places in the pack of its keys."""
    queries: list[int] = []
    keys: list[np.ndarray] = []
    before: list[np.ndarray] = []
    for run, length in enumerate(padded.tolist()):
        start = int(starts[run])
        earlier = np.zeros(0, dtype=np.int64)
        if run < len(tree.runs):
            if (parent := int(tree.parents[run])) >= 0:
                # Excludes the padding of earlier runs.
                own = np.arange(len(tree.runs[parent])) + starts[parent]
                earlier = np.concatenate([before[parent], own])
            before.append(earlier)
        # As in `zigzag_index`: a rank holds one chunk from the front of a run and one from its end.
        chunk = length if ranks == 1 else length // (2 * ranks)
        for piece in [0] if ranks == 1 else [rank, 2 * ranks - 1 - rank]:
            queries.append(chunk)
            keys.append(np.concatenate([earlier, start + np.arange((piece + 1) * chunk)]))
    return queries, keys


def _bounds(lengths: Sequence[int] | np.ndarray, dtype: type = np.int32) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def _angles(held: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """Positions of the rank's tokens, where Megatron reads the angles of a rank of a single sequence."""
    if ranks == 1:
        return held
    angles = np.zeros(len(held) * ranks, dtype=np.int64)
    half = len(held) // 2
    angles[rank * half : (rank + 1) * half] = held[:half]
    angles[len(angles) - (rank + 1) * half : len(angles) - rank * half] = held[half:]
    return angles


def share_prefixes(model: torch.nn.Module) -> None:
    """Make a model's rotary embeddings and attention accept a `PrefixPack`."""
    for module in model.modules():
        # Latent attention has a rotary embedding in each layer.
        if isinstance(rotary := getattr(module, "rotary_pos_emb", None), torch.nn.Module):
            selection = _AngleSelection()
            module.register_forward_pre_hook(selection.begin, with_kwargs=True)
            rotary.register_forward_hook(selection.select)
        if isinstance(attention := getattr(module, "core_attention", None), torch.nn.Module):
            attention.register_forward_pre_hook(_gather_keys, with_kwargs=True)


class _AngleSelection:
    def __init__(self) -> None:
        self._angles: torch.Tensor | None = None

    def begin(self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Before the module that computes the angles, also when it is computed again in the backward pass."""
        pack = kwargs.get("packed_seq_params")
        self._angles = pack.angles if isinstance(pack, PrefixPack) else None

    def select(
        self, module: torch.nn.Module, args: tuple[object, ...], output: torch.Tensor | tuple[torch.Tensor, float]
    ) -> torch.Tensor | tuple[torch.Tensor, float]:
        """The angles of all tokens, from those of all positions; YaRN returns its factor too."""
        if self._angles is None:
            return output
        if isinstance(output, tuple):
            return output[0].index_select(0, self._angles), output[1]
        return output.index_select(0, self._angles)


def _gather_keys(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, object]
) -> tuple[tuple[torch.Tensor, ...], dict[str, object]] | None:
    """Before attention: give each run the keys and values that it attends to."""
    pack = kwargs.get("packed_seq_params")
    if not isinstance(pack, PrefixPack):
        return None
    query, key, value, *rest = args
    if (group := parallel_state.get_context_parallel_group()).size() > 1:
        # The backward pass sums the gradients of all ranks' queries.
        both = gather_from_sequence_parallel_region(torch.cat([key, value], dim=-1), group=group)
        key, value = both.split([key.shape[-1], value.shape[-1]], dim=-1)
    key, value = (_GatheredTokens.apply(tensor, pack.keys, pack.readers) for tensor in (key, value))
    return (query, key, value, *rest), {**kwargs, "packed_seq_params": pack.attention, "attn_mask_type": _MaskType()}


class _ReadersContext(FunctionCtx):
    readers: Readers


class _GatheredTokens(torch.autograd.Function):
    """``tensor.index_select(0, keys)``, whose gradient is the sum over a token's copies, without atomics.

    A bag of embeddings is such a sum, in float32. Gradients of tokens with a single copy are copied, which is faster.
    """

    @staticmethod
    def forward(ctx: _ReadersContext, tensor: torch.Tensor, keys: torch.Tensor, readers: Readers) -> torch.Tensor:
        ctx.readers = readers
        return tensor.index_select(0, keys)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ReadersContext, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        readers = ctx.readers
        rows = grad.reshape(len(grad), -1)
        total = rows.index_select(0, readers.first)
        sums = embedding_bag(readers.copies, rows, readers.bounds, mode="sum", include_last_offset=True)
        total.index_copy_(0, readers.others, sums)
        return total.view(-1, *grad.shape[1:]), None, None
