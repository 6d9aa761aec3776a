"""How states, causes, times and the ledger's parts read and look: the same in the terminal and in pictures.

Used by status, progress and plots.
"""
# kind of diagnosis → colour; others are red
KIND_STYLE = {"completed": "green", "stopped": "yellow", "preemption": "yellow", "time_limit": "yellow"}
STATE_STYLE = {"completed": "bold green", "running": "bold cyan", "pending": "cyan", "stopped": "bold yellow",
               "failed": "bold red", "unknown": "bold magenta"}
# part of the ledger → name and colour
PART_STYLE = {
    "productive_s": ("productive", "#3a9a68"),
    "lost_work_s": ("lost work", "#c2453d"),
    "detection_s": ("detection", "#d9822b"),
    "restart_s": ("restart", "#e7b75f"),
    "validation_s": ("validation", "#8fbf5a"),
    "checkpoint_stall_s": ("checkpoint stall", "#a45ab5"),
    "queue_s": ("queue", "#9fb3c8"),
    "startup_s": ("start-up", "#5b8fc7"),
    "other_s": ("other", "#d5d9de"),
}


def shown(value: float | None, form: str, *, unit: str = "") -> str:
    """A figure, or a dash where it is unknown."""
    return "–" if value is None else f"{value:{form}}{unit}"


def duration(seconds: float) -> str:
    """4.2 s, 3 min 07 s, 5 h 12 min, 2 d 03 h"""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"
