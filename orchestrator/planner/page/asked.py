"""Asked: the question that a plan answers, kept so that the page can ask it again with one thing changed.

Made from the run's config by the page's entry; read by every section that prices more than the plan holds.
"""
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from jobs.spec.model import AttentionConvention
from jobs.spec.parallel import Layout
from orchestrator.config import RunConfig
from orchestrator.planner.cost import Priced, price, step_timeline
from orchestrator.planner.question import Question, question_of
from orchestrator.planner.refusals import question_problems
from orchestrator.planner.search import Search
from orchestrator.planner.timeline import Timeline
from orchestrator.planner.ways import Ways

# What a layout does with its degrees, beside them
DETAILS = ("schedule", "virtual_stages", "recompute", "sequence_parallel", "zero_stage", "layers_per_unit",
           "reduce_every_microbatch", "cp_method")
DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "microbatch_size", "num_microbatches", "num_nodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    question: Question
    headroom: float
    mfu_convention: AttentionConvention
    ways: Ways = field(default_factory=Ways)  # what one variation's search learns, the next one knows

    def price(self, layout: Layout) -> Priced:
        return price(self.question.model, layout, training=self.question.training, cluster=self.question.cluster,
                     headroom=self.headroom, convention=self.mfu_convention)

    def timeline(self, layout: Layout) -> Timeline:
        return step_timeline(self.question.model, layout, training=self.question.training,
                             cluster=self.question.cluster)

    def wishing(self, **wishes: Any) -> "Asked":
        """The same with other wishes about the layout: fields of ParallelRequest."""
        request = dataclasses.replace(self.question.request, **wishes)
        return self.varied(request=request)

    def varied(self, **changes: Any) -> "Asked":
        """The same with other fields of the question: another model, training, cluster, number of nodes."""
        return dataclasses.replace(self, question=dataclasses.replace(self.question, **changes))

    def without_wishes(self) -> "Asked":
        """Every degree free, whatever the user fixed."""
        return self.wishing(**dict.fromkeys(DEGREES, "auto"), layers_per_stage="auto")

    def in_detail_like(self, layout: Layout) -> "Asked":
        """Degrees as they are wished for, everything else as in `layout`: a much smaller space."""
        return self.wishing(**{name: getattr(layout, name) for name in DETAILS}, mesh_order=list(layout.dims.order))

    def search(self) -> Search | str:
        """A search for the answer, or why there is none."""
        if problems := question_problems(self.question):
            return str(problems[0])
        return Search(self.question, headroom=self.headroom, convention=self.mfu_convention, ways=self.ways)


def described(layout: Layout, *, beside: Layout) -> str:
    """The layout in a line, with those details in which it differs from another."""
    differ = [name for name in DETAILS if getattr(layout, name) != getattr(beside, name)]
    if layout.dims.pp == 1:
        differ = [name for name in differ if name not in ("schedule", "virtual_stages")]
    more = [f"{name}={getattr(layout, name)}" for name in differ]
    if layout.dims.order != beside.dims.order:
        more.append(f"mesh {'×'.join(axis for axis in layout.dims.order if getattr(layout.dims, axis) > 1)}")
    if layout.num_stages == beside.num_stages and layout.layers_per_stage != beside.layers_per_stage:
        more.append(f"stages of {min(layout.layers_per_stage)}–{max(layout.layers_per_stage)} layers")
    return " ".join([str(layout), *more])


def asked_of(config: RunConfig) -> Asked:
    """The question of a run that has a model and a training."""
    return Asked(question=question_of(config, trainable=False), headroom=config.memory.headroom,
                 mfu_convention=config.mfu_convention)
