"""The job's published contract: what it accepts and what it reports.

The only part of `jobs` that `orchestrator` imports. Standard library and omegaconf only.
"""
