"""python -m orchestrator.cli: the same as `orc`."""
from orchestrator.cli import main

main()
