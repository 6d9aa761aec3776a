"""What makes a pipeline legal: its stages, its schedule and the microbatches that the schedule needs.

Used like rules.py: each rule gives value, axis and the nearest legal values, to what a user fixed and to what the
enumeration proposes alike.
"""
from jobs.spec.load import Problem
from jobs.spec.parallel import VIRTUAL_STAGES, ZERO_BUBBLE_SCHEDULES, Schedule
from orchestrator.planner.question import Question


def pp_problems(pp: int, question: Question) -> list[Problem]:
    layers = question.model.num_layers
    if pp <= layers:
        return []
    return [Problem(where="parallel.pp", value=pp, message=f"is above model.num_layers={layers}: a stage would be "
                                                           f"empty; try at most {layers}")]


def stages_problems(schedule: Schedule, virtual_stages: int, pp: int, question: Question) -> list[Problem]:
    """How many stages of how many layers a rank may hold."""
    least, most = VIRTUAL_STAGES[schedule]
    layers = question.model.num_layers
    if pp == 1 and least > 1:
        return [Problem(where="parallel.schedule", value=schedule, message="is a schedule of a pipeline, but "
                        "pp=1; try pp=2, or 1f1b")]
    if pp == 1:
        return [] if virtual_stages == 1 else [Problem(
            where="parallel.virtual_stages", value=virtual_stages, message="needs a pipeline, but pp=1; try 1")]
    if virtual_stages < least or (most is not None and virtual_stages > most):
        legal = str(least) if least == most else f"at least {least}"
        return [Problem(where="parallel.virtual_stages", value=virtual_stages,
                        message=f"is not what {schedule} runs; try {legal}")]
    if pp * virtual_stages > layers:
        remedy = f"virtual_stages={layers // pp}" if layers // pp >= least else f"pp={layers // least}, or 1f1b"
        return [Problem(where="parallel.virtual_stages", value=virtual_stages, message=f"× pp={pp} is above "
                        f"model.num_layers={layers}: a stage would be empty; try {remedy}")]
    return []


def least_microbatches(schedule: Schedule, pp: int) -> int:
    """As torch.distributed.pipelining asks for."""
    if pp == 1 or schedule in ("gpipe", "zbv"):
        return 1
    return 2 * pp if schedule == "dualpipev" else pp


def microbatch_multiple(schedule: Schedule, pp: int) -> int:
    """Interleaving runs rounds of pp microbatches."""
    return pp if schedule in ("interleaved_1f1b", "interleaved_zero_bubble") else 1


def schedule_problems(schedule: Schedule, num_microbatches: int, pp: int, dp: int, question: Question) -> list[Problem]:
    batch, least = question.training.global_batch_size, least_microbatches(schedule, pp)
    if num_microbatches < least:
        per_stage = 2 if schedule == "dualpipev" else 1
        return [Problem(where="parallel.pp", value=pp, message=f"needs at least {least} microbatches for "
                        f"{schedule}, but global_batch_size={batch} over dp={dp} leaves {num_microbatches}; try "
                        f"pp={max(1, num_microbatches // per_stage)}, a smaller microbatch or dp, or global_batch_size="
                        f"{batch * least // max(1, num_microbatches)}")]
    multiple = microbatch_multiple(schedule, pp)
    if num_microbatches % multiple:
        below = num_microbatches // multiple * multiple
        return [Problem(where="parallel.num_microbatches", value=num_microbatches, message=f"is not a multiple of "
                        f"pp={pp}, as {schedule} needs; try {below} or {below + multiple}")]
    return []


def zero_problems(schedule: Schedule, zero_stage: int, pp: int) -> list[Problem]:
    """A split backward would meet parameters that FSDP has already dropped."""
    if pp > 1 and zero_stage == 3 and schedule in ZERO_BUBBLE_SCHEDULES:
        return [Problem(where="parallel.zero_stage", value=3, message=f"drops parameters after each use, but "
                        f"{schedule} needs them again for the weights' gradients; try zero_stage 1 or 2")]
    return []


def split_problems(layers_per_stage: tuple[int, ...], pp: int, virtual_stages: int,
                   question: Question) -> list[Problem]:
    """A split that the user wrote out: every layer exactly once, so that none is dropped silently."""
    layers, stages = question.model.num_layers, pp * virtual_stages
    found = []
    if sum(layers_per_stage) != layers:
        found.append(f"has {sum(layers_per_stage)} layers, but model.num_layers={layers}; "
                     f"{abs(layers - sum(layers_per_stage))} {'more' if sum(layers_per_stage) < layers else 'fewer'} "
                     "would do")
    if len(layers_per_stage) != stages:
        found.append(f"has {len(layers_per_stage)} stages, but pp × virtual_stages = {pp} × {virtual_stages} = "
                     f"{stages}")
    return [Problem(where="parallel.layers_per_stage", value=list(layers_per_stage), message=m) for m in found]
