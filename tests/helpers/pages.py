"""Questions whose plans the page's tests show, and names that try to be more than names."""
import dataclasses

from jobs.spec.model import ModelSpec
from orchestrator.cluster import ClusterSpec
from orchestrator.request import ParallelRequest
from orchestrator.planner import Plan
from orchestrator.planner.page.asked import Asked
from orchestrator.planner.question import Question
from tests.helpers.planning import SMALL, cpu, plan_for, training

HOSTILE = ["<script>document.hacked=1</script>", '"><img src=x onerror="document.hacked=1">',
           "</script><script>document.hacked=1</script>", "</title><style>*{display:none}</style>", "<!--",
           "$title ${data}", "a&lt;b & c\u2028d"]
FEW = {"schedule": "1f1b", "zero_stage": 3, "layers_per_unit": 1, "recompute": "none", "uneven_batch": False}


def asked(model: ModelSpec = SMALL, cluster: ClusterSpec | None = None, *, batch: int = 16, seq_len: int = 128,
          **wishes) -> Asked:
    cluster = cluster or cpu(2)
    dtype = "bfloat16" if cluster.device == "cuda" else "float32"
    question = Question(model=model, training=training(global_batch_size=batch, seq_len=seq_len, param_dtype=dtype),
                        cluster=cluster, request=ParallelRequest(**wishes), num_nodes=cluster.num_nodes,
                        allow_tp_across_nodes=False)
    return Asked(question=question, headroom=0.1, mfu_convention="causal")


def planned(one: Asked) -> Plan:
    question = one.question
    wishes = {f.name: getattr(question.request, f.name) for f in dataclasses.fields(question.request)}
    return plan_for(question.model, question.cluster, question.training, **wishes)
