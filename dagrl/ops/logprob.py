"""``logprob``: log-probs of the sampled tokens under an engine's current, initial or averaged weights, or from a model
behind an endpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dagrl.backends.base import TokenOutputs
from dagrl.backends.serving.scoring import topk_columns
from dagrl.config.schema import LogprobNode
from dagrl.data.batch import Batch, Column
from dagrl.endpoint import EndpointError, EndpointSetupError, ScoredTokens, endpoint_of
from dagrl.ops.base import Context, OpInput, Output
from dagrl.ops.selected_rows import selected_rows
from dagrl.ops.trajectories import spread_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The replacement character, for a part of a character, which servers write differently."""
_SPACES = "\N{LOWER ONE EIGHTH BLOCK}\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"


class TeacherError(ValueError):
    """A response without log-probs; the message names the sample and the endpoint."""


def logprob(parts: Sequence[OpInput], context: Context) -> Iterator[Output]:
    """Yield the log-probs of each shard, with the node's other columns.

    Logits are divided by the sampling temperature.
    """
    node = context.declared(LogprobNode)
    # A rank without rows still takes part, because other ranks may have rows.
    chosen = [selected_rows(node, part.batch, context) for part in parts]
    batches = [part.batch if rows is None else part.batch.take(rows) for part, rows in zip(parts, chosen, strict=True)]
    scored = (_over_endpoint if node.endpoint else _on_engine)(batches, node, context)
    for part, rows, columns in zip(parts, chosen, scored, strict=True):
        if rows is not None:
            is_selected = np.isin(np.arange(len(part.batch)), rows)
            offsets = np.concatenate([[0], np.cumsum(part.batch["response_tokens"].lengths)])
            columns = spread_rows(columns, is_selected, offsets)
        yield Output((part.index,), part.batch.rows, columns)


def _on_engine(batches: Sequence[Batch], node: LogprobNode, context: Context) -> Iterator[dict[str, Column]]:
    engine = context.trainer
    outputs = TokenOutputs(
        top_k=node.top_k or 0,
        at=node.candidates,
        entropy="entropy" in node.statistics,
        square_sum="prob_square_sum" in node.statistics,
        hidden=node.hidden_states,
    )
    with context.scored_weights():
        for batch in batches:
            given = context.with_temperatures(batch)
            how: Any = {"temperature": context.temperature, "tokens_per_micro_batch": node.tokens_per_micro_batch}
            if outputs.further:
                yield engine.token_outputs(given, outputs, **how)
            else:
                yield {"logprob": engine.logprobs(given, **how)}


def _over_endpoint(batches: Sequence[Batch], node: LogprobNode, context: Context) -> Iterator[dict[str, Column]]:
    """The log-probs of each batch; the rows of all are sent at once, up to the node's limit."""
    endpoint = context.resources.once(f"endpoint of {node!r}", lambda: endpoint_of(node))
    pool, top_k = ThreadPoolExecutor(node.concurrency, thread_name_prefix="logprob"), node.top_k or 0

    def score(prompt: np.ndarray, response: np.ndarray) -> ScoredTokens:
        scored = endpoint.score(prompt, response, top_k) if len(response) else ScoredTokens.none(top_k)
        if scored.texts is not None:
            compare_texts(scored.texts, response, context.resources.tokenizer)
        return scored

    asked: list[list[Future[ScoredTokens]]] = [
        [pool.submit(score, batch["prompt_tokens"][row], batch["response_tokens"][row]) for row in range(len(batch))]
        for batch in batches
    ]
    try:
        for batch, futures in zip(batches, asked, strict=True):
            scored = [_scored(future, row) for future, row in zip(futures, batch.rows.tolist(), strict=True)]
            columns = {"logprob": Column.ragged([each.logprobs for each in scored], "float32")}
            if top_k:
                ids, logprobs = [each.top_ids for each in scored], [each.top_logprobs for each in scored]
                columns |= topk_columns(ids, logprobs, top_k)
            yield columns
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _scored(asked: Future[ScoredTokens], row: int) -> ScoredTokens:
    try:
        return asked.result()
    except EndpointSetupError as error:
        raise TeacherError(f"the teacher cannot be asked: {error}") from error
    except EndpointError as error:
        raise TeacherError(f"the teacher has not scored sample {row}: {error}") from error


def compare_texts(theirs: Sequence[str], response: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise EndpointError if a server that returns no ids has scored another token, by its text.

    Servers write a token as its decoded text or its vocabulary entry, with or without the space before it. A part of a
    character has no text, and special tokens may be omitted.
    """
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(token for token, how in added if how.special)}
    for token, given in zip(response.tolist(), theirs, strict=True):
        own, text = tokenizer.decode([token]), str(given)
        if _REPLACEMENT in own or (token in special and not text):
            continue
        if own.strip() not in (text.strip(), text.strip().strip(_SPACES)) and text != tokenizer.convert_ids_to_tokens(
            token
        ):
            raise EndpointError(f"{text[:40]!r} is scored in place of {own[:40]!r}; is its tokenizer the policy's?")
