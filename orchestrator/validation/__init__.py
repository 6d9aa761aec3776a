"""Predictions held against measured runs: `orc validate TABLE.csv`.

A table of published runs → each row's model, layout, cluster and software → predicted step time and memory →
statistics per group. Called by the command line and by tests. A row's id and source never enter a prediction;
its model's name only where public sizes are found under it; its group says which rows are compared with one another,
and which ran as one job.
"""
from pathlib import Path

from orchestrator.validation.predict import predict
from orchestrator.validation.report import Report, report_of
from orchestrator.validation.table import read_table

__all__ = ["Report", "validate"]


def validate(path: Path, *, group_by: str = "group") -> Report:
    """Predict every row of a CSV. Raises SpecError if the file cannot be read as a table of runs."""
    rows = read_table(path, group_by=group_by)
    return report_of(predict(rows))
