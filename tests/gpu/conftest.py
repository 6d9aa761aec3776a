"""Every test below runs on CUDA and NCCL, and is skipped with the reason where that cannot be."""
import pytest

from tests.helpers import device


@pytest.fixture(autouse=True)
def on_cuda(request, monkeypatch) -> None:
    """A test that needs more than one GPU has `world_size` among its parameters."""
    call = getattr(request.node, "callspec", None)
    world_size = call.params.get("world_size", 1) if call else 1
    if reason := device.missing_gpus(world_size):
        pytest.skip(reason)
    monkeypatch.setenv(device.VARIABLE, "cuda")
