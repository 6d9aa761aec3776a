"""Forward passes that no backward follows: what they must leave as they found it, and their order in a pipeline.

Used by jobs.parallel and its pipeline for validation, under no_grad. Knows neither loss nor data.
"""
import contextlib
from collections.abc import Iterator

import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _Action, _ComputationType

FORWARDS = (_ComputationType.FORWARD, _ComputationType.SEND_F, _ComputationType.RECV_F)


@contextlib.contextmanager
def evaluating(model_parts: tuple[nn.Module, ...]) -> Iterator[None]:
    """Modules know that they are not trained; afterwards all is as before, whatever mode each was in."""
    trained = [module for part in model_parts for module in part.modules() if module.training]
    for module in trained:
        module.training = False
    yield
    for module in trained:
        module.training = True
    for part in model_parts:
        if isinstance(part, FSDPModule):
            # Its last units stay gathered for a backward, and it notes which forwards a backward has to go through: the
            # next one would gather units twice.
            part.reset_iter_state()


def forwards_of(order: list[_Action]) -> list[_Action]:
    """Of a rank's order of training what forward passes need. Of all ranks it is an order again in which nobody waits
    for ever: forwards wait for forwards alone."""
    single = [one for action in order for one in action.sub_actions or (action,)]
    return [action for action in single if action.computation_type in FORWARDS]
