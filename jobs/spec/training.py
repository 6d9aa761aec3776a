"""What is trained on, how long and with which optimizer: everything that does change the result."""
from dataclasses import dataclass, field
from typing import Literal

DType = Literal["float32", "bfloat16"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """A token file (PREFIX.bin, with PREFIX.idx beside it), or text that is read as bytes: a file or a folder."""

    path: str
    weight: float = 1.0  # share of the samples, relative to the other sources' weights
    pattern: str = "**/*"  # glob below `path`, where it is a folder
    exclude: tuple[str, ...] = ()  # path parts that are skipped, e.g. site-packages


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """One source, `path`, or a mixture of `sources`.

    A path is that of a token file, or its prefix, or of text; `${python_stdlib:}` in YAML is the running Python's own
    library.
    """

    path: str | None = None
    pattern: str = "**/*"  # of `path`, as is `exclude`; see SourceSpec
    exclude: tuple[str, ...] = ()
    sources: list[SourceSpec] = field(default_factory=list)
    max_epochs: float | None = None  # a run that would see a source more often is refused; None: as often as it takes
    document_mask: bool = False  # a token sees its own document only, and positions restart with each document
    # What the last token of a document is trained on: the next document's first token, or nothing. auto: nothing where
    # documents are masked. Tokens that train on nothing still count in the mean: the others weigh as much as ever.
    document_ends: Literal["auto", "predict", "ignore"] = "auto"

    @property
    def all_sources(self) -> list[SourceSpec]:
        if self.path is None:
            return self.sources
        return [SourceSpec(path=self.path, pattern=self.pattern, exclude=self.exclude)]

    @property
    def ignores_document_ends(self) -> bool:
        return self.document_mask if self.document_ends == "auto" else self.document_ends == "ignore"


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
class ValidationSpec:
    """The loss on data that is not trained on, always of the same batches, and after the last step, too."""

    data: DataSpec
    interval_steps: int = 100
    batches: int = 10  # of global_batch_size sequences; a sequence is used once


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec:
    steps: int
    seq_len: int
    global_batch_size: int  # sequences per optimizer step, whatever the layout
    seed: int = 0
    initial_weights: str | None = None  # folder of Hugging Face safetensors to start from; None: random, from the seed
    param_dtype: DType = "float32"  # forward and backward (float32: never TF32); master weights stay float32
    # Of the reduction of gradients. With bfloat16 for both, and zero_stage=3, FSDP sums a rank's microbatches in it,
    # too, unless parallel.reduce_every_microbatch: 32 of them were three times as far off as one.
    reduce_dtype: DType = "float32"
    compile: bool = False  # torch.compile of each layer: a first step of many seconds, and fewer and larger kernels
    z_loss: float = 0.0  # weight of the mean of log²(Σ exp(logits)) in the loss (PaLM, arXiv:2204.02311, §5: 1e-4)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    validation: ValidationSpec | None = field(default=None, hash=False)  # a DataSpec has no hash; the planner needs one


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpec:
    interval_steps: int = 100
    keep: int = 3  # committed checkpoints kept; older ones are removed by the supervisor
