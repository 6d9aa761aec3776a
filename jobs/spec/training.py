"""What is trained on, how long and with which optimizer: everything that does change the result."""
from dataclasses import dataclass, field
from typing import Literal

DType = Literal["float32", "bfloat16"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Text files, read as bytes and memory-mapped as one token file.

    `path` is a folder or a file; `${python_stdlib:}` in YAML is the running Python's own library.
    """

    path: str
    pattern: str = "**/*"  # glob below `path`
    exclude: tuple[str, ...] = ()  # path parts that are skipped, e.g. site-packages


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """AdamW with linear warm-up, then a decay to min_lr_ratio·lr: a cosine over all steps, or (wsd: warm-up, stable,
    decay) none until the last decay_fraction of the steps and a straight line from there."""

    lr: float = 3e-4
    lr_schedule: Literal["cosine", "wsd"] = "cosine"
    decay_fraction: float = 0.1  # of all steps; wsd only
    min_lr_ratio: float = 0.1
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec:
    steps: int
    seq_len: int
    global_batch_size: int  # sequences per optimizer step, whatever the layout
    seed: int = 0
    initial_weights: str | None = None  # folder of Hugging Face safetensors to start from; None: random, from the seed
    param_dtype: DType = "float32"  # forward and backward; master weights stay float32
    reduce_dtype: DType = "float32"  # gradient reduction
    z_loss: float = 0.0  # weight of the mean of log²(Σ exp(logits)) in the loss (PaLM, arXiv:2204.02311, §5: 1e-4)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpec:
    interval_steps: int = 100
    keep: int = 3  # committed checkpoints kept; older ones are removed by the supervisor
