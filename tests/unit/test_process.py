"""What the fork server asks of the CUDA driver, with a library in the driver's place: no GPU is needed to be asked."""
import os
import shutil
import subprocess
import sys

import pytest

# the two functions of the driver that matter: cuInit, and one that fails with 3 before it
DRIVER = """
static int code = 3;
int cuInit(unsigned flags) { code = 0; return 0; }
int cuCtxGetCurrent(void **context) { *context = 0; return code; }
"""
ASK = """
import ctypes
from jobs.process import cuda_driver_is_initialized
before = cuda_driver_is_initialized()
ctypes.CDLL("libcuda.so.1").cuInit(0)
print(before, cuda_driver_is_initialized())
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_driver_that_was_woken_forbids_forks_and_asking_does_not_wake_it(tmp_path):
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    found = subprocess.run([sys.executable, "-c", ASK], env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
                           capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]
