"""One torch thread (15 times faster on a busy machine), no network, Portuguese messages."""

import gc
import os

os.environ.update(
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    HF_HUB_OFFLINE="1",
    LORA_TRAINER_LANG="pt",
    TOKENIZERS_PARALLELISM="false",
    NO_COLOR="1",
)

import pytest
import torch

torch.set_num_threads(1)


gc.set_threshold(20_000, 20, 20)
"""Graphs of thousands of modules and fake tensors come and go; what matters to memory is collected by the runs themselves."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """`pytest -n 2`: neighbours stay together, which use the same bases and plans, and who is done helps the other."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


@pytest.fixture(autouse=True)
def _portuguese():
    from lora_trainer import errors

    errors.set_language("auto")
    yield
    errors.set_language("auto")


@pytest.fixture(scope="session", autouse=True)
def _bases_in_a_folder_of_pytests(tmp_path_factory):
    """What helpers write once for many tests goes away with pytest's other folders."""
    import tempfile

    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("bases"))
    yield
    tempfile.tempdir = before


@pytest.fixture(scope="module", autouse=True)
def _libraries_are_no_garbage():
    """Runs collect garbage in full; a second each time, if every class of every library is looked through."""
    gc.collect()
    gc.freeze()
