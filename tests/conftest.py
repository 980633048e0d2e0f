"""What every test stands on: no network, one thread for each worker, and memory that can be poisoned on request."""

from __future__ import annotations

import os

# Before any library reads them.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", NO_COLOR="1")
IN_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IN_WORKER:
    # Subprocesses of a test inherit it.
    os.environ["OMP_NUM_THREADS"] = "1"

from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
REAL_DATA = ROOT.parent / "shared" / "data"

if IN_WORKER:
    torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Before triton is imported: its kernels then run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def real_data() -> Path:
    """The folder of real data beside the repository; the test is skipped where there is none."""
    if not REAL_DATA.is_dir():
        pytest.skip("needs the real data in ../shared/data")
    return REAL_DATA


@pytest.fixture(autouse=True)
def own_cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs of tests keep their tokens and references to themselves, not in the user's cache."""
    if request.node.path.parent.name in ("cli", "train"):
        monkeypatch.setenv("LONGTUNE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN (integers: their largest value; booleans: True) for the length of the test.

    A result that reads memory before it was written is then plainly wrong instead of right by luck.
    """

    def poisoning(make: Any) -> Any:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            return poison(make(*args, **kwargs))

        return poisoned

    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a tensor with NaN, or the nearest that its dtype has."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        value: float | int | bool = float("nan")
    elif tensor.dtype == torch.bool:
        value = True
    else:
        value = torch.iinfo(tensor.dtype).max
    with torch.no_grad():
        return tensor.fill_(value)
