"""Readers of a run's history: status, report, goodput ledger, plots and W&B.

Everything here is derived from `events.jsonl` and the other files of the run directory; nothing here is
ever waited for by training or supervision, and nothing here writes to the history.
"""
