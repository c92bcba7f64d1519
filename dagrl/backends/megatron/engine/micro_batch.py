"""A packed micro-batch: rows concatenated without padding to equal length, in Megatron's form.

`step` divides a batch into these and runs the model on each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from dagrl.backends.megatron.engine.context_parallel import counting, zigzag_index
from dagrl.backends.megatron.engine.prefix_sharing import prefix_pack
from dagrl.backends.megatron.engine.transfer import to_device
from dagrl.backends.megatron.engine.vision import PackedImages, packed_images, seen
from dagrl.data.batch import Batch
from dagrl.data.packing import pack, pack_shared
from dagrl.data.prefix_tree import PrefixTree, prefix_tree
from dagrl.model_files.images import ImageSettings


@dataclass(frozen=True, slots=True)
class Repeats:
    """Rows that share tokens have R positions, but fewer outputs."""

    output: torch.Tensor
    """Output of each of the R positions, int64 [R]."""
    position: torch.Tensor
    """The positions whose output the rank reads, by output, int64 [Q]."""
    place: torch.Tensor
    """The output of each of them among those that the rank reads, int64 [Q], ascending."""
    bounds: np.ndarray
    """Index in `position` of the first of each of the P outputs, and Q, int64 [P + 1]."""

    @staticmethod
    def of(output: np.ndarray, own: np.ndarray, outputs: int, device: torch.device) -> Repeats:
        """`own` [P] are those of `outputs` that the rank reads."""
        local = np.full(outputs, -1, dtype=np.int64)
        local[own] = np.arange(len(own))
        place = local[output]
        position = np.argsort(place, kind="stable")[(place < 0).sum() :]
        bounds = np.searchsorted(place[position], np.arange(len(own) + 1))
        on_device = partial(to_device, device=device)
        return Repeats(on_device(output), on_device(position), on_device(place[position]), bounds)

    def of_part(self, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions of some of the rank's outputs, ascending, and the index of each one's output."""
        some = slice(self.bounds[part.start], self.bounds[part.stop])
        position, order = self.position[some].sort()
        return position, self.place[some][order] - part.start


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows of a batch on one rank. S rows have R positions at which the output is read.

    A context-parallel rank holds N of the pack's tokens, including padding, and reads P of the positions.
    """

    rows: np.ndarray
    """Positions in the batch, int64 [S]; empty on a rank without rows."""
    tokens: int
    """Tokens of the pack with padding, over all context-parallel ranks."""
    input_ids: torch.Tensor
    """Prompt, response and padding of each row, int64 [1, N]."""
    position_ids: torch.Tensor
    """Position of each token in its row, int64 [1, N]; of a vision-language model [3, 1, N]."""
    sequences: PackedSeqParams
    """Bounds of the rows in the whole pack."""
    reading: torch.Tensor
    """Indices among the rank's tokens at which the output is read, int64 [P]; in row order without `repeats`."""
    targets: torch.Tensor
    """The next token at each of them, int64 [P]."""
    temperature: torch.Tensor | None
    """The divisor of the logits of each of them, float32 [P]; None if the batch has no such column."""
    own: torch.Tensor | None
    """Which of the outputs the rank reads, int64 [P]; None if it reads all."""
    row: torch.Tensor
    """Row of each of the R positions, int64 [R], in 0..S-1."""
    outputs: int
    """Outputs that all ranks read: R, or fewer with `repeats`."""
    repeats: Repeats | None = None
    """Index of the output of each of the R positions, if rows share tokens; None if each has its own."""
    candidates: torch.Tensor | None = None
    """Token ids whose log-probs are read at each of them, int64 [P, k]; -1 for none."""
    teacher_hidden: torch.Tensor | None = None
    """A teacher's last hidden state at each of them, bfloat16 [P, its hidden size]; NaN for none."""
    routes: torch.Tensor | None = None
    """Experts of the rank's tokens, see `Routes`; None if its routers choose."""
    images: PackedImages | None = None
    """The images of the rows, on the first pipeline stage of a vision-language model."""

    def positions(self, part: slice) -> tuple[slice | torch.Tensor, torch.Tensor | None]:
        """Which of the R positions have some of the outputs that the rank reads, in row order.

        With `repeats`, also which of these outputs each position has.
        """
        if self.repeats is not None:
            return self.repeats.of_part(part)
        return (part if self.own is None else self.own[part]), None


@dataclass(frozen=True, slots=True)
class Routes:
    """Extracts a rank's share of recorded routes."""

    layers: np.ndarray
    """Layers with routers on this rank, counted from 0 over all stages."""
    sequence_rank: int = 0
    sequence_ranks: int = 1
    """Ranks that divide a context-parallel rank's tokens between tensor-parallel regions."""

    def of(self, batch: Batch, rows: np.ndarray, starts: np.ndarray, held: np.ndarray, tokens: int) -> np.ndarray:
        """Experts of the tokens that the rank's routers see, int16 [tokens, layers, chosen]; -1 if not recorded.

        `starts` are the positions of `rows` in a pack of `tokens`, `held` the positions of a context-parallel rank.
        Raises ValueError if a row's routes do not match its tokens.
        """
        column, lengths = batch["routed_experts"], _lengths(batch)
        packed = np.full((tokens, len(self.layers), column.values.shape[2]), -1, dtype=np.int16)
        for start, row in zip(starts, rows, strict=True):
            recorded = column[row]
            # The last token was never sent through the model. Rows may have no routes.
            if len(recorded) not in (0, lengths[row] - 1):
                raise ValueError(
                    f"row {batch.rows[row]} has {lengths[row]} tokens, but routes for {len(recorded)}; the generator "
                    "must record all but the last"
                )
            packed[start : start + len(recorded)] = recorded[:, self.layers]
        # Between tensor-parallel regions each rank has a part of the sequence, in rank order.
        return packed[held.reshape(self.sequence_ranks, -1)[self.sequence_rank]]


@dataclass(frozen=True, slots=True)
class Packing:
    """Parameters of packing on a rank."""

    alignment: int
    """Divides the length of every packed row; see `ParallelSpec.row_alignment`."""
    context_rank: int = 0
    context_ranks: int = 1
    at_row_end: bool = False
    """Read the output at each row's last token; else at every token that predicts a response token."""
    candidates: str | None = None
    """Column of token ids whose log-probs are read at each response token."""
    teacher_hidden: str | None = None
    """Column of a teacher's hidden states at each response token; see `TokenOutputs.hidden`."""
    routes: Routes | None = None
    """Set if the batch has ``routed_experts`` to replay."""
    vision: ImageSettings | None = None
    embeds: bool = True
    """Whether the rank embeds tokens, and images among them."""
    shared_prefix: int | None = None
    """Pack common prefixes of rows once, if they have at least this many tokens; None packs whole rows."""

    def bins(self, batch: Batch, budget: int, at_least: int = 1, *, whole_groups: bool = False) -> list[np.ndarray]:
        """Rows of each micro-batch of at most `budget` tokens with padding; empty for a batch without rows.

        With `whole_groups`, rows of one ``group_id`` stay together. ValueError if a row, or a group, exceeds the
        budget.
        """
        groups = batch["group_id"].values if whole_groups else None
        padded = self._padded(_lengths(batch))
        if self.shared_prefix is None or not len(batch):
            return pack(padded, budget, at_least, groups)
        rows = [_tokens(batch, row) for row in range(len(batch))]
        return pack_shared(rows, budget, at_least, groups, alignment=self.alignment, least=self.shared_prefix)

    def tokens(self, batch: Batch, rows: np.ndarray) -> int:
        return int(self._layout(batch, rows).padded.sum()) or self.alignment

    def micro_batch(
        self, batch: Batch, rows: np.ndarray, device: torch.device, tokens: int | None = None
    ) -> MicroBatch:
        """Pack `rows` of `batch`, padded to `tokens` if given, and extract this context-parallel rank's part.

        Without rows the micro-batch reads nothing: its rank still takes part in collectives.
        """
        layout = self._layout(batch, rows)
        padded, prompts = layout.padded, batch["prompt_tokens"].lengths[rows]
        assert (prompts > 0).all(), "the first response token needs a prompt to be predicted from"
        missing = (tokens or self.tokens(batch, rows)) - padded.sum()
        if missing:
            # A sequence of only padding.
            padded = np.append(padded, missing)
        token_ids = np.zeros(padded.sum(), dtype=np.int64)
        for places, row in zip(layout.places, rows, strict=True):
            token_ids[places] = _tokens(batch, row)
        # The output at the previous position predicts a token.
        bounds = (slice(-1, None) if self.at_row_end else slice(prompt - 1, -1) for prompt in prompts)
        read = [places[part] for places, part in zip(layout.places, bounds, strict=True)]
        counts = np.array([len(places) for places in read], dtype=np.int64)
        followers = [_tokens(batch, row)[-count:] for count, row in zip(counts, rows, strict=True) if count]
        held = zigzag_index(padded, self.context_rank, self.context_ranks)
        wanted, targets, repeats = _joined(read), _joined(followers), None
        # Rows of different sources may have different temperatures.
        heats, heat = np.unique(_temperatures(batch)[rows], return_inverse=True)
        heat = np.repeat(heat, counts)
        if layout.tree and self.candidates is None and self.teacher_hidden is None:
            # Rows that share a token share its outputs, unless each has its own candidates or teacher.
            wanted, targets, heat, repeats = _distinct(wanted, targets, heat)
        reading, own = _held_places(wanted, held, len(token_ids))
        positions = self._positions(batch, rows, layout, padded)

        on_device = partial(to_device, device=device)
        return MicroBatch(
            rows=rows,
            tokens=len(token_ids),
            input_ids=on_device(token_ids[held])[None],
            position_ids=on_device(positions[..., held]).unsqueeze(-2),
            sequences=prefix_pack(layout.tree, padded, positions, self.context_rank, self.context_ranks, device)
            if layout.tree
            else _sequences(padded, device),
            reading=on_device(reading),
            targets=on_device(targets[own]),
            temperature=on_device(heats[heat[own]]) if "temperature" in batch else None,
            own=on_device(own) if len(held) < len(token_ids) else None,
            row=on_device(np.repeat(np.arange(len(rows)), counts)),
            outputs=len(wanted),
            repeats=None if repeats is None else Repeats.of(repeats, own, len(wanted), device),
            # Without rows the rank may not know the number of candidates, or of chosen experts.
            candidates=on_device(_read_at(batch, self.candidates, rows, counts)[own].astype(np.int64))
            if self.candidates and len(rows)
            else None,
            teacher_hidden=on_device(_read_at(batch, self.teacher_hidden, rows, counts)[own]).view(torch.bfloat16)
            if self.teacher_hidden and len(rows)
            else None,
            routes=on_device(self.routes.of(batch, rows, layout.starts, held, len(token_ids)))
            if self.routes and len(rows)
            else None,
            images=packed_images(batch, rows, layout.starts, held, self.vision, device)
            if self.vision and self.embeds
            else None,
        )

    def _layout(self, batch: Batch, rows: np.ndarray) -> _PackLayout:
        if self.shared_prefix is not None and len(rows) > 1:
            tree = prefix_tree([_tokens(batch, row) for row in rows], self.shared_prefix)
            if len(tree.runs) != len(rows) or (tree.parents >= 0).any():
                return _PackLayout.of_runs(tree, self._padded(tree.lengths))
        lengths = _lengths(batch)[rows]
        return _PackLayout.of_rows(lengths, self._padded(lengths))

    def _positions(self, batch: Batch, rows: np.ndarray, layout: _PackLayout, padded: np.ndarray) -> np.ndarray:
        """Position of each token of the pack in its row, int64 [tokens], or [3, tokens] for a vision-language model."""
        if self.vision is None:
            first = np.append(layout.first, np.zeros(len(padded) - len(layout.first), dtype=np.int64))
            return counting(padded) + first.repeat(padded)
        prompts = [seen(batch, row, self.vision) for row in rows]
        parts = [prompt.positions(length) for prompt, length in zip(prompts, padded[: len(rows)], strict=True)]
        # Behind the rows there may be a sequence of only padding.
        return np.concatenate([*parts, *(np.tile(np.arange(length), (3, 1)) for length in padded[len(rows) :])], axis=1)

    def _padded(self, lengths: np.ndarray) -> np.ndarray:
        return -(-lengths // self.alignment) * self.alignment


@dataclass(frozen=True, slots=True)
class _PackLayout:
    """Positions of the rows' tokens in their pack, as whole rows or as the runs of a tree."""

    padded: np.ndarray
    """Length of each row or run in the pack, int64."""
    places: list[np.ndarray]
    """Place in the pack of each row's tokens."""
    first: np.ndarray
    """Position in its rows of the first token of each row or run, int64."""
    tree: PrefixTree | None = None

    @property
    def starts(self) -> np.ndarray:
        """Place in the pack of each row or run, int64."""
        return np.cumsum(self.padded) - self.padded

    @staticmethod
    def of_rows(lengths: np.ndarray, padded: np.ndarray) -> _PackLayout:
        starts = np.cumsum(padded) - padded
        places = [start + np.arange(length) for start, length in zip(starts, lengths, strict=True)]
        return _PackLayout(padded, places, np.zeros_like(padded))

    @staticmethod
    def of_runs(tree: PrefixTree, padded: np.ndarray) -> _PackLayout:
        starts = np.cumsum(padded) - padded
        runs = [start + np.arange(length) for start, length in zip(starts, tree.lengths, strict=True)]
        paths = [tree.path(int(end)) for end in tree.ends]
        first = np.zeros_like(padded)
        for run, parent in enumerate(tree.parents.tolist()):
            first[run] = first[parent] + len(tree.runs[parent]) if parent >= 0 else 0
        return _PackLayout(padded, [np.concatenate([runs[run] for run in path]) for path in paths], first, tree)


def _read_at(batch: Batch, name: str, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Values of a column at each of the R positions, [R, k]. ValueError if rows have other numbers of tokens."""
    column = batch[name].take(rows)
    if not np.array_equal(column.lengths, counts):
        row = batch.rows[rows[np.flatnonzero(column.lengths != counts)[0]]]
        raise ValueError(f"row {row} has another number of response tokens than places in `{name}`")
    return column.values


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _temperatures(batch: Batch) -> np.ndarray:
    return batch["temperature"].values if "temperature" in batch else np.ones(len(batch), dtype=np.float32)


def _distinct(
    places: np.ndarray, targets: np.ndarray, heats: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The places, targets and temperatures, by number, of the distinct reads, ascending, and the index of each read
    among them.
    """
    # As single numbers they are sorted many times faster than as columns.
    base, kinds = int(targets.max(initial=0)) + 1, int(heats.max(initial=0)) + 1
    reads, inverse = np.unique((places * base + targets) * kinds + heats, return_inverse=True)
    reads, heats = np.divmod(reads, kinds)
    return *np.divmod(reads, base), heats, inverse


def _tokens(batch: Batch, row: int) -> np.ndarray:
    parts = (batch["prompt_tokens"][row], batch["response_tokens"][row])
    return np.concatenate([part.astype(np.int64) for part in parts])


def _lengths(batch: Batch) -> np.ndarray:
    return batch["prompt_tokens"].lengths + batch["response_tokens"].lengths


def _held_places(places: np.ndarray, held: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of `places` in a pack of `tokens` the rank holds: their indices among its tokens, and among `places`."""
    local = np.full(tokens, -1, dtype=np.int64)
    local[held] = np.arange(len(held))
    own = np.flatnonzero(local[places] >= 0)
    return local[places[own]], own


def _sequences(padded: np.ndarray, device: torch.device) -> PackedSeqParams:
    # Padding belongs to its row: attention is causal, so the row's tokens never attend to it.
    bounds = to_device(np.concatenate([[0], np.cumsum(padded)]).astype(np.int32), device)
    longest = int(padded.max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
