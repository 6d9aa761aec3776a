"""What a rank needs at the moments of a backward pass where its weights are whole: jobs.parallel.buckets' memory.

Called by memory; words and the other ways to keep weights are in backward.
"""
from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.planner.backward import MASTER_BYTES, Bytes, Moment, Pass
from orchestrator.planner.units import Way
from orchestrator.planner.weights import Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Whole weights, reduced by jobs.parallel.buckets. A message begins with the first of its gradients and is there
    until the next one is complete, or to the step's end where there is nothing to wait for."""

    element: int  # of a weight in what is computed with
    reduced: int  # of a gradient in a message
    rows: Bytes  # this rank's part of a sum
    weights: float  # beside their masters
    each: bool  # every pass is reduced, and its sum kept in this rank's rows
    once: bool  # there is one pass
    apart: bool  # experts have messages of their own
    waits: bool  # for every message before the next is sent
    in_place: bool  # there are none: nothing is shared, and gradients stay where they are made

    @property
    def sums(self) -> Bytes:
        """Of gradients between two passes; of whole ones they are the messages."""
        return self.rows if self.each else Bytes(MASTER_BYTES, MASTER_BYTES)

    @property
    def replaces(self) -> bool:
        """A stage's last pass makes rows of sums."""
        return not (self.each or self.once)

    def elsewhere(self, way: Way, *, begun: bool) -> float:
        """Of another stage; a message under way is waited for by the next one, of whatever stage."""
        return 0.0

    def moments(self, one: Pass) -> Iterator[Moment]:
        way, e, r, places, weights = one.way, self.element, self.reduced, one.way.places, self.weights
        reduced = self.replaces and one.reduces
        opens, closes = (0, way.root) if way.is_tied else (way.root, way.begin)
        added = self._added(one)
        end = self._last(places[-1].unit)
        message = r * (closes or end) if self.each and one.begun else 0  # of the pass before
        yield one.begins(weights + message)
        if one.is_split:
            yield from self._second_half(one)
            return
        root = Weights(opens)
        new = e * way.root if one.begun or not self.in_place else 0
        yield one.at(max(0, added.of(root)), weights + new + (r * opens if self.each else 0),
                     gone=0)._replace(logits=one.logits_behind)
        made = e * way.widest if one.begun or not self.in_place else 0
        amid = weights + made + (e * way.root if way.is_tied else 0)
        for place in places:
            left, messages = added.of(root + place.before), self._messages(
                0 if way.is_tied and place is places[0] else place.left, place.unit)
            grows = 0 if reduced else added.of(place.unit)
            results = self._made(place.unit) if reduced else 0
            yield one.at(left + (0 if self.in_place else grows), amid + messages, gone=place.gone, again=True)
            yield one.at(left + grows, amid + messages + results, gone=place.then)
        left = added.of(Weights(way.total.dense - closes, way.total.experts))
        message = r * (self.rows.dense / MASTER_BYTES * end + end) if self.each and closes else 0
        if way.is_tied:  # gradients of both its uses, and their sum
            yield one.at(left, weights + 3 * e * closes + message, gone=1)
        last = max(0, added.dense) * closes
        new = e * closes if one.begun or not self.in_place else 0
        yield one.at(left + last, weights + new + message + (r * closes if self.each else 0), gone=1)
        if reduced or self.once and not self.each:  # all is reduced, and not waited for
            yield one.at(added.of(way.total), weights + (r < MASTER_BYTES) * self._shared_rows(way.total), gone=1)

    def _added(self, one: Pass) -> Bytes:
        """What a pass leaves behind it: sums, or where they are reduced what comes of them."""
        if self.each or not (self.once or one.reduces):
            return Bytes(0, 0) if one.begun else self.sums
        r, gone = self.reduced, MASTER_BYTES if one.begun else 0
        kept = [r if rows == MASTER_BYTES else r / MASTER_BYTES * rows + (0 if self.waits else r) for rows in self.rows]
        return Bytes(*(each - gone for each in kept))

    def _made(self, unit: Weights) -> float:
        """Of sums: a message, where that has less precision, and its result."""
        copy = self.reduced * unit.total if self.reduced < MASTER_BYTES else 0
        return copy + self.reduced / MASTER_BYTES * self._shared_rows(unit)

    def _shared_rows(self, weights: Weights) -> float:
        """In float32, of weights that others share: beside a message that they are no part of."""
        return Bytes(*(0 if rows == MASTER_BYTES else rows for rows in self.rows)).of(weights)

    def _second_half(self, one: Pass) -> Iterator[Moment]:
        """All gradients of the stage come before any is moved to its message."""
        first, added = one.way.places[0], max(0, self._added(one).of(one.way.total))
        yield one.at(0, self.weights, gone=0, again=True)
        yield one.at(0, self.weights, gone=0)._replace(activations=one.activations + one.waiting)
        gradients = self.element * one.way.total.total
        opens = self.reduced * one.way.root if self.each else 0
        yield one.at(0, self.weights + max(gradients, added) + opens, gone=1)
        yield one.at(0, self.weights + max(gradients - self.element * one.way.root, added) +
                     self._messages(first.left, first.unit), gone=1)

    def _last(self, unit: Weights) -> int:
        """Of a unit's messages the second."""
        return unit.dense if self.apart else unit.total

    def _messages(self, left: int, unit: Weights) -> float:
        """The largest two in a row, of what was left last and of a unit; of the one under way with its result."""
        if not self.each:
            return 0
        share = self.rows.dense / MASTER_BYTES
        if self.apart and unit.experts:
            alone = self.rows.experts == MASTER_BYTES  # then they are added at once
            under_way = 0 if alone else (1 + self.rows.experts / MASTER_BYTES) * unit.experts
            return self.reduced * max((1 + share) * left + unit.experts, under_way + unit.dense)
        return self.reduced * ((1 + share) * left + unit.total)
