"""Resolves the columns that nodes read and write, through ``read:``, ``read_from:`` and ``write:``.

`dag.py` builds the graph from the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dagrl.config.columns import COLUMN_NAME, CORE_COLUMNS, IMAGE_COLUMNS, RESPONSE_IMAGE_COLUMNS
from dagrl.config.errors import Place, listed, removal, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import (
    ROLLOUT_WRITES,
    TURN_COLUMNS,
    JudgeNode,
    MergeNode,
    NodeBase,
    OpContract,
    RewardModelNode,
    RewardNode,
    RolloutNode,
)

_ALL_NODES: Place = ("nodes",)
_ROLLOUT = "op: rollout"
_USUAL_WRITERS = {
    **dict.fromkeys(ROLLOUT_WRITES, _ROLLOUT),
    "turns": f"{_ROLLOUT}, tools: [...]",
    "token_turn": f"{_ROLLOUT}, tools: [...]",
    "token_reward": f"{_ROLLOUT}, environment: ...",
    "agent_reward": f"{_ROLLOUT}, agent: ...",
    "reward": "op: reward",
    "advantage": "op: advantage",
    "old_logprob": "op: logprob, write: old_logprob",
    "ref_logprob": "op: logprob, write: ref_logprob",
    "teacher_logprob": "op: logprob, engine: TEACHER, write: teacher_logprob",
    "logprob": "op: logprob",
    **dict.fromkeys(("topk_ids", "topk_logprob"), "op: logprob, top_k: ..."),
    **dict.fromkeys(
        ("teacher_topk_ids", "teacher_topk_logprob"), "op: logprob, write: teacher_logprob, top_k: ..., engine: TEACHER"
    ),
    "hidden_states": "op: logprob, hidden_states: true",
    "teacher_hidden_states": "op: logprob, write: teacher_logprob, hidden_states: true, engine: TEACHER",
    "entropy": "op: logprob, statistics: [entropy]",
    "prob_square_sum": "op: logprob, statistics: [prob_square_sum]",
    "value": "op: values, engine: CRITIC",
    "return": "op: advantage, estimator: gae",
    "is_expert": "op: mix",
    "is_replayed": "op: buffer, groups_per_step: ...",
    "clip_cov_mask": "op: covariance",
    "baseline_reward": "op: reward, write: baseline_reward",
}


class Reading(NamedTuple):
    """One column that one node reads."""

    reader: str
    op_column: str
    """The reader's name of the column."""
    writer: str
    column: str
    """Its name in the pipeline."""


class ColumnResolver:
    """Resolves the columns of all nodes, and reports problems."""

    def __init__(
        self,
        contracts: Mapping[str, OpContract],
        specs: Mapping[str, NodeBase],
        findings: Findings,
        *,
        source: str,
        shown: str = "",
    ) -> None:
        """`source`: the node of the data set. `shown`: the rollout whose responses the implicit nodes read, if there
        are several.
        """
        self._contracts = contracts
        self._specs = specs
        self._findings = findings
        self._shown = shown
        self._source = source
        self.outputs = {name: self._outputs_of(name) for name in contracts}
        """Node -> column it writes, by the op's name -> its name in the pipeline."""
        self._writers: dict[str, list[str]] = {}
        for name, outputs in self.outputs.items():
            for column in dict.fromkeys(outputs.values()):
                self._writers.setdefault(column, []).append(name)

    def readings(self) -> list[Reading]:
        """All readings, by reader in the order of the file."""
        # The columns of a wrong node are unknown, so a column without a writer may not be missing.
        complete = self._findings.trusted(_ALL_NODES)
        resolved: list[Reading] = []
        bare: dict[str, list[str]] = {}
        named: set[str] = set()
        missing: dict[str, list[tuple[str, str]]] = {}
        for reader, contract in self._contracts.items():
            sources = self._sources(reader)
            self._check_options(reader, sources)
            for op_column, source in sources.items():
                replaces_its_own = op_column in contract.replaces and self._writers.get(source) == [reader]
                if "." in source:
                    from_node = self._from_named_node(reader, op_column, source)
                    resolved += from_node
                    named.update(reading.column for reading in from_node)
                elif (writer := self._meant(reader, source)) is not None:
                    resolved.append(Reading(reader, op_column, writer, source))
                    named.add(source)
                elif op_column == "finish_reason" and op_column not in contract.reads:
                    # The column belongs to the responses that the node reads, so the choice is not ambiguous.
                    responses = (reading.writer for reading in resolved if reading[:2] == (reader, "response_tokens"))
                    if (response := next(responses, None)) and response in self._writers.get(source, ()):
                        resolved.append(Reading(reader, op_column, response, source))
                elif source in self._writers and not replaces_its_own:
                    bare.setdefault(source, []).append(reader)
                    resolved.append(Reading(reader, op_column, self._writers[source][0], source))
                elif op_column in contract.reads or source != op_column:
                    missing.setdefault(source, []).append((reader, op_column))
        if complete:
            for column, readers in missing.items():
                self._report_missing(column, readers)
            self._report_doubles(bare, named)
        # Columns about turns, and images in them, belong to the responses that a node reads, and images to the prompts
        # of the data set, which other nodes may replace.
        resolved = self._kept_beside("response_tokens", (*TURN_COLUMNS, *RESPONSE_IMAGE_COLUMNS), resolved)
        resolved = self._kept_beside("prompt_tokens", IMAGE_COLUMNS, resolved, otherwise=self._source)
        for reading in resolved:
            self._check_reading(reading)
        return resolved

    def _kept_beside(
        self, column: str, optional: Sequence[str], readings: list[Reading], otherwise: str | None = None
    ) -> list[Reading]:
        """Drop `optional` columns that a reader would take from another node than `column`.

        A reader without `column` keeps them, or, with `otherwise`, only the columns of that node.
        """
        writers = {reading.reader: reading.writer for reading in readings if reading.op_column == column}
        return [
            reading
            for reading in readings
            if reading.op_column not in optional
            or reading.op_column in self._contracts[reading.reader].reads
            or reading.writer == writers.get(reading.reader, otherwise or reading.writer)
        ]

    def warn_of_unread(self, readings: list[Reading]) -> None:
        """Warn of nodes without readers: their work is wasted."""
        read = {(reading.writer, reading.column) for reading in readings}
        for name, spec in self._specs.items():
            written = list(self.outputs[name].values())
            # Metrics read rewards, including rewards with names chosen by the user.
            if isinstance(spec, RewardNode | RewardModelNode | JudgeNode) and written != ["baseline_reward"]:
                continue
            if written and not any((name, column) in read for column in written):
                message = f"no node reads its columns ({listed(written)})"
                if written == ["logprob"]:
                    message = f"{message}; set `write: old_logprob` or `write: ref_logprob`"
                else:
                    message = removal(message)
                self._findings.warning(("nodes", name), message, "unread-node", depends_on=[_ALL_NODES])

    def _outputs_of(self, name: str) -> dict[str, str]:
        writes = self._contracts[name].writes
        outputs = {column: column for column in writes}
        place: Place = ("nodes", name, "write")
        spec = self._specs.get(name)
        given = spec.write if spec else None
        renames = spec.named(given, writes) if spec and isinstance(given, str) else given or {}
        if isinstance(given, str) and not renames:
            what = f"{len(writes)} columns ({listed(writes)})" if writes else "no column"
            message = f"the op writes {what}"
            message = f"{message}; write a mapping, `{{{writes[0]}: ...}}`" if writes else removal(message, key="write")
            self._findings.error(place, message, "wrong-number-of-columns")
            return outputs
        assert not isinstance(renames, str)
        for column, new_name in renames.items():
            inner = place if isinstance(given, str) else (*place, column)
            if column not in writes:
                message = f"the op writes no column `{column}`; {suggest(column, writes)}"
                self._findings.error(inner, message, "unknown-column")
            elif not COLUMN_NAME.fullmatch(new_name):
                rule = "begin with a lower-case letter, then use lower-case letters, digits and `_`"
                message = f"{new_name!r} is not the name of a column; {rule}"
                self._findings.error(inner, message, "invalid-column-name")
            else:
                outputs[column] = new_name
                self._check_kind(inner, column, new_name, f"`{name}` writes `{column}`, which is")
        for new_name in dict.fromkeys(outputs.values()):
            columns = [column for column, name in outputs.items() if name == new_name]
            if len(columns) > 1:
                message = f"{listed(columns)} would both be `{new_name}`; give them different names"
                self._findings.error(place, message, "duplicate-column")
        return outputs

    def _sources(self, reader: str) -> dict[str, str]:
        """Column that a node reads, by the op's name -> its source: a column, or ``node.column``."""
        contract, spec = self._contracts[reader], self._specs.get(reader)
        renames = spec.read if spec else {}
        # A reader of the data set's messages takes the images that they mark, also where an agent shows others.
        images = () if "prompt_tokens" in contract.reads else IMAGE_COLUMNS
        usual = {column: f"{self._source}.{column}" for column in images}
        return {
            column: renames.get(column, usual.get(column, column))
            for column in dict.fromkeys((*contract.reads, *contract.reads_if_written))
        }

    def _from_named_node(self, reader: str, op_column: str, source: str) -> list[Reading]:
        writer, _, column = source.partition(".")
        written = list(self.outputs[writer].values()) if writer in self._contracts else []
        if column in written:
            return [Reading(reader, op_column, writer, column)]
        if writer in self._contracts:
            message, code = f"`{writer}` writes no column `{column}`; {suggest(column, written)}", "unknown-column"
        else:
            message, code = f"there is no node `{writer}`; {suggest(writer, self._contracts)}", "unknown-node"
        self._findings.error(("nodes", reader, "read", op_column), message, code=code, depends_on=[("nodes", writer)])
        return []

    def _meant(self, reader: str, column: str) -> str | None:
        """The writer of `column` that `reader` selects by ``read_from``, or by default."""
        writers = self._writers.get(column, [])
        spec = self._specs.get(reader)
        named = next((node for node in (spec.read_from if spec else ()) if node in writers), None)
        if named is None and (replacing := self._replacing(column, writers)):
            others = [node for node in writers if node not in replacing]
            if reader in replacing and len(others) == 1:
                return others[0]
            if len(writers) == 2 and len(replacing) == 1:
                return replacing[0]
        if spec is None:
            return self._shown if len(writers) > 1 and self._shown in writers else None
        return named

    def _replacing(self, column: str, writers: Sequence[str]) -> list[str]:
        """The writers that read another writer's column and replace it for all other readers."""
        return [
            node for node in writers if any(self.outputs[node][own] == column for own in self._contracts[node].replaces)
        ]

    def _check_options(self, reader: str, sources: Mapping[str, str]) -> None:
        """Report columns of ``read`` that the op does not read, and nodes of ``read_from`` that write none of its
        columns.
        """
        spec = self._specs.get(reader)
        if spec is None:
            return
        for column in spec.read.keys() - sources.keys():
            message = f"the op reads no column `{column}`; {suggest(column, sources)}"
            self._findings.error(("nodes", reader, "read", column), message, "unknown-column")
        for index, node in enumerate(spec.read_from):
            if node not in self._contracts or node == reader:
                others = [name for name in self._contracts if name != reader]
                message, code = f"there is no other node `{node}`; {suggest(node, others)}", "unknown-node"
            elif not set(sources.values()) & set(self.outputs[node].values()):
                message, code = removal(f"`{reader}` reads no column that `{node}` writes"), "option-without-effect"
            else:
                continue
            where: Place = ("nodes", reader, "read_from", index)
            self._findings.error(where, message, code=code, depends_on=[("nodes", node)])

    def _report_missing(self, column: str, readers: list[tuple[str, str]]) -> None:
        samples = any(isinstance(spec, RolloutNode) for spec in self._specs.values())
        given = "demonstration" in self._writers
        reader, op_column = readers[0]
        replaced = op_column in self._contracts[reader].replaces
        if _USUAL_WRITERS.get(column) == _ROLLOUT and not samples and (replaced or not given):
            return  # The missing rollout is reported once.
        spec = self._specs.get(reader)
        renamed = spec is not None and op_column in spec.read
        place: Place = ("nodes", reader, "read", op_column) if renamed else ("nodes", reader)
        if spec is None:
            place = _ALL_NODES
        remedy = self._usual_remedy(column)
        if column == "response_tokens" and given and not samples:
            remedy = "take the data set's responses with `read: {response_tokens: demonstration}`"
        elif spec is not None and not renamed:
            remedy += " Otherwise" if remedy.endswith("?") else ", or"
            remedy += f" name another column with `read: {{{op_column}: ...}}`"
        names = listed(dict.fromkeys(name for name, _ in readers))
        message = f"column `{column}` is read by {names}, but no node writes it; {remedy}"
        self._findings.error(place, message, "missing-column")

    def _usual_remedy(self, column: str) -> str:
        if column == "demonstration":
            return "name the columns of the data set that hold responses in `data.responses`"
        kind = column.removeprefix("teacher_")
        of_teachers = [name for name in self._writers if kind.startswith("topk_") and name.endswith(kind)]
        if of_teachers and any(isinstance(spec, MergeNode) for spec in self._specs.values()):
            return f"add a node `{{op: merge, columns: [{', '.join(of_teachers)}], write: {column}}}`"
        usual_writer = _USUAL_WRITERS.get(column)
        return f"add a node `{{{usual_writer}}}`" if usual_writer else suggest(column, self._writers)

    def _report_doubles(self, bare: dict[str, list[str]], named: set[str]) -> None:
        """Report columns with several writers if a reader selects none; columns of one op are reported together."""
        doubled: dict[tuple[str, ...], list[str]] = {}
        for column, writers in self._writers.items():
            # A column without a reader may have several writers: a rollout writes more columns than are needed.
            matters = column in bare or (column not in named and len(self.outputs[writers[0]]) == 1)
            if len(writers) > 1 and matters:
                doubled.setdefault(tuple(writers), []).append(column)
        for several, columns in doubled.items():
            read = [column for column in columns if column in bare]
            place: Place = ("nodes", several[-1])
            names = f"column {listed(columns)} is" if len(columns) == 1 else f"columns {listed(read or columns)} are"
            remedy = "rename one of them with `write:`, or select one with "
            remedy += f"`read_from: [{several[0]}]`"
            if readers := dict.fromkeys(reader for column in read for reader in bare[column]):
                remedy += f" in {listed(readers)}"
            self._findings.error(place, f"{names} written by {listed(several)}; {remedy}", "ambiguous-column")

    def _check_reading(self, reading: Reading) -> None:
        if reading.writer == reading.reader:
            message = f"it reads `{reading.column}`, which it writes itself; rename one with `write:` or `read:`"
            several = [("nodes", name) for name in self._writers[reading.column] if name != reading.reader]
            self._findings.error(("nodes", reading.reader), message, "reads-itself", depends_on=several)
        elif reading.op_column != reading.column:
            writer_column = next(op for op, name in self.outputs[reading.writer].items() if name == reading.column)
            place: Place = ("nodes", reading.reader, "read", reading.op_column)
            self._check_kind(place, writer_column, reading.op_column, f"`{reading.writer}.{reading.column}` is")

    def _check_kind(self, place: Place, given: str, wanted: str, subject: str) -> None:
        """Built-in columns have a fixed kind: one may replace another only if the kinds agree."""
        one, other = CORE_COLUMNS.get(given), CORE_COLUMNS.get(wanted)
        if one and other and (one.shape, one.dtype) != (other.shape, other.dtype):
            kinds = f"{one.dtype} {one.shape.value}, but `{wanted}` is {other.dtype} {other.shape.value}"
            message = f"{subject} {kinds}; choose a column of the same kind"
            self._findings.error(place, message, "wrong-column-kind")
