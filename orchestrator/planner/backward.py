"""The moments of one backward pass at which a rank may need most: what it has then of gradients, of whole weights and
of messages, and what is left of activations and logits.

Called by memory with every scene of a rank. Weights are kept in one of two ways, those of jobs.parallel: whole, with
buckets, or sharded, by FSDP2; other trainers know a third. All is bytes of one rank; which passes are looked at is in
scenes.
"""
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.planner.units import Way
from orchestrator.planner.weights import Weights

MASTER_BYTES = 4  # of float32 weights, and of the sums of their gradients


class Moment(NamedTuple):
    gradients: float  # sums of them
    gathered: float  # whole weights, and gradients that are in no sum yet, with their messages
    activations: float
    logits: float


class Pass(NamedTuple):
    """A backward pass through one stage."""

    way: Way
    activations: float  # held when it begins
    own: float  # of these the ones of its own microbatch, which it leaves behind
    again: float  # of a block while it goes through that, beside what was kept of it
    waiting: float  # gradients of outputs that its first half hands to its second
    logits: float  # at the loss, with those of microbatches whose backward is still to come
    logits_behind: float  # when the projection's weights get their gradient
    logits_left: float  # of the other microbatches
    gradients: float  # of all stages, when it begins
    gathered: float  # weights of other stages that are whole
    is_split: bool
    begun: bool  # gradients of this stage exist
    reduces: bool  # gradients of this stage are complete with it, and reduced
    stays: bool  # weights of this stage have been whole since another backward
    keeps: bool  # what it gathers stays whole, for the next forward

    def begins(self, gathered: float) -> Moment:
        return Moment(self.gradients, gathered, self.activations, self.logits)

    def at(self, more: float, gathered: float, *, gone: float, again: bool = False) -> Moment:
        """`more`: in sums of gradients. `gone`: share of its way that lies behind it. `again`: amid a block."""
        return Moment(self.gradients + more, gathered,
                      self.activations - gone * self.own + (self.again if again else 0), self.logits_left)


class Bytes(NamedTuple):
    """Per weight; experts may be shared by other ranks."""

    dense: float
    experts: float

    def of(self, weights: Weights) -> float:
        return self.dense * weights.dense + self.experts * weights.experts


class Kept:
    """Weights and gradients have a place of their own for the whole step (Megatron-LM), which is counted elsewhere."""

    sums = Bytes(0, 0)
    replaces = False

    def elsewhere(self, way: Way, *, begun: bool) -> float:
        return 0.0

    def moments(self, one: Pass) -> Iterator[Moment]:
        yield one.begins(0.0)
        yield one.at(0.0, 0.0, gone=0, again=True)


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
