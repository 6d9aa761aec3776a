"""Accelerators: memory, peak FLOP/s and links, as published; the planner predicts and the ranks
compute MFU from the same figures.

Sources: vendor data sheets (dense peaks); `matmul_efficiency` is the best GEMM measured over the
bf16 peak (A100 271/312, H100 794.5/989, B200 1745/2250, GB200 1822/2500, MI300X 668/1300).
"""
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSpec:
    name: str
    memory_gib: float
    peak_bf16_tflops: float
    peak_fp32_tflops: float
    memory_bandwidth_gb_s: float
    matmul_efficiency: float
    link_gb_s: float  # per GPU and direction, inside the node

    def peak_tflops(self, dtype: str) -> float:
        return self.peak_bf16_tflops if dtype == "bfloat16" else self.peak_fp32_tflops


def _gpu(name: str, memory: float, bf16: float, fp32: float, bandwidth: float, eff: float, link: float) -> GpuSpec:
    return GpuSpec(name=name, memory_gib=memory, peak_bf16_tflops=bf16, peak_fp32_tflops=fp32,
                   memory_bandwidth_gb_s=bandwidth, matmul_efficiency=eff, link_gb_s=link)


GPUS = {
    gpu.name: gpu
    for gpu in (
        #     name        GiB    bf16   fp32(tf32)  HBM GB/s  eff   link GB/s
        _gpu("a100-40gb", 40.0, 312.0, 156.0, 1555.0, 0.87, 300.0),
        _gpu("a100-80gb", 80.0, 312.0, 156.0, 2039.0, 0.87, 300.0),
        _gpu("h100", 80.0, 989.0, 494.0, 3350.0, 0.80, 450.0),
        _gpu("h200", 141.0, 989.0, 494.0, 4800.0, 0.80, 450.0),
        _gpu("h800", 80.0, 989.0, 494.0, 3350.0, 0.80, 200.0),
        _gpu("b200", 180.0, 2250.0, 1125.0, 8000.0, 0.78, 900.0),
        _gpu("gb200", 186.0, 2500.0, 1250.0, 8000.0, 0.73, 900.0),
        _gpu("mi300x", 192.0, 1307.0, 653.0, 5300.0, 0.51, 448.0),
        # One rank of a virtual node. Peak: one AVX2 core shared by four ranks, measured with a float32
        # GEMM on 2 cores; a cluster file may override it (cluster.peak_tflops).
        _gpu("cpu", 2.0, 0.02, 0.02, 5.0, 0.80, 1.0),
    )
}
