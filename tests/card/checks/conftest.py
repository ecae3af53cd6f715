"""Checks that run on the pretended card, in a process of its own (test_card.py starts it): no fault may be left unseen."""

import gc

import emucuda
import pytest
import torch


@pytest.fixture(autouse=True)
def _no_reports():
    emucuda.clear()
    yield
    gc.collect()
    torch.cuda.synchronize()
    left = emucuda.reports()
    emucuda.clear()
    assert left == []


@pytest.fixture
def empty_card():
    """Nothing cached, no workspace, peaks at what is there."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
