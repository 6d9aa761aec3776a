"""python -m orchestrator.supervision RUN_DIR --local-nodes N: the supervisor of virtual nodes on this machine."""
import argparse
import sys
from pathlib import Path

from orchestrator.submission.local import LocalLauncher
from orchestrator.supervision.supervisor import main

parser = argparse.ArgumentParser(prog="python -m orchestrator.supervision", description=__doc__)
parser.add_argument("run_dir", type=Path)
parser.add_argument("--local-nodes", type=int, required=True)
args = parser.parse_args()
sys.exit(main(args.run_dir, LocalLauncher(args.local_nodes)))
