"""`python -m jobs.verify JOB.json RANK`: the rank's report as JSON on standard output."""
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

from jobs.spec.job import JobSpec
from jobs.spec.load import from_dict, to_dict
from jobs.verify import verify


def main() -> None:
    """What goes wrong is the answer: one line of it for the caller, a traceback above for a reader."""
    path, rank = sys.argv[1], int(sys.argv[2])
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    job = from_dict(JobSpec, json.loads(Path(path).read_text()), origin=path)
    if job.workdir is not None:  # of a model of the user's own
        os.chdir(job.workdir)
        sys.path.insert(0, job.workdir)
    try:
        print(json.dumps(to_dict(verify(job, rank=rank))))
    except ValueError as refused:
        sys.exit(f"refused: {refused}")
    except Exception as error:  # noqa: BLE001  whatever the step raises
        traceback.print_exc()
        while error.__cause__ is not None:  # a pipeline wraps what its stage raised
            error = error.__cause__
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        sys.exit(f"{type(error).__name__}: {first}")


if __name__ == "__main__":
    main()
