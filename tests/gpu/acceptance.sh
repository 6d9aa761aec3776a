#!/bin/bash
# Does it train on this GPU? A ~1B decoder in bfloat16 with recompute and torch.compile, beside a loop written by hand;
# a checkpoint, a kill, a resume. Less than 8 minutes; exits with 1 and the reason where anything is not as it should be.
#
#   tests/gpu/acceptance.sh                       on the first GPU
#   tests/gpu/acceptance.sh --device cpu --tiny   the same steps with a toy, to try this script anywhere
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
[ -x "$python" ] || { echo "acceptance: .venv is missing; run make setup first" >&2; exit 1; }
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec timeout --signal=INT --kill-after=20 480 "$python" -m tests.gpu.acceptance "$@"
