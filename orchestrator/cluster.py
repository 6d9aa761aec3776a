"""The cluster as the planner and the placement see it: nodes, GPUs, links, and how jobs get onto it."""
from dataclasses import dataclass, field
from typing import Any, Literal

from jobs.spec.hardware import GPUS, GpuSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSpec:
    """What the sbatch script asks for, beside nodes and GPUs."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_min: int = 60
    cpus_per_node: int | None = None
    mem_gb: int | None = None  # per node
    gres: str | None = None  # None: gpu:<gpus_per_node> unless cluster.gpu is cpu
    exclude: list[str] = field(default_factory=list)
    signal_lead_s: int = 120  # the warning before a time limit
    setup: list[str] = field(default_factory=list)  # shell lines before the supervisor starts
    extra: dict[str, Any] = field(default_factory=dict)  # any other sbatch parameter, e.g. {reservation: big}


@dataclass(frozen=True, kw_only=True, slots=True)
class SwitchSpec:
    """One level of the switch tree: how many nodes hang below one switch, and how much narrower its way up is."""

    nodes: int
    oversubscription: float = 1.0  # bandwidth below a switch over the bandwidth that leaves it; 1: non-blocking


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSpec:
    """num_nodes × gpus_per_node ranks, one per GPU (gpu: cpu gives CPU ranks)."""

    name: str
    kind: Literal["local", "slurm"]
    num_nodes: int
    gpus_per_node: int
    gpu: str  # a name of jobs.spec.hardware.GPUS
    inter_node_gb_s: float = 50.0  # per GPU and direction, leaving the node
    intra_node_latency_us: float = 3.5  # per hop: a 1 MiB all-reduce over 8 H200 takes 46 µs in 14 hops
    inter_node_latency_us: float = 20.0
    # None: the published figure of `gpu`
    intra_node_gb_s: float | None = None
    peak_tflops: float | None = None
    memory_gib: float | None = None
    matmul_efficiency: float | None = None  # best GEMM over the peak
    memory_bandwidth_gb_s: float | None = None
    nvlink_domain: int | None = None  # GPUs that the fast links join; a multiple of gpus_per_node where they span nodes
    switches: list[SwitchSpec] = field(default_factory=list)  # leaf first; empty: one non-blocking switch
    threads_per_rank: int | None = None  # OMP_NUM_THREADS; None: the node's CPUs / ranks
    slurm: SlurmSpec = field(default_factory=SlurmSpec)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return "cpu" if self.gpu == "cpu" else "cuda"

    @property
    def hardware(self) -> GpuSpec:
        return GPUS[self.gpu]

    @property
    def gpu_memory_gib(self) -> float:
        return self.hardware.memory_gib if self.memory_gib is None else self.memory_gib

    @property
    def link_gb_s(self) -> float:
        """Inside the node, per GPU and direction."""
        return self.hardware.link_gb_s if self.intra_node_gb_s is None else self.intra_node_gb_s

    @property
    def domain_gpus(self) -> int:
        """GPUs that the fast links join: whole nodes, or one node where a node is all there is."""
        domain = self.hardware.nvlink_domain if self.nvlink_domain is None else self.nvlink_domain
        return max(1, domain // self.gpus_per_node) * self.gpus_per_node

    @property
    def matmul_ceiling(self) -> float:
        """Share of the peak that the best measured matmul reaches."""
        return self.hardware.matmul_efficiency if self.matmul_efficiency is None else self.matmul_efficiency

    @property
    def hbm_gb_s(self) -> float:
        measured = self.memory_bandwidth_gb_s
        return self.hardware.memory_bandwidth_gb_s if measured is None else measured

    def peak(self, dtype: str) -> float:
        """TFLOP/s of one rank."""
        return self.hardware.peak_tflops(dtype) if self.peak_tflops is None else self.peak_tflops
