"""Figures with their unit, and a layout in words: what terminal and page write alike."""
from jobs.spec.parallel import Layout


def seconds(value: float) -> str:
    """1.25 s, 12.5 ms, 8.0 µs"""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"


def size(value: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def params(count: int) -> str:
    return f"{count / 1e9:,.2f} B" if count >= 1e9 else f"{count / 1e6:,.2f} M"


def details(layout: Layout) -> str:
    """Everything but degrees and batch, in words."""
    dims, layers = layout.dims, layout.layers_per_stage
    words = []
    if dims.pp > 1:
        split = str(layers[0]) if len(set(layers)) == 1 else f"{min(layers)}–{max(layers)}"
        split += " layers" if max(layers) > 1 else " layer"
        stages = f" × {layout.virtual_stages} per rank" if layout.virtual_stages > 1 else ""
        words.append(f"{layout.schedule}{stages}, {split} per stage")
    else:
        words.append(f"no pipeline, {layers[0]} layer{'s' if layers[0] > 1 else ''} per stage")
    if dims.fsdp > 1:
        words.append(f"ZeRO-{layout.zero_stage}" + (f" of {layout.layers_per_unit} layers" if layout.layers_per_unit > 1
                                                    else ""))
    if layout.reduce_every_microbatch:
        words.append("reduced every microbatch")
    if dims.cp > 1:
        words.append(f"cp by {layout.cp_method}")
    if dims.tp > 1 and not layout.sequence_parallel:
        words.append("no sequence parallelism")
    return ", ".join([*words, f"recompute {layout.recompute}"])
