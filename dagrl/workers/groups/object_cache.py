"""What a worker has already, so that messages to it say so instead of bringing it again.

For each ref in a message the worker has a question for the driver, and it takes a while to open the object. An update
reads what the log-probs of its rows were computed from, and those, which the same worker has made.
"""

from __future__ import annotations

from dataclasses import replace

import ray

from dagrl.workers.messages import Held, TaskWork


class Holdings:
    """Those of one worker of an engine, which takes up calls one by one, in the order in which they are sent."""

    def __init__(self) -> None:
        self._held: dict[int, dict[ray.ObjectRef, Held]] = {}
        """Step -> objects, by the names under which `dagrl.workers.object_cache` keeps them."""
        self._sent = 0

    def abridge(self, work: TaskWork) -> TaskWork:
        """Work that is about to be sent, with names of what is there, and one for what will be made of it."""
        self._held = {step: held for step, held in self._held.items() if step > work.committed}
        held = self._held.setdefault(work.step, {})

        def named(ref: ray.ObjectRef | Held) -> ray.ObjectRef | Held:
            assert not isinstance(ref, bytes), "work is abridged once"
            if ref in held:
                return held[ref]
            held[ref] = ref.binary()
            return ref

        parts = tuple(
            replace(part, sources=tuple(replace(each, refs=tuple(map(named, each.refs))) for each in part.sources))
            for part in work.parts
        )
        self._sent += 1
        return replace(work, parts=parts, keeps_as=b"made of work %d" % self._sent)

    def will_have(self, columns: ray.ObjectRef, work: TaskWork) -> None:
        """Note what the columns will be that the worker makes of abridged work, which was sent."""
        self._held[work.step][columns] = work.keeps_as
