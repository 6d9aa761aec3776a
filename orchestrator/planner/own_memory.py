"""What a layout of an own model holds: its question, the pieces of each stage, and bytes from what was measured.

Called by planner.own_cost and by orc verify. The rules are those of jobs.parallel, as in planner.memory; where a
ModelSpec has formulas, an own model has counts (jobs.spec.own_model).
"""
import math
from dataclasses import dataclass, replace

from jobs.spec.own_model import Measured, OwnModel, OwnProfile, Piece
from jobs.spec.parallel import Layout
from jobs.spec.training import DTYPE_BYTES, TrainingSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.planner.memory import ADAM_BYTES, MASTER_BYTES
from orchestrator.planner.peaks import peak_held
from orchestrator.planner.plan import StageMemory


GATHERED_UNITS = 2  # FSDP2 gathers the next unit while the present one computes
DRAWING_BYTES = 16  # of each number, twice, while a mask of dropout is drawn (jobs.model.places.mix)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnQuestion:
    """An own model, measured, and what it is to be trained on."""

    model: OwnModel
    profile: OwnProfile
    training: TrainingSpec
    cluster: ClusterSpec
    headroom: float

    def measured(self, layout: Layout) -> Measured:
        split = layout.sequence_parallel and layout.dims.tp > 1
        return next(m for m in self.profile.measured if (m.tp, m.sequence_parallel) == (layout.dims.tp, split))


def stage_pieces(measured: Measured, layout: Layout, stage: int) -> tuple[Piece, ...]:
    """What a stage computes, in order."""
    blocks = tuple(measured.blocks[i] for i in layout.layers(stage))
    alone = measured.tied if layout.num_stages > 1 else 0  # what both ends share is on both stages
    before = (replace(measured.before, params=measured.before.params + alone),) if stage == 0 else ()
    return before + blocks + ((measured.behind,) if stage == layout.num_stages - 1 else ())


def stage_memory(question: OwnQuestion, layout: Layout, rank: int) -> StageMemory:
    """Peak bytes of a rank of pipeline rank `rank`."""
    dims, training = layout.dims, question.training
    measured, element = question.measured(layout), DTYPE_BYTES[training.param_dtype]
    stages = layout.stages(rank)
    held = peak_held(layout.schedule if dims.pp > 1 else "1f1b", rank=rank, pp=dims.pp,
                     virtual_stages=layout.virtual_stages, num_microbatches=layout.num_microbatches)
    pieces = [stage_pieces(measured, layout, stage) for stage in stages]
    whole = sum(piece.params for of_stage in pieces for piece in of_stage)
    shard = -(-whole // dims.fsdp)
    reduced = DTYPE_BYTES[training.reduce_dtype] * whole
    replicated = not layout.shards_weights
    gradients = MASTER_BYTES * shard if layout.shards_gradients else max(MASTER_BYTES * shard, reduced)
    kept = sum(n * _kept(measured, layout, stage) for n, stage in zip(held, stages))
    again = max((measured.blocks[i].saved - _kept_of(measured.blocks[i], layout, hidden=measured.hidden)
                 for stage in stages for i in layout.layers(stage)), default=0.0)  # of the block being recomputed
    again = max(again, DRAWING_BYTES * measured.drawn / element)
    sequences = element * layout.microbatch_size
    last = layout.num_stages - 1 in stages
    vocab = question.model.vocab_size // (dims.tp if question.profile.splits_logits else 1)
    logits = 12 * training.seq_len * layout.microbatch_size * vocab if last else 0
    again = max(0.0, again - logits / sequences)  # logits have gone when the first block is recomputed
    return StageMemory(
        pp_rank=rank, layers=sum(layout.layers_per_stage[stage] for stage in stages), in_flight=max(held),
        parameters_bytes=MASTER_BYTES * shard, gradients_bytes=gradients, optimizer_bytes=ADAM_BYTES * shard,
        gathered_bytes=_gathered_bytes(pieces, layout, whole=whole, shard=shard, element=element,
                                       replicated=replicated),
        activations_bytes=int(sequences * (kept + again)),
        logits_bytes=logits)


def _kept(measured: Measured, layout: Layout, stage: int) -> float:
    """Elements of one sequence that a stage keeps for its backward; the ends are never recomputed."""
    ends = measured.before.saved * (stage == 0) + measured.behind.saved * (stage == layout.num_stages - 1)
    boundary = 2 * measured.hidden if layout.num_stages > 1 else 0  # received and sent on
    return ends + boundary + sum(_kept_of(measured.blocks[i], layout, hidden=measured.hidden)
                                 for i in layout.layers(stage))


def _kept_of(block: Piece, layout: Layout, *, hidden: int) -> float:
    return min(block.saved, {"none": math.inf, "selective": block.kept, "full": hidden}[layout.recompute])


def _gathered_bytes(pieces: list[tuple[Piece, ...]], layout: Layout, *, whole: int, shard: int, element: int,
                    replicated: bool) -> int:
    if replicated:
        return element * whole if element < MASTER_BYTES else element * (whole - shard)
    if layout.dims.pp > 1:
        return element * whole
    largest = layout.layers_per_unit * max(piece.params for of_stage in pieces for piece in of_stage)
    return element * min(whole, GATHERED_UNITS * largest + pieces[0][0].params + pieces[-1][-1].params)
