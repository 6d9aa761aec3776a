"""Accelerators: memory, peak FLOP/s and links, as published; the planner predicts and the ranks
compute MFU from the same figures.

Sources: vendor data sheets, dense peaks; link per GPU and direction. `matmul_efficiency` is the best bf16 GEMM
measured over the peak (A100 271/312, H100 794.5/989, B200 1745/2250, GB200 1822/2500, MI300X 668/1300), and stands
for the other precisions of the same chip. `nvlink_domain` is how many GPUs the fast links join: a node of 8, or 72
over 18 nodes. A cluster file may replace any of it by a measurement.
"""
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    name: str
    memory_gib: float  # that a process can use
    peak_bf16_tflops: float
    peak_fp32_tflops: float  # IEEE's: training in float32 never uses TF32, whose products have 10 bits
    memory_bandwidth_gb_s: float
    matmul_efficiency: float
    link_gb_s: float  # per GPU and direction, inside the NVLink domain
    peak_fp8_tflops: float | None = None  # None: no fp8 units
    peak_fp4_tflops: float | None = None
    nvlink_domain: int = 8  # GPUs that the fast links join
    nic_gb_s: float = 25.0  # per GPU and direction, of the usual network of its time
    # FlashAttention-2 against attention kernels written for the chip: it knows no matrix unit later than Ampere's.
    # Hopper: the rows of torchtitan, of 8k to 262k tokens; Blackwell is taken to be like it
    portable_attention: float = 1.0
    multiprocessors: int = 1  # that share a matmul tile by tile

    def peak_tflops(self, dtype: str) -> float:
        """Dense peak of a matmul in `dtype`; of the next wider precision where the chip has no units for it."""
        half = self.peak_bf16_tflops
        by_dtype = {"bfloat16": half, "float16": half, "float8": self.peak_fp8_tflops or half,
                    "float4": self.peak_fp4_tflops or self.peak_fp8_tflops or half}
        return by_dtype.get(dtype, self.peak_fp32_tflops)


def _gpu(name: str, memory: float, bf16: float, fp32: float, bandwidth: float, eff: float, link: float,
         **rest: float) -> GpuSpec:
    return GpuSpec(name=name, memory_gib=memory, peak_bf16_tflops=bf16, peak_fp32_tflops=fp32,
                   memory_bandwidth_gb_s=bandwidth, matmul_efficiency=eff, link_gb_s=link, **rest)


_HOPPER = {"peak_fp8_tflops": 1979.0, "nic_gb_s": 50.0, "multiprocessors": 132,
           "portable_attention": 0.69}
_BLACKWELL = {"multiprocessors": 148, "portable_attention": 0.69}

GPUS = {
    gpu.name: gpu
    for gpu in (
        #     name        GiB    bf16   fp32   HBM GB/s  eff   link GB/s
        _gpu("a100-40gb", 40.0, 312.0, 19.5, 1555.0, 0.87, 300.0, multiprocessors=108),
        _gpu("a100-80gb", 80.0, 312.0, 19.5, 2039.0, 0.87, 300.0, multiprocessors=108),
        _gpu("h100", 80.0, 989.0, 67.0, 3350.0, 0.80, 450.0, **_HOPPER),
        # HBM2e and 500 W instead of 700: the ceiling of the same units is scaled by √(500/700); so are B300 and GB300
        _gpu("h100-96gb", 95.0, 989.0, 67.0, 2400.0, 0.68, 450.0, **_HOPPER),
        _gpu("h200", 141.0, 989.0, 67.0, 4800.0, 0.80, 450.0, **_HOPPER),
        _gpu("h800", 80.0, 989.0, 67.0, 3350.0, 0.80, 200.0, **_HOPPER),
        _gpu("b200", 180.0, 2250.0, 75.0, 8000.0, 0.78, 900.0, peak_fp8_tflops=4500.0, peak_fp4_tflops=9000.0,
             nic_gb_s=50.0, **_BLACKWELL),
        _gpu("b300", 268.0, 2250.0, 75.0, 8000.0, 0.82, 900.0, peak_fp8_tflops=4500.0, peak_fp4_tflops=13500.0,
             nic_gb_s=100.0, **_BLACKWELL),
        _gpu("gb200", 186.0, 2500.0, 80.0, 8000.0, 0.73, 900.0, peak_fp8_tflops=5000.0, peak_fp4_tflops=10000.0,
             nvlink_domain=72, nic_gb_s=50.0, **_BLACKWELL),
        _gpu("gb300", 277.0, 2500.0, 80.0, 8000.0, 0.79, 900.0, peak_fp8_tflops=5000.0, peak_fp4_tflops=15000.0,
             nvlink_domain=72, nic_gb_s=100.0, **_BLACKWELL),
        _gpu("mi300x", 192.0, 1307.0, 163.4, 5300.0, 0.51, 448.0, peak_fp8_tflops=2614.0, nic_gb_s=50.0,
             multiprocessors=304),
        # One rank of a virtual node. Peak: one AVX2 core shared by four ranks, measured with a float32
        # GEMM on 2 cores; a cluster file may override it (cluster.peak_tflops).
        _gpu("cpu", 2.0, 0.02, 0.02, 5.0, 0.80, 1.0, nic_gb_s=1.0, nvlink_domain=1),
    )
}
