"""Vector clocks: what each stream and each thread knows to be over."""

from __future__ import annotations

from collections.abc import Mapping


class Clock(dict[str, int]):
    """The latest moment of every actor that is known to be over. An actor is a stream or a thread of the host."""

    changes = 0  # how often it has learned something: what joined it since then knows no less

    def join(self, other: Mapping[str, int]) -> None:
        """Learns all that the other one knows."""
        known = self.get
        newer = {actor: moment for actor, moment in other.items() if known(actor, 0) < moment}
        if newer:
            self.update(newer)
            self.changes += 1

    def knows(self, actor: str, moment: int) -> bool:
        return self.get(actor, 0) >= moment

    def knows_all(self, other: Mapping[str, int]) -> bool:
        return all(self.knows(actor, moment) for actor, moment in other.items())

    def tick(self, actor: str) -> None:
        self[actor] = self.get(actor, 0) + 1
        self.changes += 1
