"""Resolves the columns that nodes read and write, through ``read:``, ``read_from:`` and ``write:``.

`dag.py` builds the graph from the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dagrl.config.errors import Place, listed, suggest
from dagrl.config.loading.positions import Findings
from dagrl.config.schema import NodeBase, RolloutNode
from dagrl.graph.columns import COLUMN_NAME, CORE_COLUMNS
from dagrl.graph.op_contracts import OF_TURNS, OpContract

_ALL_NODES: Place = ("nodes",)
_ROLLOUT = "op: rollout"
_USUAL_WRITERS = {
    "response_tokens": _ROLLOUT,
    "response_mask": _ROLLOUT,
    "rollout_logprob": _ROLLOUT,
    "policy_version": _ROLLOUT,
    "finish_reason": _ROLLOUT,
    "routed_experts": _ROLLOUT,
    "turns": f"{_ROLLOUT}, tools: [...]",
    "token_turn": f"{_ROLLOUT}, tools: [...]",
    "token_reward": f"{_ROLLOUT}, environment: ...",
    "reward": "op: reward",
    "advantage": "op: advantage",
    "old_logprob": "op: logprob, write: old_logprob",
    "ref_logprob": "op: logprob, write: ref_logprob",
    "logprob": "op: logprob",
    "value": "op: values, engine: CRITIC",
    "return": "op: advantage, estimator: gae",
    "is_expert": "op: mix",
    "clip_cov_mask": "op: covariance",
    "baseline_reward": "op: reward, write: baseline_reward",
}


class Reading(NamedTuple):
    """One column that one node reads."""

    reader: str
    op_column: str
    """The reader's own name for it."""
    writer: str
    column: str
    """Its name in the pipeline."""


class ColumnResolver:
    """Resolves the columns of all nodes, and reports problems."""

    def __init__(
        self, contracts: Mapping[str, OpContract], specs: Mapping[str, NodeBase], findings: Findings, shown: str = ""
    ) -> None:
        """`shown`: the rollout whose responses the implicit nodes read, if there are several."""
        self._contracts = contracts
        self._specs = specs
        self._findings = findings
        self._shown = shown
        self.outputs = {name: self._outputs_of(name) for name in contracts}
        """Node -> column it writes, by the op's own name -> its name in the pipeline."""
        self._writers: dict[str, list[str]] = {}
        for name, outputs in self.outputs.items():
            for column in dict.fromkeys(outputs.values()):
                self._writers.setdefault(column, []).append(name)

    def readings(self) -> list[Reading]:
        """All readings, by reader in the order of the file."""
        # The columns of a wrong node are unknown, so a column without a writer may not be missing.
        complete = self._findings.trusted(_ALL_NODES)
        found: list[Reading] = []
        bare: dict[str, list[str]] = {}
        named: set[str] = set()
        missing: dict[str, list[tuple[str, str]]] = {}
        for reader, contract in self._contracts.items():
            renames = self._renames_of(reader)
            self._check_read_from(reader)
            for op_column in (*contract.reads, *contract.reads_if_written):
                source = renames.get(op_column, op_column)
                if "." in source:
                    readings = self._from_named_node(reader, op_column, source)
                    found += readings
                    named.update(reading.column for reading in readings)
                elif (writer := self._meant(reader, source)) is not None:
                    found.append(Reading(reader, op_column, writer, source))
                    named.add(source)
                elif source in self._writers and not self._replaces_its_own(reader, op_column, source):
                    bare.setdefault(source, []).append(reader)
                    found.append(Reading(reader, op_column, self._writers[source][0], source))
                elif op_column in contract.reads or op_column in renames:
                    missing.setdefault(source, []).append((reader, op_column))
        if complete:
            for column, readers in missing.items():
                self._report_missing(column, readers)
            self._report_doubles(bare, named)
        found = self._without_foreign_turns(found)
        for reading in found:
            self._check_reading(reading)
        return found

    def _without_foreign_turns(self, found: list[Reading]) -> list[Reading]:
        """Drop optional columns about the turns of other responses than those that a node reads."""
        responses = {each.reader: each.writer for each in found if each.op_column == "response_tokens"}

        def foreign(each: Reading) -> bool:
            if each.op_column not in OF_TURNS or each.op_column in self._contracts[each.reader].reads:
                return False
            return each.reader in responses and each.writer != responses[each.reader]

        return [each for each in found if not foreign(each)]

    def warn_of_unread(self, readings: list[Reading]) -> None:
        """Warn of nodes without readers: their work is wasted."""
        read = {(reading.writer, reading.column) for reading in readings}
        for name in self._specs:
            written = list(self.outputs[name].values())
            if written and not any((name, column) in read for column in written):
                hint = "set `write: old_logprob` or `write: ref_logprob`" if written == ["logprob"] else "remove it"
                message = f"no node reads its columns ({listed(written)}); {hint}"
                self._findings.warning(("nodes", name), message, code="unread-node", depends_on=[_ALL_NODES])

    def _outputs_of(self, name: str) -> dict[str, str]:
        writes = self._contracts[name].writes
        spec = self._specs.get(name)
        outputs = {column: column for column in writes}
        place: Place = ("nodes", name, "write")
        if spec is None or spec.write is None:
            return outputs
        if isinstance(spec.write, str):
            if len(writes) != 1:
                what = f"{len(writes)} columns ({listed(writes)})" if writes else "no column"
                example = f"write a mapping, `{{{writes[0]}: ...}}`" if writes else "remove `write`"
                self._findings.error(place, f"the op writes {what}; {example}", code="wrong-number-of-columns")
                return outputs
            renames = {writes[0]: spec.write}
        else:
            renames = spec.write
        for column, new_name in renames.items():
            inner = place if isinstance(spec.write, str) else (*place, column)
            if column not in writes:
                message = f"the op writes no column `{column}`; {suggest(column, writes)}"
                self._findings.error(inner, message, code="unknown-column")
            elif not COLUMN_NAME.fullmatch(new_name):
                rule = "begin with a lower-case letter, then use lower-case letters, digits and `_`"
                message = f"{new_name!r} is not the name of a column; {rule}"
                self._findings.error(inner, message, code="invalid-column-name")
            else:
                outputs[column] = new_name
                self._check_kind(inner, column, new_name, f"`{name}` writes `{column}`, which is")
        self._check_own_doubles(place, outputs)
        return outputs

    def _check_own_doubles(self, place: Place, outputs: dict[str, str]) -> None:
        for new_name in dict.fromkeys(outputs.values()):
            columns = [column for column, name in outputs.items() if name == new_name]
            if len(columns) > 1:
                message = f"{listed(columns)} would both be `{new_name}`; give them different names"
                self._findings.error(place, message, code="duplicate-column")

    def _renames_of(self, reader: str) -> dict[str, str]:
        spec = self._specs.get(reader)
        if spec is None:
            return {}
        contract = self._contracts[reader]
        known = (*contract.reads, *contract.reads_if_written)
        for column in spec.read:
            if column not in known:
                message = f"the op reads no column `{column}`; {suggest(column, known)}"
                self._findings.error(("nodes", reader, "read", column), message, code="unknown-column")
        return {column: source for column, source in spec.read.items() if column in known}

    def _from_named_node(self, reader: str, op_column: str, source: str) -> list[Reading]:
        place: Place = ("nodes", reader, "read", op_column)
        writer, _, column = source.partition(".")
        if writer not in self._contracts:
            message = f"there is no node `{writer}`; {suggest(writer, self._contracts)}"
            self._findings.error(place, message, code="unknown-node", depends_on=[("nodes", writer)])
            return []
        if column not in self.outputs[writer].values():
            message = f"`{writer}` writes no column `{column}`; {suggest(column, self.outputs[writer].values())}"
            self._findings.error(place, message, code="unknown-column", depends_on=[("nodes", writer)])
            return []
        return [Reading(reader, op_column, writer, column)]

    def _meant(self, reader: str, column: str) -> str | None:
        """The writer of `column` that `reader` selects by ``read_from``, or by default."""
        writers = self._writers.get(column, [])
        spec = self._specs.get(reader)
        named = next((node for node in (spec.read_from if spec else ()) if node in writers), None)
        if named is None and len(writers) == 2 and (replacing := self._replacing(column, writers)) is not None:
            (other,) = (node for node in writers if node != replacing)
            return other if reader == replacing else replacing
        if spec is None:
            return self._shown if len(writers) > 1 and self._shown in writers else None
        return named

    def _replacing(self, column: str, writers: Sequence[str]) -> str | None:
        """The one of two writers that reads the column of the other and replaces it for all other readers."""
        found = [
            node for node in writers if any(self.outputs[node][own] == column for own in self._contracts[node].replaces)
        ]
        return found[0] if len(found) == 1 else None

    def _replaces_its_own(self, reader: str, op_column: str, column: str) -> bool:
        """Whether a node that replaces a column finds no other writer of it."""
        return op_column in self._contracts[reader].replaces and self._writers[column] == [reader]

    def _check_read_from(self, reader: str) -> None:
        spec = self._specs.get(reader)
        for place, node in enumerate(spec.read_from if spec else ()):
            if node not in self._contracts or node == reader:
                others = [name for name in self._contracts if name != reader]
                message = f"there is no other node `{node}`; {suggest(node, others)}"
                where: Place = ("nodes", reader, "read_from", place)
                self._findings.error(where, message, code="unknown-node", depends_on=[("nodes", node)])
            elif not self._reads_of(reader) & set(self.outputs[node].values()):
                message = f"`{reader}` reads no column that `{node}` writes; remove it"
                where = ("nodes", reader, "read_from", place)
                self._findings.error(where, message, code="option-without-effect", depends_on=[("nodes", node)])

    def _reads_of(self, reader: str) -> set[str]:
        """Columns of the pipeline that a node reads, or would read if they were written."""
        contract, renames = self._contracts[reader], self._renames_of(reader)
        return {renames.get(column, column) for column in (*contract.reads, *contract.reads_if_written)}

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
        self._findings.error(place, message, code="missing-column")

    def _usual_remedy(self, column: str) -> str:
        if column == "demonstration":
            return "name the columns of the data set that hold responses in `data.responses`"
        usual_writer = _USUAL_WRITERS.get(column)
        return f"add a node `{{{usual_writer}}}`" if usual_writer else suggest(column, self._writers)

    def _report_doubles(self, bare: dict[str, list[str]], named: set[str]) -> None:
        """Report columns with several writers of which a reader does not select one; those of one op together."""
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
            self._findings.error(place, f"{names} written by {listed(several)}; {remedy}", code="ambiguous-column")

    def _check_reading(self, reading: Reading) -> None:
        if reading.writer == reading.reader:
            message = f"it reads `{reading.column}`, which it writes itself; rename one with `write:` or `read:`"
            several = [("nodes", name) for name in self._writers[reading.column] if name != reading.reader]
            self._findings.error(("nodes", reading.reader), message, code="reads-itself", depends_on=several)
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
            self._findings.error(place, message, code="wrong-column-kind")
