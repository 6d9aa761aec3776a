"""What a rank needs at the moments of a backward pass where FSDP2 gathers its weights, as jobs.parallel.data has it do.

Called by memory; words and the other ways to keep weights are in backward.
"""
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.planner.backward import MASTER_BYTES, Bytes, Moment, Pass
from orchestrator.planner.units import Way
from orchestrator.planner.weights import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """Weights that FSDP2 gathers unit by unit. A message is there until the next one is made."""

    element: int
    reduced: int
    rows: Bytes
    each: bool
    apart: bool
    alone: bool  # nobody shares this rank's experts
    replicas: bool  # results are summed over these, and as they were sent kept until the step's end

    @property
    def sums(self) -> Bytes:
        """Whole ones are of the messages' precision."""
        if not self.each:
            return Bytes(self.reduced, self.reduced)
        sent = self.reduced / MASTER_BYTES if self.replicas else 0
        return Bytes(*((1 + sent) * rows for rows in self.rows))

    @property
    def replaces(self) -> bool:
        return not self.each

    def elsewhere(self, way: Way, *, begun: bool) -> float:
        """Whole weights of another stage, and its last message, which its next pass would end."""
        return self.element * way.total.total + self._left_behind(way) if begun else self.element * way.root

    def _left_behind(self, way: Way) -> float:
        return self.reduced * way.last if self.each else 0

    def moments(self, one: Pass) -> Iterator[Moment]:
        way, e, r, places = one.way, self.element, self.reduced, one.way.places
        sums = one.begun and not self.each  # are whole
        added = Bytes(0, 0)  # for good: sums, or in the last pass this rank's rows in place of them
        if not one.begun:  # what was sent is the first sum itself, where that is as precise
            added = self.rows if self.each and r == MASTER_BYTES else self.sums
        elif sums and one.reduces:
            added = Bytes(*(rows - r for rows in self.rows))
        # What autograd gives is of the weights' precision; it adds to sums of the same in place.
        new = 0 if sums and e == r else e
        end = Weights(way.root)
        held = new * way.root if way.is_tied else 0  # a tied embedding is FSDP's root, and complete behind all else
        stays, kept = (way.root, 0) if way.is_tied or one.keeps else (0, way.root)
        last = places[0].unit.total if way.root else 0  # the model's last unit is not dropped behind its forward

        def whole(units: float) -> float:
            return one.gathered + e * (way.total.total if one.stays else stays + units)

        before = self._left_behind(way) if one.begun else 0
        yield one.begins(whole(kept + last) + before)
        yield one.at(0, whole(kept + last) + new * way.root + before, gone=0)._replace(logits=one.logits_behind)
        if one.reduces and not way.is_tied:
            yield one.at(0, whole(kept + last) + self._reduction(end, sums=sums), gone=0)
            before = r * way.root or before
        opened = Weights(0) if way.is_tied else end
        for place in places:
            unit, left = place.unit.total, added.of(opened + place.before)
            done = place.before.total if one.keeps else 0
            message = before if place is places[0] else r * place.sent if one.reduces else 0
            amid = whole(done + unit + place.ahead) + held + message
            yield one.at(left, amid + e * way.widest, gone=place.gone, again=True)
            yield one.at(left, amid + new * unit, gone=place.then)
            if one.reduces:
                resharded = whole(done + place.ahead + (unit if one.keeps else 0))
                yield one.at(left, resharded + held + self._reduction(place.unit, sums=sums), gone=place.then)
        left = added.of(Weights(way.total.dense - way.begin - (way.root if way.is_tied else 0), way.total.experts))
        done = way.total.total - way.root if one.keeps else 0
        message = r * places[-1].unit.total if one.reduces else 0
        yield one.at(left, whole(max(done, way.begin)) + held + new * way.begin + message, gone=1)
        if one.reduces:
            yield one.at(left, whole(done) + held + self._reduction(Weights(way.begin), sums=sums), gone=1)
        if one.reduces and way.is_tied:
            yield one.at(left, whole(done) + self._reduction(end, sums=sums), gone=1)

    def _reduction(self, unit: Weights, *, sums: bool) -> float:
        """Messages, what they are made from, and what comes of them; of two the second is made from what is left by
        then. Of a message that nobody shares torch makes a quotient and a result, both as large."""
        r = self.reduced
        made_from = r if sums else self.element
        counted = r * unit.total if sums else 0
        result = self.rows.dense * unit.dense * ((r < MASTER_BYTES) + (0 if self.replicas else r / MASTER_BYTES))
        if not (self.apart and unit.experts):
            return (made_from + r) * unit.total + result - counted
        return max(made_from * unit.total + r * unit.experts,
                   made_from * unit.dense + (3 if self.alone else 1) * r * unit.experts,
                   (made_from + r) * unit.dense + (2 if self.alone else 1) * r * unit.experts + result) - counted
