"""decide: from a diagnosis, the run's history and the policy to the next act. Pure.

v1 of the recovery ladder: restart on the same nodes, or stop. Spares, re-planning and fresh
submissions are later rungs and will be further acts here.
"""
from jobs.spec.events import Decision, Diagnosis
from orchestrator.config import PolicySpec


def decide(diagnosis: Diagnosis, *, history: tuple[Decision, ...], newest_step: int | None, policy: PolicySpec,
           t: float) -> Decision:
    """`history`: earlier decisions of this run, oldest first; `newest_step`: newest committed checkpoint.

    The budget counts restarts since the run last got a new checkpoint: progress resets it, so a long
    run may survive any number of faults, and a crash loop ends after `max_restarts`.
    """
    def decision(act, reason, **more) -> Decision:
        return Decision(t=t, attempt=diagnosis.attempt, act=act, reason=reason, **more)

    match diagnosis.kind:
        case "completed":
            return decision("finish", "every rank has done its last step")
        case "stopped" | "time_limit" | "preemption":
            return decision("stop", f"{diagnosis.summary}; `orc resume` continues {_from(newest_step)}",
                            resume_step=newest_step)
        case "divergence":
            return decision("stop", f"{diagnosis.summary}, and computing it again would give the same; change the data "
                            f"or the optimizer, then `orc resume` continues {_from(newest_step)}",
                            resume_step=newest_step)
        case "user_error":
            return decision("stop", f"a restart would end the same way: {diagnosis.summary}", resume_step=newest_step)
    spent = _restarts_without_progress(history, newest_step)
    if spent >= policy.max_restarts:
        return decision("stop", f"{spent} restarts {_from(newest_step)} without a new checkpoint; "
                        f"policy.max_restarts is {policy.max_restarts}", resume_step=newest_step)
    delay = min(policy.backoff_s * 2**(spent - 1), policy.backoff_max_s) if spent else 0.0
    return decision("restart", f"{spent + 1} of {policy.max_restarts} restarts without a new checkpoint",
                    resume_step=newest_step, delay_s=delay)


def _restarts_without_progress(history: tuple[Decision, ...], newest_step: int | None) -> int:
    count = 0
    for earlier in reversed(history):
        if earlier.act != "restart" or earlier.resume_step != newest_step:
            break
        count += 1
    return count


def _from(step: int | None) -> str:
    return "from step 0" if step is None else f"from the checkpoint of step {step}"
